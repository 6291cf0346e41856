"""The systems that `bench allreduce` and `bench latency` compare: ours, gloo, hivemind.

One rule: all average the same values, asked the same way, and a round whose result is not the mean
of everybody within the codec's bound does not count, whoever made it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moshpitd.cli.bench_meters import cpu_s, loopback_bytes, peak_rss_bytes, reset_peaks
from moshpitd.cli.bench_processes import (
    START_S,
    Swarm,
    Worker,
    ask_all,
    start_worker,
)
from moshpitd.cli.demo_processes import PACKAGE_ROOT, Children, free_ports
from moshpitd.errors import ConfigError

CALL_TIMEOUT_S = 120.0
"""Of one average: twenty times what 100 million values take, and below the daemon's own end of an
exchange (600 s)."""
BASELINE = PACKAGE_ROOT / "scripts" / "baseline_hivemind.py"


@dataclass(slots=True)
class Measured:
    """One round of one system. It counts if `trouble` is empty. `phases` of the slowest trainer;
    `told_bytes` is what the system itself reports, None where it reports nothing."""

    seconds: float
    trouble: str = ""
    attach_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    bytes_sent: int = 0
    told_bytes: int | None = None
    peak_rss_bytes: int = 0


class System(Protocol):
    """Invariant: `measure` follows `start`, and every number of a round is used once."""

    name: str

    def start(self) -> None:
        """Processes up; the first round may still have to connect them."""
        ...

    def renew(self) -> float:
        """All attach to a new run; the seconds that took."""
        ...

    def measure(self, number: int, *, same: bool = False) -> Measured:
        """One round. `same`: all contribute the same values, as in the first round of a run."""
        ...

    def close(self) -> None: ...


class Meter:
    """Processor time and bytes between two instants. Invariant: `leaders` are alive in between."""

    def __init__(self, leaders: list[int]) -> None:
        self._leaders = leaders
        reset_peaks(leaders)
        self._cpu_s, self._bytes = cpu_s(leaders), loopback_bytes()

    def into(self, measured: Measured) -> Measured:
        measured.bytes_sent = loopback_bytes() - self._bytes
        measured.cpu_s = cpu_s(self._leaders) - self._cpu_s
        measured.peak_rss_bytes = peak_rss_bytes(self._leaders)
        return measured


class Ours:
    """Daemons, and a trainer process for each."""

    name = "moshpitd"

    def __init__(self, swarm: Swarm, *, codec: str, synced: bool = False) -> None:
        self.swarm = swarm
        self._codec, self._synced = codec, synced

    def start(self) -> None:
        self.swarm.start()

    def renew(self) -> float:
        return _span(self.swarm.attach(f"bench-{secrets.token_hex(4)}", sync=self._synced))

    def measure(self, number: int, *, same: bool = False) -> Measured:
        trainers = self.swarm.trainers
        ask_all(trainers, "fill", round=number, same=same)
        meter = Meter(self.swarm.leaders())
        self.swarm.average(timeout_s=CALL_TIMEOUT_S)
        answers = [trainer.hear(CALL_TIMEOUT_S + 30.0) for trainer in trainers]
        seconds = _span(answers)
        measured = meter.into(Measured(seconds))
        results = [answer.get("result") for answer in answers]
        last = max(answers, key=lambda answer: answer["ended"])
        phases = dict((last.get("result") or {}).get("seconds", {}))
        measured.phases = {**phases, "rest": seconds - sum(phases.values())}
        measured.told_bytes = sum(one["bytes_sent"] for one in results if one)
        measured.trouble = not_whole(answers) or self._wrong(number, same=same)
        return measured

    def close(self) -> None:
        self.swarm.close()

    def _wrong(self, number: int, *, same: bool) -> str:
        """What is not the mean of everybody, in words."""
        if same:
            return ""  # a mean of equal values says little; the rounds that count differ
        count = len(self.swarm.trainers)
        checks = ask_all(
            self.swarm.trainers, "check", round=number, weights=[1] * count, codec=self._codec
        )
        return not_the_mean(checks, count)


class Gloo:
    """Ranks of torch's all-reduce. Their only codec is float32."""

    name = "gloo"

    def __init__(self, children: Children, folder: Path, *, peers: int, numel: int) -> None:
        self._children, self._folder = children, folder
        self._peers, self._numel = peers, numel
        self._ranks: list[Worker] = []

    def start(self) -> None:
        (port,) = free_ports(1)
        for rank in range(self._peers):
            arguments = ["-m", "moshpitd.testing.bench.gloo", "--rank", str(rank)]
            arguments += ["--of", str(self._peers), "--numel", str(self._numel)]
            log = self._folder / f"gloo-{rank}.log"
            name = f"gloo's rank {rank}"
            self._ranks.append(
                start_worker(self._children, name, [*arguments, "--port", str(port)], log)
            )
        for rank_worker in self._ranks:
            rank_worker.hear(START_S)
        ask_all(self._ranks, "attach", patience_s=START_S)

    def renew(self) -> float:
        return 0.0

    def measure(self, number: int, *, same: bool = False) -> Measured:
        ask_all(self._ranks, "fill", round=number)
        meter = Meter([rank.child.process.pid for rank in self._ranks])
        answers = ask_all(self._ranks, "average", patience_s=CALL_TIMEOUT_S)
        measured = meter.into(Measured(_span(answers)))
        measured.trouble = not_the_mean(ask_all(self._ranks, "check", round=number), self._peers)
        return measured

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class Hivemind:
    """One process that holds the averagers' handles; the averagers are processes of its own."""

    name = "hivemind"

    def __init__(
        self, children: Children, folder: Path, *, peers: int, numel: int, codec: str = "float32"
    ) -> None:
        self._children, self._folder = children, folder
        self._arguments = [str(BASELINE), "--peers", str(peers), "--numel", str(numel)]
        self._arguments += ["--codec", codec, "--sockets", str(folder)]
        self._worker: Worker | None = None

    def start(self) -> None:
        log = self._folder / "hivemind.log"
        self._worker = start_worker(self._children, "hivemind", self._arguments, log)
        self._worker.hear(START_S)

    def renew(self) -> float:
        seconds: float = self._live.ask("attach", patience_s=START_S)["seconds"]
        return seconds

    def measure(self, number: int, *, same: bool = False) -> Measured:
        worker = self._live
        worker.ask("fill", round=number)
        meter = Meter([worker.child.process.pid])
        patience_s = 2 * CALL_TIMEOUT_S + 30.0
        answer = worker.ask("average", patience_s=patience_s, timeout_s=CALL_TIMEOUT_S)
        measured = meter.into(Measured(_span([answer])))
        measured.trouble = answer["trouble"] or worker.ask("check", round=number)["trouble"]
        return measured

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def _live(self) -> Worker:
        assert self._worker is not None
        return self._worker


