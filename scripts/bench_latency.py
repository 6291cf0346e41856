"""Seconds from call to result of a round with tiny tensors: what a round costs beside its bytes.

Real daemons on loopback and a trainer thread each. cold: every round is the first of a new run, of
which nobody knows anything (attached without a sync, so that the call itself announces, looks up,
agrees on a lineage, finds a group and averages). warm: the next rounds of one run. hivemind takes
turns with us, round by round, so that whatever else this machine does slows both down alike.

One rule: only a round in which every trainer was told "complete, all participants", and holds the
right values, counts; any other is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by us and by hivemind

import torch

from moshpitd.cli.demo_processes import LEAVE_S, Child, Children, DemoFailed, Node, free_ports, tail
from moshpitd.cli.demo_story import Story
from moshpitd.client import attach
from moshpitd.client.result import Result
from moshpitd.client.session import Session
from moshpitd.errors import MoshpitError

Kind = Literal["cold", "warm"]
KINDS: tuple[Kind, ...] = ("cold", "warm")
NUMEL = 256
START_S = 120.0  # imports, several times at once
CALL_TIMEOUT_S = 30.0
PAUSE_S = 0.05  # the last messages of one round must not fall into the next
ROUNDS_MAX = 60  # a daemon keeps at most 64 runs, and every cold round is one
BASELINE = Path(__file__).with_name("baseline_hivemind.py")


@dataclass(slots=True)
class Measured:
    """One round. It counts if `trouble` is empty; `phases` of the slowest trainer."""

    seconds: float
    trouble: str = ""
    attach_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """What one trainer got, and when."""

    got: Any
    began: float
    ended: float


class System(Protocol):
    name: str

    def measure(self, kind: Kind) -> Measured:
        """One round; a warm one follows a cold one of the same run."""
        ...


class Ours:
    """Daemons, and a trainer thread for each."""

    name = "moshpitd"

    def __init__(self, children: Children, folder: Path, peers: int, *, synced: bool) -> None:
        self._children = children
        self._synced = synced
        ports = free_ports(2 * peers)
        self.nodes = [
            Node(
                index,
                folder / f"peer-{index}",
                folder / f"{index}.sock",
                (ports[2 * index], ports[2 * index + 1]),
                Story(0),
            )
            for index in range(peers)
        ]
        self._sessions: list[Session] = []
        self._tensors = [torch.zeros(NUMEL) for _ in self.nodes]
        self._threads = ThreadPoolExecutor(peers, thread_name_prefix="trainer")

    def start(self) -> None:
        """All daemons up, and joined through the first."""
        first, *others = self.nodes
        first.write_config(bootstrap=[], max_group=16)
        first.start_daemon(self._children)
        self._wait(lambda: _address(first) != "", "the first daemon")
        for node in others:
            node.write_config(bootstrap=[_address(first)], max_group=16)
            node.start_daemon(self._children)
        for node in others:
            self._wait(lambda node=node: _joined(node), node.name)  # type: ignore[misc]

    def measure(self, kind: Kind) -> Measured:
        attach_s = self._renew() if kind == "cold" else 0.0
        # A run begins with the same parameters everywhere: others would be another lineage, which
        # takes a snapshot and contributes nothing to its first round.
        values = [1.0] * len(self.nodes)
        if kind == "warm":
            values = [float(index) for index in range(len(self.nodes))]
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.fill_(value)
        calls = self._everybody(
            lambda index: self._sessions[index].average(timeout_s=CALL_TIMEOUT_S)
        )
        last = max(calls, key=lambda call: call.ended)
        seconds = last.ended - min(call.began for call in calls)
        told = [call.got for call in calls]
        phases = dict(last.got.seconds) if isinstance(last.got, Result) else {}
        phases["rest"] = seconds - sum(phases.values())
        return Measured(seconds, self._trouble(told, values), attach_s, phases)

    def close(self) -> None:
        self._detach()
        # A call that still waits ends with its daemon, which is ended next.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for node in self.nodes:
            node.close()

    def _renew(self) -> float:
        """Everybody attaches to a new run; the seconds that took."""
        self._detach()
        run = f"bench-{secrets.token_hex(4)}"
        for tensor in self._tensors:
            tensor.fill_(1.0)
        calls = self._everybody(
            lambda index: attach(
                run=run,
                tensors=[self._tensors[index]],
                socket=self.nodes[index].socket,
                sync=self._synced,
                timeout_s=CALL_TIMEOUT_S,
            )
        )
        self._sessions = [call.got for call in calls if isinstance(call.got, Session)]
        for call in calls:
            if isinstance(call.got, MoshpitError):
                raise call.got
        if not all(one.wait_attached(CALL_TIMEOUT_S) for one in self._sessions):
            raise DemoFailed("a trainer could not attach", self._logs())
        return time.perf_counter() - min(call.began for call in calls)

    def _detach(self) -> None:
        for session in self._sessions:
            session.close()
        self._sessions.clear()

    def _everybody(self, act: Callable[[int], Any]) -> list[Call]:
        """The same in all trainers at once."""
        start = threading.Barrier(len(self.nodes))

        def one(index: int) -> Call:
            start.wait(CALL_TIMEOUT_S)
            began = time.perf_counter()
            try:
                got = act(index)
            except MoshpitError as error:
                got = error
            return Call(got, began, time.perf_counter())

        return list(self._threads.map(one, range(len(self.nodes))))

    def _trouble(self, told: Sequence[Any], values: list[float]) -> str:
        """Why the round does not count; empty when it does."""
        whole = [
            isinstance(one, Result) and one.status == "complete" and one.participants == len(told)
            for one in told
        ]
        if not all(whole):
            return "; ".join(f"trainer {index}: {one}" for index, one in enumerate(told))
        mean = sum(values) / len(values)
        for index, tensor in enumerate(self._tensors):
            if not torch.allclose(tensor, torch.full((NUMEL,), mean)):
                return f"trainer {index} has {tensor[0].item()}, expected {mean}"
        return ""

    def _wait(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + START_S
        while not true():
            self._children.check()
            if time.monotonic() > until:
                raise DemoFailed(f"{what} is not up after {START_S:.0f} s", self._logs())
            time.sleep(0.1)

    def _logs(self) -> tuple[Path, ...]:
        return tuple(log for node in self.nodes for log in node.logs)


class Hivemind:
    """The baseline's process, asked line by line. It ends when its stdin does."""

    name = "hivemind"

    def __init__(self, children: Children, folder: Path, peers: int) -> None:
        self._log = folder / "hivemind.log"
        words = [str(BASELINE), "--peers", str(peers), "--numel", str(NUMEL)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words, "--sockets", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._child = Child("hivemind", self._process, self._log)
        children.started.append(self._child)

    def start(self) -> None:
        self._line()

    def measure(self, kind: Kind) -> Measured:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(kind.encode() + b"\n")
        stdin.flush()
        line = self._line()
        return Measured(line["seconds"], line["trouble"], line["attach_s"])

    def close(self) -> None:
        """Let it end its own processes, while there is time."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        deadline = time.monotonic() + LEAVE_S
        while self._child.code is None and time.monotonic() < deadline:
            time.sleep(0.05)  # what is left after it is ended by force, with everybody else

    def _line(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise DemoFailed("hivemind's process ended", (self._log,))
        answer: dict[str, Any] = json.loads(line)
        return answer


# -- what comes of it ---------------------------------------------------------------------------


def summary(system: str, kind: Kind, rounds: list[Measured]) -> dict[str, Any]:
    """One entry of `results`. Figures are null when no round counts."""
    good = [one for one in rounds if not one.trouble]
    seconds = [one.seconds for one in good]
    phases = {phase: 0.0 for one in good for phase in one.phases}
    for phase in phases:
        phases[phase] = statistics.median(one.phases.get(phase, 0.0) for one in good)
    attach = [one.attach_s for one in rounds if one.attach_s]
    return {
        "system": system,
        "kind": kind,
        "median_s": statistics.median(seconds) if good else None,
        "min_s": min(seconds, default=None),
        "max_s": max(seconds, default=None),
        "rounds": len(rounds),
        "complete": len(good),
        # The first of all also opens the connections between the peers, which then stay.
        "first_s": rounds[0].seconds,
        "first_phases_s": rounds[0].phases,
        "attach_s": statistics.median(attach) if attach else None,
        "phases_s": phases,
        "troubles": [one.trouble for one in rounds if one.trouble],
    }


def ratios(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many of our rounds fit into one of theirs, by kind."""
    ours = {one["kind"]: one["median_s"] for one in results if one["system"] == Ours.name}
    found: dict[str, dict[str, float]] = {}
    for one in results:
        if one["system"] != Ours.name and one["median_s"] and ours[one["kind"]]:
            ratio = one["median_s"] / ours[one["kind"]]
            found.setdefault(one["system"], {})[one["kind"]] = ratio
    return found


def show(report: dict[str, Any]) -> None:
    print(f"{report['peers']} peers, {report['numel']} float32, load {report['load']:.1f}")
    print(f"{'':18}{'median':>9}{'min':>9}{'max':>9}{'first':>9}{'attach':>9}   complete")
    for one in report["results"]:
        keys = ("median_s", "min_s", "max_s", "first_s", "attach_s")
        figures = "".join(f"{_seconds(one[key]):>9}" for key in keys)
        counted = f"{one['complete']} of {one['rounds']}"
        print(f"{one['system']:<10}{one['kind']:<8}{figures}   {counted}")
    for one in report["results"]:
        for what, phases in (("", one["phases_s"]), (", the first", one["first_phases_s"])):
            if phases and (not what or one["kind"] == "cold"):
                print(f"{one['system']}, {one['kind']}{what}: {_words(phases)}")
        for trouble in one["troubles"]:
            print(f"{one['system']}, {one['kind']}, does not count: {trouble}")
    for system, by_kind in report["ratios"].items():
        words = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in by_kind.items())
        print(f"{system} / {Ours.name}: {words}")


