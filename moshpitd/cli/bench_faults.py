"""What happens to whom in `bench churn`, and what two legs of it say: the pure part.

One rule: the same seed, the same faults; and only half of the nodes are ever hurt, so that there
always are trainers of which nothing but the swarm's own reaction could take a step.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from moshpitd.cli.bench_figures import Bar

Kind = Literal["kill_daemon", "kill_trainer", "freeze", "drain", "restart"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FROM, UNTIL = 0.05, 0.85
"""Of the leg: at its end everybody should be back, or the last fault would not be survived but cut
off."""
FREEZE_S = (10.0, 60.0)
RECOVERY_S = 15.0
"""After a fault's end its node may still be missing from rounds: imports, joining, catching up."""
THROUGHPUT_AT_LEAST, ROUNDS_AT_LEAST = 0.97, 0.90
SPREADS = 3.0  # more than chance gives to the mean of several trainers


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s` since the leg began; `for_s` only where something ends by itself (a freeze)."""

    kind: Kind
    node: int
    at_s: float
    for_s: float = 0.0

    @property
    def hurts_trainer(self) -> bool:
        """Whether the trainer itself stands still or dies. A frozen node is a frozen machine."""
        return self.kind in ("kill_trainer", "freeze")


def plan_faults(count: int, *, nodes: int, leg_s: float, rng: random.Random) -> list[Fault]:
    """`count` faults in time order, every kind about as often, each node at rest before its next.

    Victims are the nodes of the second half; a node is not hit while an earlier fault may last.
    """
    kinds: list[Kind] = []
    while len(kinds) < count:
        batch = list(KINDS)
        rng.shuffle(batch)
        kinds += batch
    longest = max(FREEZE_S[0], min(FREEZE_S[1], leg_s / 5))
    times = sorted(rng.uniform(FROM, UNTIL) * leg_s for _ in range(count))
    free_at = dict.fromkeys(range((nodes + 1) // 2, nodes), 0.0)
    faults = []
    for kind, at_s in zip(kinds, times, strict=False):
        for_s = rng.uniform(FREEZE_S[0], longest) if kind == "freeze" else 0.0
        if for_s:
            at_s = min(at_s, max(0.0, UNTIL * leg_s - for_s))
        rested = [node for node, free in free_at.items() if free <= at_s]
        # All of a small swarm may be busy: then the one that is rested soonest, a little later.
        node = rng.choice(rested) if rested else min(free_at, key=lambda one: free_at[one])
        at_s = max(at_s, free_at[node])
        free_at[node] = at_s + for_s + RECOVERY_S
        faults.append(Fault(kind, node, at_s, for_s))
    return sorted(faults, key=lambda fault: fault.at_s)


@dataclass(slots=True)
class Diary:
    """What one trainer told in one leg, all its lives; instants of the machine's clock."""

    steps: list[tuple[float, int]] = field(default_factory=list)  # of its first life
    rounds: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    missed: int = 0
    lives: int = 0

    def hear(self, line: Mapping[str, Any]) -> None:
        match line["event"]:
            case "start":
                self.lives += 1
            case "step" | "end":
                if self.lives <= 1:
                    self.steps.append((line["at"], line["step"]))
                    self.missed = line["missed"]
                if line["event"] == "end":
                    self.losses.append(line["loss"])
            case "round":
                self.rounds.append(dict(line))

    def steps_per_s(self, began: float, ended: float) -> float:
        """Between two instants, from the first and the last line in between."""
        inside = [one for one in self.steps if began <= one[0] <= ended]
        if len(inside) < 2:
            return 0.0
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        return (last - first) / (last_at - first_at)

    def together(self, began: float, ended: float) -> list[dict[str, Any]]:
        """Rounds in company that ended in between."""
        return [
            one
            for one in self.rounds
            if began <= one["at"] <= ended and one["status"] in ("complete", "partial")
        ]


@dataclass(slots=True)
class Leg:
    """One leg as it was. `diaries` and `peer_ids` by node; `done` are the faults as they happened,
    with the end of each as an instant."""

    began: float
    ended: float
    diaries: list[Diary]
    peer_ids: list[str]
    done: list[tuple[Fault, float, float]] = field(default_factory=list)
    busy: float = 0.0

    def survivors(self) -> list[int]:
        """Nodes whose trainer was never hurt itself; its daemon may have been."""
        hurt = {fault.node for fault, _, _ in self.done if fault.hurts_trainer}
        return [node for node in range(len(self.diaries)) if node not in hurt]

    def throughput(self, nodes: Sequence[int]) -> float:
        """Steps per second, mean over these nodes."""
        rates = [self.diaries[node].steps_per_s(self.began, self.ended) for node in nodes]
        return sum(rates) / max(1, len(rates))

    def rounds(self, nodes: Sequence[int]) -> float:
        """Rounds in company, mean over these nodes."""
        counts = [len(self.diaries[node].together(self.began, self.ended)) for node in nodes]
        return sum(counts) / max(1, len(counts))

    def loss(self, nodes: Sequence[int]) -> float | None:
        """On the common test set, over the last half minute; mean over these nodes."""
        losses = [loss for node in nodes for loss in self.diaries[node].losses[-1:]]
        return sum(losses) / len(losses) if losses else None

    def loss_spread(self, nodes: Sequence[int]) -> float | None:
        """Standard deviation between these trainers, whose local steps are their own: the noise
        that a difference of losses is held against."""
        losses = [loss for node in nodes for loss in self.diaries[node].losses[-1:]]
        return statistics.stdev(losses) if len(losses) > 1 else None

    def hurt_at(self, at: float) -> set[int]:
        """Nodes that may be missing from a round that ended at this instant."""
        return {
            fault.node for fault, began, ended in self.done if began <= at <= ended + RECOVERY_S
        }

    def whole_rounds(self) -> dict[str, Any]:
        """`seen` rounds, each group once, as the nodes of the first half saw them; `whole`: how
        many had every node inside that had no reason to be missing; `short`: the others, with the
        nodes that were missing without one."""
        seen: set[str] = set()
        short: dict[str, dict[str, Any]] = {}
        for node in range((len(self.diaries) + 1) // 2):
            for one in self.diaries[node].together(self.began, self.ended):
                group = one["group_id"]
                if group in seen:
                    continue
                seen.add(group)
                inside, hurt = set(one["contributors"]), self.hurt_at(one["at"])
                expected = set(range(len(self.peer_ids))) - hurt
                missing = [i for i in sorted(expected) if self.peer_ids[i] not in inside]
                if missing:
                    short[group] = {
                        "at_s": round(one["at"] - self.began, 3),
                        "group_id": group,
                        "missing": missing,
                        "hurt": sorted(hurt),
                        "status": one["status"],
                    }
        return {"whole": len(seen) - len(short), "seen": len(seen), "short": [*short.values()]}


def compare(still: Leg, stormy: Leg, leaks: Sequence[str], *, seed: int) -> dict[str, Any]:
    """The report's figures."""
    survivors = stormy.survivors()
    whole = stormy.whole_rounds()
    loss, loss_undisturbed = stormy.loss(survivors), still.loss(survivors)
    spread = still.loss_spread(survivors)
    beyond = None
    if loss is not None and loss_undisturbed is not None and spread:
        beyond = (loss - loss_undisturbed) / spread
    steps = _over(stormy.throughput(survivors), still.throughput(survivors))
    rounds = _over(stormy.rounds(survivors), still.rounds(survivors))
    figures: dict[str, Any] = {
        "throughput_ratio": steps,
        "rounds_ratio": rounds,
        "loss": loss,
        "loss_undisturbed": loss_undisturbed,
        "loss_spread": spread,
        "faults": [
            {**asdict(fault), "began_s": began - stormy.began, "over_s": over - stormy.began}
            for fault, began, over in stormy.done
        ],
        "leaks": list(leaks),
        "seed": seed,
        "survivors": survivors,
        "steps_per_s": stormy.throughput(survivors),
        "steps_per_s_undisturbed": still.throughput(survivors),
        "rounds": stormy.rounds(survivors),
        "rounds_undisturbed": still.rounds(survivors),
        "rounds_whole": whole,
        "rounds_whole_undisturbed": still.whole_rounds(),
        "busy": stormy.busy,
        "busy_undisturbed": still.busy,
        "missed": [diary.missed for diary in stormy.diaries],
    }
    bars = [
        _at_least("steps per second lost", steps, THROUGHPUT_AT_LEAST),
        _at_least("rounds lost", rounds, ROUNDS_AT_LEAST),
        Bar("rounds without somebody who had no fault", float(len(whole["short"])), 0.0),
        Bar("final loss beyond the undisturbed one, in its spread", beyond, SPREADS),
        Bar("things leaked", float(len(leaks)), 0.0),
        Bar("share of the machine that was busy without faults", still.busy, 0.5),
    ]
    figures["bars"] = [bar.as_dict() for bar in bars]
    return figures


def _over(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


def _at_least(what: str, ratio: float | None, least: float) -> Bar:
    """A ratio that has to be high, as a loss that has to be low."""
    lost = None if ratio is None else 1.0 - ratio
    return Bar(f"{what}, as a share of the undisturbed", lost, round(1.0 - least, 6))
