"""One leg of `bench churn` with real processes: trainers that learn, faults, and a supervisor.

One rule: the supervisor knows only that a process ended, as systemd would; it never learns which
fault was planned.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moshpitd.cli.bench_faults import Diary, Fault, Leg
from moshpitd.cli.bench_meters import MachineTime, group_of, processes_naming
from moshpitd.cli.bench_processes import POLL_S, Swarm, end, memory_of
from moshpitd.cli.demo_processes import Child, DemoFailed, Node, exit_words
from moshpitd.cli.demo_story import JsonLines
from moshpitd.errors import DaemonUnavailable
from moshpitd.rpc.calls import Calls

RESTART_S = 1.0  # systemd's RestartSec in our unit file, and long enough to be noticed
TOGETHER_S = 90.0  # until all trainers of a leg have met: imports of twelve processes on two cores
FINISH_S = 90.0  # a trainer that was told to leave may be in a round (its timeout is 60 s)
DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What all trainers of a bench are told alike."""

    step_s: float
    every_s: float
    numel: int
    overlap: bool  # rounds run while the trainer computes


@dataclass(slots=True)
class Learner:
    """A node's trainer over its lives."""

    diary: Diary
    lives: int = 0
    child: Child | None = None
    lines: JsonLines | None = None
    restart_at: float | None = None

    def listen(self) -> None:
        for line in self.lines.new() if self.lines is not None else ():
            self.diary.hear(line)


class Supervisor:
    """Invariant: what ended is started again after RESTART_S, until the leg is over."""

    def __init__(self, swarm: Swarm, pace: Pace, say: Callable[[str], None]) -> None:
        self.swarm, self._pace, self._say = swarm, pace, say
        self._learners: list[Learner] = []
        self._daemons_at: dict[int, float] = {}  # node -> when to start its daemon again
        self._run = ""

    def leg(self, run: str, *, seconds: float, faults: Sequence[Fault]) -> Leg:
        """Start the trainers anew, let them meet, then `seconds` with these faults."""
        self._run = run
        self._learners = [Learner(Diary()) for _ in self.swarm.nodes]
        for index in range(len(self.swarm.nodes)):
            self._start_learner(index)
        self._meet()
        began, machine = time.monotonic(), MachineTime.now()
        leg = Leg(began, began + seconds, [one.diary for one in self._learners], self._peer_ids())
        fates = [self._fate(fault, leg) for fault in faults]
        while time.monotonic() < leg.ended:
            fates = [fate for fate in fates if next(fate, "over") != "over"]
            self._supervise()
            time.sleep(POLL_S)
        leg.busy = MachineTime.now().load_since(machine)
        for (
            fate
        ) in fates:  # what is still frozen goes on; the plan leaves time, a late fault may not
            for _ in fate:
                time.sleep(POLL_S)
        self._finish()
        return leg

    # -- faults -----------------------------------------------------------------------------------

    def _fate(self, fault: Fault, leg: Leg) -> Iterator[None]:
        """Yields while it waits; notes in the leg when it began and when it was over."""
        while time.monotonic() - leg.began < fault.at_s:
            yield
        node, learner = self.swarm.nodes[fault.node], self._learners[fault.node]
        began = time.monotonic()
        self._say(f"{began - leg.began:6.1f} s: {fault.kind.replace('_', ' ')}, {node.name}")
        place = len(leg.done)
        leg.done.append((fault, began, leg.ended))
        match fault.kind:
            case "kill_daemon":
                _living(node.daemon).kill()
            case "kill_trainer":
                _living(learner.child).kill()
            case "freeze":
                frozen = [_living(node.daemon), _living(learner.child)]
                _signal_all(frozen, signal.SIGSTOP)
                while time.monotonic() - began < fault.for_s:
                    yield
                _signal_all(frozen, signal.SIGCONT)
            case "drain":
                self._drain(node)
            case "restart":
                _living(node.daemon).ask_to_leave()
        yield from self._recovery(fault)
        leg.done[place] = (fault, began, time.monotonic())

    def _recovery(self, fault: Fault) -> Iterator[None]:
        """Until the node's daemon has joined and its trainer is training again."""
        node, learner = self.swarm.nodes[fault.node], self._learners[fault.node]
        yield
        while True:
            up = node.daemon is not None and node.daemon.code is None
            trains = learner.child is not None and learner.child.code is None
            if up and trains and fault.node not in self._daemons_at:
                status = node.status()
                attached = status is not None and any(
                    one.run == self._run and one.trainers for one in status.runs
                )
                if status is not None and status.joined and not status.draining and attached:
                    return
            yield

    def _drain(self, node: Node) -> None:
        calls = Calls(node.socket)
        try:
            calls.drain(DRAIN_S)
        except DaemonUnavailable as error:
            self._say(f"{node.name} cannot be drained: {error}")
        finally:
            calls.close()

    # -- supervision ------------------------------------------------------------------------------

    def _supervise(self) -> None:
        now = time.monotonic()
        for index, node in enumerate(self.swarm.nodes):
            if node.daemon is not None and node.daemon.code is not None:
                restart_at = self._daemons_at.setdefault(index, now + RESTART_S)
                if now >= restart_at:
                    node.daemon.kill()  # its group: nothing of its last life may be left
                    node.close()
                    node.start_daemon(self.swarm.children)
                    del self._daemons_at[index]
            learner = self._learners[index]
            learner.listen()
            if learner.child is not None and learner.child.code is not None:
                learner.restart_at = learner.restart_at or now + RESTART_S
                if now >= learner.restart_at:
                    learner.child.kill()
                    self._start_learner(index)

    def _start_learner(self, index: int) -> None:
        learner, node, pace = self._learners[index], self.swarm.nodes[index], self._pace
        learner.lives += 1
        learner.restart_at = None
        told = node.folder / f"{self._run}-{learner.lives}.jsonl"
        learner.lines = JsonLines(told)
        numbers = {
            "--index": index,
            "--of": len(self.swarm.nodes),
            "--life": learner.lives,
            "--pace": pace.step_s,
            "--every": pace.every_s,
            "--numel": pace.numel,
            "--overlap": int(pace.overlap),
        }
        options = [word for name, number in numbers.items() for word in (name, str(number))]
        arguments = ["-m", "moshpitd.testing.bench.learner", "--socket", str(node.socket)]
        learner.child = self.swarm.children.start(
            f"the trainer of {node.name}",
            [*arguments, "--run", self._run, "--json", str(told), *options],
            node.folder / "trainer.log",
        )

    def _meet(self) -> None:
        """Until every trainer has been in a round with all others."""
        everybody = len(self._learners)

        def met() -> bool:
            for learner in self._learners:
                learner.listen()
                self._alive(learner)
            return all(
                any(one["participants"] == everybody for one in learner.diary.rounds)
                for learner in self._learners
            )

        self.swarm.wait(met, "a round of all trainers", TOGETHER_S)

    def _alive(self, learner: Learner) -> None:
        child = learner.child
        if child is not None and child.code is not None:
            raise DemoFailed(f"{child.name} ended with {exit_words(child.code)}", (child.log,))

    def _finish(self) -> None:
        """All trainers leave after their step and tell their loss."""
        children = [one.child for one in self._learners if one.child is not None]
        for child in children:
            child.ask_to_leave()
        until = time.monotonic() + FINISH_S
        while any(child.code is None for child in children) and time.monotonic() < until:
            time.sleep(POLL_S)
        for learner in self._learners:
            learner.listen()
        for child in children:
            child.kill()

    def _peer_ids(self) -> list[str]:
        statuses = [node.status() for node in self.swarm.nodes]
        return [status.peer_id if status is not None else "" for status in statuses]


