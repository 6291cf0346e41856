"""The demo's nodes as real processes: a daemon and a trainer each, started, killed, ended.

One rule: every process is a group of its own that is ended by its pid when the demo ends, however
it ends (`last_will` sees to it when the demo itself is killed); nothing is looked up by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from moshpitd.cli.demo_story import JsonLines, Story
from moshpitd.cli.last_will import LastWill
from moshpitd.errors import ConfigError, DaemonUnavailable, MoshpitError

if TYPE_CHECKING:
    from moshpitd.rpc.calls import Calls
    from moshpitd.rpc.stubs import messages

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
# Below the ports that kernels hand to outgoing connections (32768 on Linux, 49152 elsewhere): while
# the killed node is down, a neighbour's connection must not be given its port.
PORTS = range(20_000, 32_000)
DIGITS = ("moshpitd.examples.digits", "swarm")  # a trainer, if no other is named
LOG_TAIL = 25  # lines of a log that are shown when its process failed
LEAVE_S = 12.0  # a daemon's drain of 5 s and its stop
STATUS_TIMEOUT_S = 2.0
STOPS = (signal.SIGTERM, signal.SIGHUP)  # unwind as Ctrl-C does, in a demo or a bench
ENDING = (signal.SIGINT, *STOPS)
Handler: TypeAlias = Callable[[int, FrameType | None], object] | signal.Handlers


class DemoFailed(MoshpitError):
    """The demo could not be played to its end. `logs` may tell why."""

    def __init__(self, message: str, logs: tuple[Path, ...] = ()) -> None:
        self.logs = logs
        super().__init__(message)


@dataclass(slots=True)
class Child:
    """One process that leads a group of its own. What it prints is in `log`.

    Invariant: it is collected only by `kill`, after its group: until then its pid, which is the
    group's number, cannot come to mean somebody else.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    will: LastWill
    expected_to_end: bool = False
    _code: int | None = None
    _collected: bool = False

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self._code is None:
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, self.process.pid, look)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._code = ended.si_status if exited else -ended.si_status
        return self._code

    def kill(self) -> None:
        """SIGKILL to the whole group at once: what a reclaimed machine looks like. Also for one
        that has ended, because its own children may not have."""
        if self._collected:
            return
        self.expected_to_end = self._collected = True
        # On some systems a group of nothing but a dead leader may not be signalled.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.will.ended(self.process.pid)
        self._code = self.process.wait()

    def ask_to_leave(self) -> None:
        self.expected_to_end = True
        if self.code is None:
            os.kill(self.process.pid, signal.SIGTERM)