def measure(systems: Sequence[System], rounds: int) -> list[dict[str, Any]]:
    """All systems in turn, round by round."""
    measured: dict[tuple[str, Kind], list[Measured]] = {}
    for kind in KINDS:
        for number in range(rounds):
            # Who goes first changes, so that neither always follows the other's last messages.
            for system in systems if number % 2 == 0 else list(reversed(systems)):
                measured.setdefault((system.name, kind), []).append(system.measure(kind))
                time.sleep(PAUSE_S)
    order = [(system.name, kind) for system in systems for kind in KINDS]
    return [summary(name, kind, measured[name, kind]) for name, kind in order]


def bench(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, measure, end everything."""
    children = Children(folder)
    opened: list[Ours | Hivemind] = []
    try:
        ours = Ours(children, folder, options.peers, synced=options.synced)
        opened.append(ours)
        if options.against == "hivemind":
            opened.append(Hivemind(children, folder, options.peers))
        for system in opened:
            system.start()
        results = measure(opened, options.rounds)
    finally:
        try:
            for system in opened:
                system.close()
        finally:
            end(children)
    return {
        "peers": options.peers,
        "numel": NUMEL,
        "synced": options.synced,
        "load": os.getloadavg()[0],
        "results": results,
        "ratios": ratios(results),
    }


def end(children: Children) -> None:
    """Let everybody leave in order, then kill what has not."""
    for child in children.started:
        child.ask_to_leave()
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline and any(one.code is None for one in children.started):
        time.sleep(0.05)
    children.kill_all()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4, help="2 to 16: one group")
    parser.add_argument("--rounds", type=int, default=15, help=f"of each kind, 1 to {ROUNDS_MAX}")
    parser.add_argument("--against", choices=("hivemind", "nothing"), default="hivemind")
    parser.add_argument(
        "--synced", action="store_true", help="attach with a sync, which the call need not do then"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not 2 <= options.peers <= 16 or not 1 <= options.rounds <= ROUNDS_MAX:
        parser.error("--peers or --rounds is out of range")
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _unwind)
    # A short name: a Unix socket's path holds 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="moshpitd-"))
    try:
        report = bench(options, folder)
    except MoshpitError as error:
        print(f"bench_latency: {error}", file=sys.stderr)
        for log in getattr(error, "logs", ()):
            print(f"--- {log.name}", *tail(log), sep="\n", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(one["complete"] for one in report["results"]) else 1


def _joined(node: Node) -> bool:
    status = node.status()
    return status is not None and status.joined


def _address(node: Node) -> str:
    status = node.status()
    return str(status.addresses[0]) if status is not None and status.addresses else ""


def _seconds(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "-"


def _words(phases: dict[str, float]) -> str:
    return ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items())


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
