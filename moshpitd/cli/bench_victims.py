"""Trials with real daemons: a round, a victim that is hit inside it, and everybody back again.

One rule: when a victim is hit is read from the kernel's count of what its sockets moved, so that
the daemons work as they would without a watcher.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from moshpitd.cli.bench_meters import LinkMeter, Moved, wait_stopped
from moshpitd.cli.bench_processes import Swarm, ask_all
from moshpitd.cli.bench_systems import CALL_TIMEOUT_S, not_the_mean, not_whole
from moshpitd.cli.bench_trials import (
    WEIGHTS,
    Course,
    Moment,
    Trial,
    draw_moment,
    hit,
    judge,
    third_of,
)
from moshpitd.cli.demo_processes import DemoFailed

Fate = Literal["kill", "freeze"]
SETTLE_TRIES = 8
"""Rounds until everybody is in one again after a restart; more mean that somebody stays out."""
NAP_S = (0.0005, 0.05)
"""Between two looks at the sockets, which take 0.3 ms: near the moment, and far from it."""
CLOSING_IN = 0.3  # the nap is this share of what should be left until the moment
AFTERWARDS_S = 30.0
WATCHFUL = -10  # nice value, where one may have it


@dataclass(slots=True)
class Strike:
    """A victim and when it was hit; `moved` is None until it was. `moment` None: together with the
    first one."""

    victim: int
    moment: Moment | None
    moved: Moved | None = None


class Victims:
    """Invariant: between two trials all daemons run, all trainers are attached, and the last round
    had everybody in it."""

    def __init__(
        self,
        swarm: Swarm,
        *,
        codec: str,
        seed: int,
        redraws: int,
        say: Callable[[str], None],
    ) -> None:
        self.swarm = swarm
        self.undisturbed: list[float] = []
        self._codec, self._redraws, self._say = codec, redraws, say
        self._rng = random.Random(seed)
        self._round = 0
        self._weights = WEIGHTS[: len(swarm.nodes)]
        self._meter = LinkMeter({node.index: node.ports[1] for node in swarm.nodes})
        self._courses: list[Course] = []

    def start(self, undisturbed: int) -> None:
        """Everything up, and a few rounds in which nothing happens."""
        self.swarm.start()
        self.swarm.attach(f"bench-{secrets.token_hex(4)}")
        self._watch()
        ask_all(self.swarm.trainers, "fill", round=0, same=True)
        self.swarm.average(timeout_s=CALL_TIMEOUT_S)
        self._hear_all()
        self.settle()
        payload = self.swarm.trainers[0].ask("payload", codec=self._codec)["bytes"]
        moved: list[dict[int, Moved]] = []
        for number in range(undisturbed):
            before = self._meter.read()
            seconds = self._whole_round()
            after = self._meter.read()
            moved.append({index: after[index] - before[index] for index in after})
            self.undisturbed.append(seconds)
            self._say(f"undisturbed round {number + 1}: {seconds:.3f} s")
        self._courses = [
            Course(_median_moved([one[node.index] for one in moved]), payload, len(moved[0]))
            for node in self.swarm.nodes
        ]

    def trial(self, number: int, moment: Moment, *, kill: int, fate: Fate) -> Trial | None:
        """One trial, with a moment drawn anew while the old one was missed. None when it was missed
        every time: tiny rounds are over before a signal arrives."""
        for redrawn in range(self._redraws + 1):
            victims = self._rng.sample(range(len(self.swarm.nodes)), kill)
            # Half of the time all at once, else each at a moment of its own, which the round's end
            # may forestall.
            at_once = redrawn > 0 or self._rng.random() < 0.5
            others = [None if at_once else draw_moment("anywhere", self._rng) for _ in victims[1:]]
            strikes = [
                Strike(who, when) for who, when in zip(victims, [moment, *others], strict=True)
            ]
            trial = self._try(number, strikes, fate)
            if trial is not None:
                trial.redrawn = redrawn
                if redrawn == self._redraws or hit(
                    moment,
                    fraction=trial.killed_at_byte_fraction,
                    after_first_result=trial.after_first_result,
                ):
                    return trial
            moment = draw_moment(moment.place, self._rng)
        return None

    def settle(self) -> float:
        """Rounds until everybody is in one; the seconds that took."""
        began = time.monotonic()
        trouble = ""
        for _ in range(SETTLE_TRIES):
            trouble = not_whole(self._round_of_all())
            if not trouble:
                return time.monotonic() - began
        raise DemoFailed(
            f"after {SETTLE_TRIES} rounds not everybody is in one: {trouble}", self.swarm.logs()
        )

    # -- one trial --------------------------------------------------------------------------------

    def _try(self, number: int, strikes: list[Strike], fate: Fate) -> Trial | None:
        """None when the round was over before everybody that should was hit."""
        victims = [strike.victim for strike in strikes]
        survivors = [i for i in range(len(self.swarm.nodes)) if i not in victims]
        self._round += 1
        ask_all(self.swarm.trainers, "fill", round=self._round)
        base = self._meter.read()
        self.swarm.average(timeout_s=CALL_TIMEOUT_S, weights=self._weights)
        answers = self._strike(strikes, survivors, base, fate)
        for index in survivors:
            if index not in answers:
                answers[index] = self.swarm.trainers[index].hear(CALL_TIMEOUT_S + AFTERWARDS_S)
        struck = [strike for strike in strikes if strike.moved is not None]
        for strike in struck:
            if fate == "freeze":
                self._signal(strike.victim, signal.SIGCONT)
        told = {i: self.swarm.trainers[i].hear(CALL_TIMEOUT_S + AFTERWARDS_S) for i in victims}
        trial = None
        if len(struck) == len(strikes):
            trial = self._judged(number, strikes, {i: answers[i] for i in survivors})
        recovered_s = self._back([strike.victim for strike in struck], fate)
        if trial is not None:
            trial.recovered_s = recovered_s
            trial.problems += [
                f"victim {i}: {answer['error']}"
                for i, answer in told.items()
                if fate == "freeze" and "error" in answer
            ]
        return trial

    def _strike(
        self, strikes: list[Strike], survivors: Sequence[int], base: dict[int, Moved], fate: Fate
    ) -> dict[int, dict[str, Any]]:
        """Hit every victim at its moment; what survivors said meanwhile, by index."""
        answers: dict[int, dict[str, Any]] = {}
        with _attentive():
            self._watch_for(strikes, survivors, base, fate, answers)
        return answers

    def _watch_for(
        self,
        strikes: list[Strike],
        survivors: Sequence[int],
        base: dict[int, Moved],
        fate: Fate,
        answers: dict[int, dict[str, Any]],
    ) -> None:
        expected_s = sorted(self.undisturbed)[len(self.undisturbed) // 2]
        until = time.monotonic() + CALL_TIMEOUT_S
        while time.monotonic() < until and len(answers) < len(survivors):
            now = self._meter.read()
            nearest = 1.0
            for strike in strikes:
                if strike.moved is not None:
                    continue
                if strike.moment is None:
                    if strikes[0].moved is not None:
                        self._hit(strike, base[strike.victim], fate)
                    continue
                moved = now[strike.victim] - base[strike.victim]
                left = self._courses[strike.victim].wait(strike.moment, moved)
                nearest = min(nearest, left)
                if left <= 0 and moved.both > 0:
                    self._hit(strike, base[strike.victim], fate)
            if all(strike.moved is not None for strike in strikes):
                break
            for index in survivors:
                if index not in answers:
                    answer = self.swarm.trainers[index].heard()
                    if answer is not None:
                        answers[index] = answer
            time.sleep(min(max(CLOSING_IN * nearest * expected_s, NAP_S[0]), NAP_S[1]))

    def _hit(self, strike: Strike, base: Moved, fate: Fate) -> None:
        """Stop it, read what it has moved, and then kill it: between a look at the sockets and a
        signal a busy machine may do anything."""
        node = self.swarm.nodes[strike.victim]
        assert node.daemon is not None
        self._signal(strike.victim, signal.SIGSTOP)
        wait_stopped(node.daemon.process.pid)
        strike.moved = self._meter.read()[strike.victim] - base
        if fate == "kill":
            node.daemon.kill()

    def _signal(self, victim: int, number: signal.Signals) -> None:
        daemon = self.swarm.nodes[victim].daemon
        assert daemon is not None
        os.killpg(daemon.process.pid, number)  # with its p2pd, as a frozen machine would

    def _judged(
        self, number: int, strikes: list[Strike], answers: dict[int, dict[str, Any]]
    ) -> Trial:
        fractions, after = [], False
        for place, strike in enumerate(strikes):
            assert strike.moved is not None
            course = self._courses[strike.victim]
            fractions.append(course.fraction(strike.moved))
            if place == 0:
                after = strike.moved.sent > course.result_left
        victims = [strike.victim for strike in strikes]
        first = strikes[0].moment
        assert first is not None
        trial = Trial(
            trial=number,
            victims=victims,
            place=first.place,
            killed_at_byte_fraction=fractions[0],
            fractions=fractions,
            third=third_of(fractions[0]),
            after_first_result=after,
        )
        survivors = [self.swarm.trainers[i] for i in answers]
        checks = ask_all(
            survivors,
            "check",
            round=self._round,
            weights=list(self._weights),
            codec=self._codec,
            doubtful=victims,
            fingerprint=True,
        )
        judge(
            trial,
            answers,
            dict(zip(answers, checks, strict=True)),
            peer_ids=self.swarm.peer_ids,
            weights=self._weights,
        )
        return trial

    def _back(self, struck: list[int], fate: Fate) -> float:
        """Everybody is there again, and in one round."""
        began = time.monotonic()
        if fate == "kill":
            for victim in struck:
                self.swarm.nodes[victim].close()
                self.swarm.nodes[victim].start_daemon(self.swarm.children)
            for victim in struck:
                self.swarm.wait_joined(self.swarm.nodes[victim])
            self._watch()
        for victim in struck:
            self.swarm.trainers[victim].ask("sync", timeout_s=60.0, patience_s=150.0)
        self.settle()
        return time.monotonic() - began

    # -- rounds -----------------------------------------------------------------------------------

    def _whole_round(self) -> float:
        """Seconds of a round of everybody, checked."""
        answers = self._round_of_all()
        checks = ask_all(
            self.swarm.trainers,
            "check",
            round=self._round,
            weights=list(self._weights),
            codec=self._codec,
        )
        trouble = not_whole(answers) or not_the_mean(checks, len(answers))
        if trouble:
            raise DemoFailed(f"an undisturbed round failed: {trouble}", self.swarm.logs())
        return float(max(a["ended"] for a in answers) - min(a["began"] for a in answers))

    def _round_of_all(self) -> list[dict[str, Any]]:
        self._round += 1
        ask_all(self.swarm.trainers, "fill", round=self._round)
        self.swarm.average(timeout_s=CALL_TIMEOUT_S, weights=self._weights)
        return self._hear_all()

    def _hear_all(self) -> list[dict[str, Any]]:
        return [one.hear(CALL_TIMEOUT_S + AFTERWARDS_S) for one in self.swarm.trainers]

    def _watch(self) -> None:
        self._meter.watch(dict(self._pids()))

    def _pids(self) -> Iterator[tuple[int, int]]:
        for node in self.swarm.nodes:
            if node.daemon is not None:
                yield node.index, node.daemon.process.pid


@contextmanager
def _attentive() -> Iterator[None]:
    """The watcher sleeps nearly always; when it wakes up it must run, if the machine lets it."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, WATCHFUL)
    try:
        yield
    finally:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, usual)


def _median_moved(moved: Sequence[Moved]) -> Moved:
    middle = len(moved) // 2
    return Moved(
        sorted(one.sent for one in moved)[middle], sorted(one.received for one in moved)[middle]
    )