# -- what is left behind --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """What the nodes hold while they run: counted before the faults and after."""

    processes: int
    sockets: int
    buckets: int

    @classmethod
    def now(cls, swarm: Swarm) -> Held:
        folder = swarm.children.folder
        return cls(
            len(processes_naming(folder.name)),
            len(_sockets(folder)),
            len(_files(memory_of(folder))) + len(_files(folder, "buffers")),
        )

    def more_than(self, before: Held) -> list[str]:
        """In words, what there is more of than there was."""
        pairs = {
            "processes": (self.processes, before.processes),
            "sockets": (self.sockets, before.sockets),
            "mapped files": (self.buckets, before.buckets),
        }
        return [
            f"{now} {what} while all nodes ran again, {then} before the faults"
            for what, (now, then) in pairs.items()
            if now > then
        ]


def strays(swarm: Swarm) -> list[str]:
    """Processes of ours in a group that no living child leads."""
    living = {one.process.pid for one in swarm.children.started if one.code is None}
    living.add(swarm.children.will.pid)
    return [
        f"process {pid} without its parent: {line[:120]}"
        for pid, line in processes_naming(swarm.children.folder.name).items()
        if group_of(pid) not in living
    ]


def end_and_look(swarm: Swarm) -> list[str]:
    """End everything in order; what did not go, or stayed behind."""
    folder = swarm.children.folder
    swarm.close()
    leaks = [f"{name} did not leave and was killed" for name in end(swarm.children)]
    leaks += [
        f"process {pid} left: {line[:120]}" for pid, line in processes_naming(folder.name).items()
    ]
    leaks += [f"socket left: {path.name}" for path in _sockets(folder)]
    left = [*_files(memory_of(folder)), *_files(folder, "buffers")]
    return leaks + [f"mapped file left: {path.name}" for path in left]


def _sockets(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                found.append(path)
    return found


def _files(folder: Path, within: str = "") -> list[Path]:
    """Files below `folder`; with `within` only those in a directory of that name."""
    paths = folder.rglob(f"{within}/**/*" if within else "*")
    return sorted(path for path in paths if path.is_file())


def _living(child: Child | None) -> Child:
    assert child is not None
    child.expected_to_end = True
    return child


def _signal_all(children: Sequence[Child], number: signal.Signals) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