class Children:
    """Everything that the demo started. Invariant: what is alive of it is in `started`."""

    def __init__(self, sockets: Path) -> None:
        """`sockets`: the folder for what has to have a short name."""
        self.started: list[Child] = []
        self.folder = sockets
        self.will = LastWill()
        self.will.folder(sockets)
        # A checkout need not be installed, and one thread per process is enough for nine nodes on
        # two cores: torch's pools would only take turns.
        path = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("MOSHPITD_")},
            "PYTHONPATH": os.pathsep.join(path),
            # A daemon whose data directory is too deep for p2pd's sockets puts them in here.
            "TMPDIR": str(sockets),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }

    def start(
        self,
        name: str,
        arguments: list[str],
        log: Path,
        *,
        nice: bool = False,
        talks: bool = False,
        environ: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> Child:
        """Run `python ARGUMENTS`. `nice`: only what the others leave over of the processors;
        `talks`: stdin and stdout are pipes to us, and only stderr goes to the log; `within`: a
        command in front of it that becomes it, such as `ip netns exec NAME`."""
        with log.open("ab") as out, _signals_wait():
            process = subprocess.Popen(
                [*within, sys.executable, *arguments],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else out,
                stderr=out,
                env={**self._environ, **(environ or {})},
                # Not a session of its own: Linux shares the processors among sessions first, so a
                # daemon's milliseconds of gRPC would wait for what its neighbours copy, at whatever
                # priority they do that (decision 60).
                process_group=0,
            )
            child = Child(name, process, log, self.will)
            self.will.started(process.pid)
            self.started.append(child)
        if nice:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        return child

    def check(self) -> None:
        """Raise `DemoFailed` when one ended that should not have."""
        for child in self.started:
            if child.code not in (None, 0) and not child.expected_to_end:
                raise DemoFailed(f"{child.name} ended with {exit_words(child.code)}", (child.log,))

    def kill_all(self) -> None:
        """By force. Who shall leave in peace was asked before."""
        for child in self.started:
            child.kill()
        self.will.close()


@contextlib.contextmanager
def handling(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """These signals go to `handler`; at the end to whom they went before."""
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals are answered at the end of it: an exception out of a handler between a child's birth
    and its name in our list would leave it running. Not by the signal mask, which it inherits."""
    if threading.current_thread() is not threading.main_thread():  # handlers run there only
        yield
        return
    came: list[int] = []
    try:
        handled = [number for number in ENDING if callable(signal.getsignal(number))]
        with handling(handled, lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@dataclass(slots=True)
class Node:
    """One node: its folder, its daemon, and its trainer's story, which survives a kill."""

    index: int
    folder: Path
    socket: Path
    ports: tuple[int, int]
    story: Story
    daemon: Child | None = None
    trainer: Child | None = None
    lives: int = 0  # trainers that ran here
    within: Sequence[str] = ()  # in front of the daemon's command
    _calls: Calls | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"peer {self.index}"

    @property
    def dump(self) -> Path:
        return self.folder / "parameters.pt"

    @property
    def logs(self) -> tuple[Path, ...]:
        """The logs of this node, for whoever asks why."""
        return tuple(child.log for child in (self.daemon, self.trainer) if child is not None)

    def write_config(
        self,
        *,
        bootstrap: list[str],
        max_group: int,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """A file as a person would write it: only what differs from the defaults. `more`: further
        settings by dotted key."""
        control, links = self.ports
        sections: dict[str, dict[str, object]] = {
            "node": {
                "data_dir": str(self.folder / "state"),
                "socket": str(self.socket),
                # Not in /dev/shm: the folder goes at the end, whatever killed the daemon.
                "buffers_dir": str(self.folder / "buffers"),
                "drain_budget_s": 5.0,
            },
            "network": {
                "listen": [f"/ip4/127.0.0.1/tcp/{control}"],
                "bootstrap": bootstrap,
                "link_listen": f"127.0.0.1:{links}",
            },
            "averaging": {"max_group": max_group},
            "http": {"port": 0},
        }
        for key, value in (more or {}).items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        lines = []
        for section, values in sections.items():
            lines.append(f"[{section}]")
            # JSON's strings, numbers and lists of strings are TOML's as well.
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            lines.append("")
        self.folder.mkdir(exist_ok=True)
        (self.folder / "moshpitd.toml").write_text("\n".join(lines), encoding="utf-8")

    def start_daemon(self, children: Children) -> None:
        arguments = ["-m", "moshpitd.cli.main", "run", "--config"]
        self.daemon = children.start(
            f"the daemon of {self.name}",
            [*arguments, str(self.folder / "moshpitd.toml")],
            self.folder / "daemon.log",
            within=self.within,
        )

    def start_trainer(
        self, children: Children, options: list[str], *, seed: int, program: Sequence[str] = DIGITS
    ) -> None:
        self.lives += 1
        told = self.folder / f"trainer-{self.lives}.jsonl"
        self.story.begin(JsonLines(told))
        own = ["--socket", str(self.socket), "--index", str(self.index), "--seed", str(seed)]
        files = ["--json", str(told), "--dump", str(self.dump)]
        self.trainer = children.start(
            f"the trainer of {self.name}",
            ["-m", *program, *own, *files, *options],
            self.folder / "trainer.log",
        )

    def kill(self) -> None:
        """Daemon, p2pd and trainer at once."""
        for child in (self.daemon, self.trainer):
            if child is not None:
                child.kill()
        self.close()
        self.story.killed()

    def status(self) -> messages.StatusReply | None:
        """What the daemon says of itself; None while it does not answer."""
        from moshpitd.rpc.calls import Calls  # grpc takes a tenth of a second to import

        if not self.socket.exists():
            return None
        if self._calls is None:
            self._calls = Calls(self.socket)
        try:
            return self._calls.status(timeout_s=STATUS_TIMEOUT_S)
        except DaemonUnavailable:
            self.close()  # gRPC's back-off after a refusal is longer than a daemon's start
            return None

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on now."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen(1)
            except OSError:
                continue
        found.append(port)
    raise ConfigError(f"no {count} free ports in {PORTS.start}..{PORTS.stop - 1} on 127.0.0.1")


def exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def tail(log: Path, only: Sequence[str] = ()) -> list[str]:
    """The last lines of a log, for people; with `only` those that hold one of these words."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    lines = [line for line in text.splitlines() if not only or any(word in line for word in only)]
    return lines[-LOG_TAIL:]
