"""What every bench runs: daemons and trainers as real processes, told line by line what to do.

One rule: the bench only tells, waits and looks; what a figure says was measured by the process that
it is about, or by the kernel.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from moshpitd.cli.demo_processes import (
    ENDING,
    LEAVE_S,
    STOPS,
    Child,
    Children,
    DemoFailed,
    Node,
    free_ports,
    tail,
)
from moshpitd.cli.demo_story import Story
from moshpitd.cli.output import console
from moshpitd.errors import ConfigError

START_S = 120.0  # torch, hivemind and libp2p are seconds of a core to import, several times at once
ORDER_S = 60.0  # filling or checking 100 million values on a loaded machine is seconds
POLL_S = 0.05
HEADSTART_S = 0.1  # from telling all trainers to begin until they do: pipes and scheduling
MEMORY = Path("/dev/shm")


class Worker:
    """A process that answers orders. Invariant: at most one order is unanswered (`busy`)."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.busy = True  # until it says that it is ready
        self._held = b""

    @property
    def fileno(self) -> int:
        stdout = self.child.process.stdout
        assert stdout is not None
        return stdout.fileno()

    def tell(self, do: str, **order: Any) -> None:
        stdin = self.child.process.stdin
        assert stdin is not None
        assert not self.busy, f"{self.child.name} has not answered yet"
        try:
            stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        self.busy = True

    def hear(self, patience_s: float = ORDER_S) -> dict[str, Any]:
        """The answer. Raises `DemoFailed` when it ends, or says nothing for so long."""
        until = time.monotonic() + patience_s
        while (answer := self.heard(until - time.monotonic())) is None:
            if time.monotonic() > until:
                raise DemoFailed(
                    f"{self.child.name} has not answered for {patience_s:.0f} s", (self.child.log,)
                )
        return answer

    def heard(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """The answer, if it comes within `wait_s`."""
        while b"\n" not in self._held:
            ready, _, _ = select.select([self.fileno], [], [], max(0.0, wait_s))
            if not ready:
                return None
            block = os.read(self.fileno, 1 << 16)
            if not block:
                raise self._gone()
            self._held += block
        line, _, self._held = self._held.partition(b"\n")
        self.busy = False
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, *, patience_s: float = ORDER_S, **order: Any) -> dict[str, Any]:
        """One order and its answer; an answer that is an error raises `DemoFailed`."""
        self.tell(do, **order)
        return self.good(self.hear(patience_s), do)

    def good(self, answer: dict[str, Any], do: str) -> dict[str, Any]:
        if "error" in answer:
            raise DemoFailed(f"{self.child.name}: {do}: {answer['error']}", (self.child.log,))
        return answer

    def _gone(self) -> DemoFailed:
        return DemoFailed(f"{self.child.name} ended", (self.child.log,))

    def close(self) -> None:
        """The end of its stdin is the end of it."""
        stdin = self.child.process.stdin
        self.child.expected_to_end = True
        if stdin is not None and not stdin.closed:
            stdin.close()


def ask_all(
    workers: Sequence[Worker], do: str, *, patience_s: float = ORDER_S, **order: Any
) -> list[dict[str, Any]]:
    """The same order to all at once; their answers in order."""
    for worker in workers:
        worker.tell(do, **order)
    return [worker.good(worker.hear(patience_s), do) for worker in workers]


def start_worker(
    children: Children,
    name: str,
    arguments: list[str],
    log: Path,
    *,
    within: Sequence[str] = (),
    **environ: str,
) -> Worker:
    """A worker that may still be importing; `hear` its first line before telling it anything."""
    return Worker(children.start(name, arguments, log, talks=True, environ=environ, within=within))


def start_delay(
    children: Children,
    name: str,
    log: Path,
    *,
    host: str,
    delay_s: float,
    paths: Iterable[tuple[int, int]],
    within: Sequence[str] = (),
) -> Worker:
    """A proxy: who dials the first port of a path, at `host`, gets to the second, on the loopback,
    and meets the delay on the way there and back."""
    arguments = ["-m", "moshpitd.testing.bench.delayed", "--host", host, "--delay-s", str(delay_s)]
    for port, target in paths:
        arguments += ["--path", str(port), f"127.0.0.1:{target}"]
    return start_worker(children, name, arguments, log, within=within)


def announced(host: str, control: int, links: int) -> dict[str, object]:
    """Settings of a daemon that others reach at these ports, not at its own."""
    return {
        "network.announce": [f"/ip4/{host}/tcp/{control}"],
        "network.link_announce": [f"{host}:{links}"],
    }


@dataclass(frozen=True, slots=True)
class Place:
    """Where a daemon runs: a command that enters it, its address there, what only it is told."""

    within: tuple[str, ...] = ()
    host: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)


