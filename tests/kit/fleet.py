"""Daemons as processes, a trainer for each in a thread of the test, and all that can be done to
them: killed, stopped, silenced, parted from each other, started again.

    with Fleet(place, 4, proxied=True) as fleet:
        fleet.whole_round()                     # everybody in it, the same bits, the right mean
        asked = fleet.ask()                     # a round begins at all of them
        fleet.in_phase(1, "exchange")
        fleet.daemons[3].kill()
        results = fleet.answers(asked, [0, 1, 2])

Node i has the i-th lowest PeerID, so node 0 leads whatever group it is in. Trainer i fills its
tensor with a number of its own in each round, so that every value afterwards says whose mean it is
(`mixes`). One rule: what somebody holds is judged by its values, never by what its daemon reports.

With `proxied` nobody knows anybody's real port, and the proxies know who dials: the path between
any two can be made silent. Whatever fails, the flight recorders tell of the last rounds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from moshpitd.cli.bench_meters import group_of, members_of, tcp_sockets
from moshpitd.client import DaemonUnavailable, Result, Session, attach
from moshpitd.net.identity import Identity
from moshpitd.testing import proxy
from moshpitd.testing.proxy import Proxies
from tests.kit.mixes import Mix, fill_value, mixes
from tests.kit.ports import free_port
from tests.kit.processes import UP_WITHIN_S, DaemonProcess, wait_for

FLOATS = 4_000_000  # 16 parts, and long enough in the exchange to be met there
# As in LocalSwarm, and without a codec's rounding, which would blur whose mean a value is.
FAST = ("window_s=2.0", "answer_timeout_s=1.0", "codec=float32")
TOGETHER_S = 60.0
CALL_S = 60.0
SETTLE_ROUNDS = 10
"""Rounds until everybody is in one again: a newcomer's first has weight 0, and a peer waited for in
vain twice is not waited for until it joins a group."""
LOG_LINES, LINE_CHARACTERS = 16, 260  # of each log, when a test failed


class Fleet:
    """Invariant: daemon i and session i belong together over all lives of the daemon, and whatever
    was started is ended when the block is left."""

    def __init__(
        self,
        place: Path,
        count: int,
        *,
        proxied: bool = False,
        floats: int = FLOATS,
        settings: Sequence[str] = (),
        own: Mapping[int, Sequence[str]] | None = None,
        run: str = "r",
    ) -> None:
        """`settings` for all, `own` for single nodes, both as of --set."""
        self.place, self.run, self.round_number = place, run, 0
        self.tensors = [torch.zeros(floats) for _ in range(count)]
        self.sessions: list[Session] = []
        self.daemons: list[DaemonProcess] = []
        self.control: list[proxy.Path] = []
        self.links: list[proxy.Path] = []
        self._proxies = Proxies() if proxied else None
        self._callers = ThreadPoolExecutor(4 * count)
        self._ending = ExitStack()
        self._silences: set[frozenset[int]] = set()
        self._processes: dict[int, list[int]] = {}  # node -> daemon and p2pd, when last looked
        self._settings = [*(f"averaging.{one}" for one in FAST), *settings]
        self._own = own or {}

    # -- life --------------------------------------------------------------------------------------

    def __enter__(self) -> Fleet:
        self._ending.callback(self._callers.shutdown, wait=False, cancel_futures=True)
        try:
            if self._proxies is not None:
                self._ending.enter_context(self._proxies)
            self._make()
            for daemon in self.daemons:
                self._ending.callback(daemon.end)
                daemon.start()
            for daemon in self.daemons:
                daemon.up()
            self.together()
            self._attach()
            self.settle()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.told())
        if self._silences:
            self.heal()  # a session's farewell is not what is tested
        self._ending.close()

    def _make(self) -> None:
        made = [Identity.load_or_create(self.place / f"key-{i}") for i in range(len(self.tensors))]
        for i, key in enumerate(sorted(made, key=lambda one: one.peer_id)):
            home = self.place / str(i)
            home.mkdir(exist_ok=True)
            shutil.move(key.path, home / "identity.key")  # perhaps to another file system
            self.daemons.append(self._daemon(i, home))
        for i, daemon in enumerate(self.daemons):
            # Two seeds that name each other, so that either may come back as anybody else.
            seed = self.daemons[0 if i else 1]
            where = seed.announce or f"/ip4/127.0.0.1/tcp/{seed.port}"
            daemon.bootstrap = (f"{where}/p2p/{seed.peer_id}",)

    def _daemon(self, i: int, home: Path) -> DaemonProcess:
        port, link_port = free_port(), free_port()
        announce = link_announce = ""
        if self._proxies is not None:
            to = self._proxies.to
            self.control.append(to(f"127.0.0.1:{port}", caller_of=self._caller_of))
            self.links.append(to(f"127.0.0.1:{link_port}", caller_of=self._caller_of))
            announce, link_announce = self.control[-1].multiaddr, self.links[-1].address
        return DaemonProcess(
            home,
            port=port,
            link_port=link_port,
            announce=announce,
            link_announce=link_announce,
            settings=[*self._settings, *self._own.get(i, ())],
        )

    def together(self, of: Iterable[int] | None = None) -> None:
        """Wait until these daemons (all) have all of them in their routing tables."""
        indices = self._these(of)

        def seen() -> bool:
            replies = [self.daemons[i].status() for i in indices]
            return all(one is not None and one.swarm_peers >= len(indices) for one in replies)

        wait_for(seen, TOGETHER_S, f"{indices} see each other")

    def _attach(self) -> None:
        attaching = [
            self._callers.submit(
                attach, self.run, tensors={"w": tensor}, socket=daemon.socket, timeout_s=CALL_S
            )
            for tensor, daemon in zip(self.tensors, self.daemons, strict=True)
        ]
        for one in attaching:
            session = one.result(UP_WITHIN_S)
            self.sessions.append(session)
            self._ending.callback(session.close)

    def restart(self, i: int) -> None:
        """Start a daemon that has ended, with its trainer attached and its parameters current."""
        self.daemons[i].start()
        self.daemons[i].up()
        self.back(i)

    def back(self, i: int) -> None:
        """Its trainer is attached to it again."""
        session = self.sessions[i]

        def synced() -> bool:
            try:
                return session.wait_attached(5.0) and bool(session.sync(timeout_s=20.0) or True)
            except DaemonUnavailable:
                return False

        wait_for(synced, UP_WITHIN_S, f"trainer {i} is attached again")

    # -- rounds ------------------------------------------------------------------------------------

    def ask(
        self, of: Iterable[int] | None = None, *, fill: bool = True, timeout_s: float = CALL_S
    ) -> dict[int, Future[Result]]:
        """A round begins at these trainers (all), each with its number of this round."""
        if fill:
            self.round_number += 1
        asked = {}
        for i in self._these(of):
            if fill:
                self.tensors[i].fill_(fill_value(i, self.round_number))
            asked[i] = self._callers.submit(self.sessions[i].average, timeout_s=timeout_s)
        return asked

    def join(self, i: int, *, timeout_s: float = CALL_S) -> dict[int, Future[Result]]:
        """One more trainer comes to the round that `ask` began."""
        self.tensors[i].fill_(fill_value(i, self.round_number))
        return {i: self._callers.submit(self.sessions[i].average, timeout_s=timeout_s)}

    def answers(
        self,
        asked: Mapping[int, Future[Result]],
        of: Iterable[int] | None = None,
        *,
        within_s: float = CALL_S + 30.0,
    ) -> dict[int, Result]:
        """What came of it at these (all that were asked), all of it by `within_s` from now."""
        until = time.monotonic() + within_s
        indices = list(asked) if of is None else list(of)
        return {i: asked[i].result(max(0.0, until - time.monotonic())) for i in indices}

    def mixes(self, i: int, *, rounds: int = 1) -> dict[Mix, int]:
        """Whose means trainer i holds: (round, members) -> elements. Of the last `rounds` rounds;
        a value that is none of them is an AssertionError."""
        return mixes(self.tensors[i], len(self.tensors), self.round_number, rounds)

    def same_bits(self, of: Iterable[int] | None = None) -> bool:
        first, *others = (self.tensors[i].view(torch.int32) for i in self._these(of))
        return all(torch.equal(first, other) for other in others)

    def whole_round(self, of: Iterable[int] | None = None) -> float:
        """A round of exactly these (all): complete, right, the same bits. Its seconds."""
        indices = self._these(of)
        began = time.monotonic()
        results = self.answers(self.ask(indices))
        took_s = time.monotonic() - began
        for i in indices:
            assert results[i].status == "complete", (i, str(results[i]))
            assert results[i].participants == len(indices), (i, str(results[i]))
            assert set(self.mixes(i)) == {(self.round_number, frozenset(indices))}
        assert self.same_bits(indices)
        return took_s

    def settle(
        self, of: Iterable[int] | None = None, *, rounds: int = SETTLE_ROUNDS, fill: bool = True
    ) -> int:
        """Rounds until all of these are in one; how many it took."""
        indices = self._these(of)
        last: dict[int, Result] = {}
        for number in range(1, rounds + 1):
            last = self.answers(self.ask(indices, fill=fill))
            if all(
                one.status == "complete" and one.participants == len(indices)
                for one in last.values()
            ):
                return number
        told = {i: str(one) for i, one in last.items()}
        raise AssertionError(f"after {rounds} rounds not all of {indices} are in one: {told}")

    # -- where a round is --------------------------------------------------------------------------

    def phase(self, i: int) -> str:
        status = self.daemons[i].status()
        runs = [one for one in status.runs if one.run == self.run] if status is not None else []
        return runs[0].phase if runs else ""

    def in_phase(self, i: int, phase: str, timeout_s: float = 20.0) -> None:
        wait_for(lambda: self.phase(i) == phase, timeout_s, f"{phase} at node {i}")

    def moved(self) -> int:
        """Bytes that the bulk links have carried, those that stand now, counted once a direction.
        Read from the kernel: the daemons work as they would without us."""
        ports = {daemon.link_port for daemon in self.daemons}
        return sum(one.sent + one.received for one in tcp_sockets() if one.local in ports)

    def measure(self, rounds: int = 3) -> tuple[float, int]:
        """(median seconds, bytes) of whole rounds in which nothing happens."""
        base = self.moved()
        seconds = sorted(self.whole_round() for _ in range(rounds))
        return seconds[rounds // 2], (self.moved() - base) // rounds

    def wait_moved(self, base: int, more: int, timeout_s: float = 20.0) -> None:
        """Wait until the links have carried so many bytes beyond `base`."""
        end = time.monotonic() + timeout_s
        while self.moved() - base < more:
            assert time.monotonic() < end, f"less than {more} bytes moved"
            time.sleep(0.001)

    # -- what is done to them ----------------------------------------------------------------------

    def stop(self, i: int) -> None:
        """SIGSTOP, of the daemon and its p2pd: a frozen machine runs neither."""
        self._signal(i, signal.SIGSTOP)

    def cont(self, i: int) -> None:
        self._signal(i, signal.SIGCONT)

    def _signal(self, i: int, number: signal.Signals) -> None:
        for pid in members_of([self.daemons[i].pid]):
            os.kill(pid, number)

    def silence(self, one: Collection[int], other: Collection[int]) -> None:
        """From now on nothing gets from any of `one` to any of `other` or back, and nothing ends:
        connections stay open, new ones are accepted into the same silence."""
        self._silences |= {frozenset((i, j)) for i in one for j in other if i != j}
        self._apply()

    def heal(self) -> None:
        """All of it goes on, in order."""
        self._silences.clear()
        self._apply()

    def _apply(self) -> None:
        for i in range(len(self.daemons)):
            callers = {j for pair in self._silences if i in pair for j in pair if j != i}
            self.control[i].silence(callers)
            self.links[i].silence(callers)

    def _caller_of(self, source: int, port: int) -> int | None:
        """Whose process has the connection from `source` to the proxy's `port`."""
        found = [one for one in tcp_sockets() if (one.local, one.remote) == (source, port)]
        if not found:
            return None
        name = f"socket:[{found[0].inode}]"
        # Whose processes they are costs a look at all of the machine; mostly it is known.
        for processes in (lambda: self._processes, self._look_for_processes):
            for i, pids in processes().items():
                if any(_has(pid, name) for pid in pids):
                    return i
        return None

    def _look_for_processes(self) -> dict[int, list[int]]:
        leaders = {one.pid: i for i, one in enumerate(self.daemons) if one.started}
        found: dict[int, list[int]] = {}
        for pid in members_of(leaders):
            found.setdefault(leaders.get(group_of(pid), -1), []).append(pid)
        found.pop(-1, None)
        self._processes = found
        return found

    # -- what is told ------------------------------------------------------------------------------

    def told(self) -> str:
        """The last rounds as the flight recorders have them, and what the daemons warned of."""
        homes = [str(daemon.home) for daemon in self.daemons if (daemon.home / "flight").is_dir()]
        if not homes:
            return ""
        replay = [sys.executable, "-m", "moshpitd.cli.main", "replay"]
        said = [_output([*replay, "--round", "last", *homes])]
        for i, daemon in enumerate(self.daemons):
            lines = daemon.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            said.append(f"-- log of node {i} ({daemon.peer_id})")
            said += [line[:LINE_CHARACTERS] for line in lines]
        return "\n".join(said)

    def tracebacks(self) -> list[str]:
        """Of each node whose log holds one, its number and what stands around the first."""
        found = []
        for index, daemon in enumerate(self.daemons):
            before, traceback, after = daemon.log.read_text().partition("Traceback")
            if traceback:
                found.append(f"node {index}: ...{before[-300:]}{traceback}{after[:2000]}")
        return found

    def _these(self, of: Iterable[int] | None) -> list[int]:
        return list(range(len(self.tensors))) if of is None else list(of)


def _has(pid: int, name: str) -> bool:
    """Whether the process has this open."""
    try:
        return any(str(fd.readlink()) == name for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _output(argv: list[str]) -> str:
    wide = os.environ | {"COLUMNS": "160"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=wide, check=False)
    return done.stdout + done.stderr