def check_baseline(codec: str) -> None:
    """Raise ConfigError where hivemind cannot be compared with."""
    if not BASELINE.exists():
        raise ConfigError(
            f"{BASELINE} does not exist: hivemind's averagers are started from a source checkout",
            key="--against",
            expected="a checkout of moshpitd, or gloo",
        )
    if codec not in HIVEMIND_CODECS:
        raise ConfigError(
            f"hivemind's {codec} is not compared with: its 8-bit codecs lose every part",
            key="--codec",
            expected=f"one of {', '.join(HIVEMIND_CODECS)}, or no --against hivemind",
        )


HIVEMIND_CODECS = ("float32", "float16")


def _span(answers: list[dict[str, Any]]) -> float:
    """From the first call to the last result: the slowest counts."""
    return float(max(a["ended"] for a in answers) - min(a["began"] for a in answers))


def not_whole(answers: list[dict[str, Any]]) -> str:
    """Why not every trainer was told "complete, with everybody"; empty when all were."""
    troubles = []
    for index, answer in enumerate(answers):
        result = answer.get("result")
        if result is None:
            troubles.append(f"trainer {index}: {answer.get('error')}")
        elif result["status"] != "complete" or result["participants"] != len(answers):
            words = f"{result['status']}, {result['participants']} of {result['group_size']}"
            why = [result["reason"], result["detail"], *map(str, result["excluded"].values())]
            troubles.append(f"trainer {index}: {', '.join(filter(None, [words, *why]))}")
    return "; ".join(troubles)


def not_the_mean(checks: list[dict[str, Any]], count: int) -> str:
    """Why these values are not the mean of all; empty when they are."""
    everybody = ",".join(map(str, range(count)))
    for index, check in enumerate(checks):
        right = check["inside"].get(everybody, 0)
        if right != check["parts"]:
            return (
                f"trainer {index}: {check['parts'] - right} of {check['parts']} parts are not the "
                f"mean of all within the codec's bound (inside: {check['inside']})"
            )
    return ""