class Swarm:
    """Daemons with a trainer each, on this machine. Invariant: `nodes`, `trainers` and `peer_ids`
    are in the same order."""

    def __init__(
        self,
        children: Children,
        folder: Path,
        *,
        peers: int,
        numel: int,
        settings: Mapping[str, object] | None = None,
        places: Sequence[Place] = (),
        ports: Sequence[int] = (),
        in_place: bool = False,
    ) -> None:
        """`places`: where each daemon runs, if not simply on this machine. `ports`: two for each
        daemon, for control and links, if somebody must know them before. `in_place`: the trainers'
        tensors live in their buckets."""
        self.children = children
        self.peer_ids: list[str] = []
        self.trainers: list[Worker] = []
        self._folder, self._numel, self._in_place = folder, numel, in_place
        self._settings = dict(settings or {})
        self._places = list(places) or [Place()] * peers
        ports = ports or free_ports(2 * peers)
        self.nodes = [
            Node(
                index,
                folder / f"peer-{index}",
                folder / f"{index}.sock",
                (ports[2 * index], ports[2 * index + 1]),
                Story(0),
                within=self._places[index].within,
            )
            for index in range(peers)
        ]
        self._memory = memory_folder(children)

    def start(self) -> None:
        """All daemons up, joined through the first; all trainers ready, none attached. Without
        parameters (`numel` 0) there are no trainers: the bench has others."""
        first, *others = self.nodes
        self._configure(first, [])
        first.start_daemon(self.children)
        self.trainers = [self._start_trainer(node) for node in self.nodes if self._numel]
        self.wait(lambda: address_of(first) != "", first.name)
        for node in others:
            self._configure(node, [address_of(first)])
            node.start_daemon(self.children)
        for node in others:
            self.wait_joined(node)
        for node in self.nodes:
            status = node.status()
            self.peer_ids.append(status.peer_id if status is not None else "")
        # Should the first be killed: who starts again joins through somebody.
        self._configure(first, [address_of(others[0])])
        for trainer in self.trainers:
            trainer.hear(START_S)

    def attach(self, run: str, *, sync: bool = False) -> list[dict[str, Any]]:
        """All trainers to a new run."""
        return ask_all(self.trainers, "attach", run=run, sync=sync, timeout_s=ORDER_S)

    def average(
        self, *, timeout_s: float, weights: Sequence[int] = (), only: Sequence[int] = ()
    ) -> float:
        """Tell the trainers to average at the same instant, which is returned."""
        at = time.monotonic() + HEADSTART_S
        for index in only or range(len(self.trainers)):
            weight = weights[index] if weights else 1
            self.trainers[index].tell("average", at=at, weight=weight, timeout_s=timeout_s)
        return at

    def wait_joined(self, node: Node) -> None:
        def joined() -> bool:
            status = node.status()
            return status is not None and status.joined

        self.wait(joined, node.name)

    def wait(self, true: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        until = time.monotonic() + timeout_s
        while not true():
            self.children.check()
            if time.monotonic() > until:
                raise DemoFailed(f"{what} is not up after {timeout_s:.0f} s", self.logs())
            time.sleep(POLL_S)

    def logs(self) -> tuple[Path, ...]:
        return tuple(log for node in self.nodes for log in node.logs)

    def leaders(self) -> list[int]:
        """The process groups of daemons and trainers that run now."""
        daemons = [node.daemon for node in self.nodes if node.daemon is not None]
        return [one.process.pid for one in (*daemons, *(t.child for t in self.trainers))]

    def close(self) -> None:
        """Trainers end; the daemons are asked to leave by `end`."""
        for trainer in self.trainers:
            trainer.close()
        for node in self.nodes:
            node.close()

    def _configure(self, node: Node, bootstrap: list[str]) -> None:
        buffers = self._memory / f"{node.index}" if self._memory else node.folder / "buffers"
        place = self._places[node.index]
        more = {"node.buffers_dir": str(buffers), **self._settings, **place.settings}
        if place.host:
            control, links = node.ports
            more["network.listen"] = [f"/ip4/{place.host}/tcp/{control}"]
            more["network.link_listen"] = f"{place.host}:{links}"
        node.write_config(bootstrap=bootstrap, max_group=16, more=more)

    def _start_trainer(self, node: Node) -> Worker:
        arguments = ["-m", "moshpitd.testing.bench.trainer", "--socket", str(node.socket)]
        arguments += ["--index", str(node.index), "--numel", str(self._numel)]
        arguments += ["--in-place"] if self._in_place else []
        name = f"the trainer of {node.name}"
        return start_worker(self.children, name, arguments, node.folder.with_suffix(".trainer.log"))


def address_of(node: Node) -> str:
    status = node.status()
    return str(status.addresses[0]) if status is not None and status.addresses else ""


def end(children: Children) -> list[str]:
    """Let everybody leave in order, then kill what has not, which is returned by name.

    Daemons are asked by a signal; a worker leaves when its stdin ends, which gives hivemind's the
    time to end its own processes and to remove what they share.
    """
    for child in children.started:
        stdin = child.process.stdin
        if stdin is None:
            child.ask_to_leave()
            continue
        child.expected_to_end = True
        if not stdin.closed:
            stdin.close()
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline and any(one.code is None for one in children.started):
        time.sleep(POLL_S)
    forced = [one.name for one in children.started if one.code is None]
    children.kill_all()
    return forced


@contextmanager
def processes(keep: Path | None = None) -> Iterator[tuple[Children, Path]]:
    """Children and a folder for them. Whatever happens, nothing of it is left; a failure shows the
    logs that may tell why."""
    # A short name: a Unix socket's path holds 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="moshpitd-"))
    children = Children(folder)
    old = {number: signal.signal(number, _unwind) for number in STOPS}
    try:
        try:
            yield children, folder
        except DemoFailed as failure:
            out = console()
            for log in failure.logs:
                out.print(f"--- {log.name}", *tail(log), sep="\n", markup=False)
            raise
        finally:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it
            end(children)
    finally:
        if keep is not None:
            shutil.copytree(
                folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock")
            )
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory_of(folder), ignore_errors=True)
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def memory_of(folder: Path) -> Path:
    """Where the mapped files of the children in `folder` are."""
    return MEMORY / folder.name


def memory_folder(children: Children) -> Path | None:
    """A folder in memory for the buckets, as a daemon would choose it: on a disk the kernel would
    write every round back. It goes with the bench, also when that is killed."""
    if not os.access(MEMORY, os.W_OK):
        return None
    folder = memory_of(children.folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    children.will.folder(folder)
    return folder


def check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{value:g} is out of range", key=key, expected=f"{low:g}..{high:g}")


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
