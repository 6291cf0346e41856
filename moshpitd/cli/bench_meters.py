"""What the kernel says about processes and the network. One rule: reading costs the measured
processes nothing: no call to them, no thread in them.

Linux only, as the daemon is: everything comes from /proc and one netlink socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")


# -- processes ------------------------------------------------------------------------------------


def members_of(groups: Collection[int]) -> list[int]:
    """Every process of these groups: what a child has started is of its group too."""
    wanted, found = set(groups), []
    for entry in os.listdir(PROC):
        if entry.isdigit():
            fields = _stat(int(entry))
            if fields and int(fields[2]) in wanted:
                found.append(int(entry))
    return found


def group_of(pid: int) -> int:
    """0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[2]) if fields else 0


def cpu_s(groups: Collection[int]) -> float:
    """Processor seconds of all processes of these groups that live, and of their children that
    ended."""
    ticks = 0
    for pid in members_of(groups):
        fields = _stat(pid)
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICKS


def peak_rss_bytes(groups: Collection[int]) -> int:
    """Sum of the largest resident sizes since `reset_peaks`; shared pages count in each process."""
    return sum(_status_kib(pid, "VmHWM:") for pid in members_of(groups)) * 1024


def reset_peaks(groups: Collection[int]) -> None:
    for pid in members_of(groups):
        with contextlib.suppress(OSError):
            (PROC / str(pid) / "clear_refs").write_text("5")


def anonymous_bytes(pid: int) -> int:
    """A process's own memory: without the mapped buckets and libraries. A counter of the kernel's;
    smaps_rollup would walk all page tables, 0.3 processor seconds a second of what is measured."""
    return _status_kib(pid, "RssAnon:") * 1024


def wait_stopped(pid: int, timeout_s: float = 0.05) -> bool:
    """Until a process that was sent SIGSTOP stands still, all its threads; False if it does not."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            threads = os.listdir(PROC / str(pid) / "task")
            states = [
                (PROC / str(pid) / "task" / thread / "stat").read_text() for thread in threads
            ]
            if all(text[text.rfind(")") + 2] in "TtZX" for text in states):
                return True
    return False


def processes_naming(word: str) -> dict[int, str]:
    """Processes whose command line or environment holds `word`, with their command line."""
    found = {}
    for entry in os.listdir(PROC):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            line = (PROC / entry / "cmdline").read_bytes()
            environ = (PROC / entry / "environ").read_bytes()
        except OSError:
            continue  # it ended while we looked, or it is somebody else's
        if word.encode() in line or word.encode() in environ:
            found[int(entry)] = line.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (field 3 of the manual page is [0])."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()  # a name may hold spaces and brackets


def _status_kib(pid: int, key: str) -> int:
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)


# -- the machine ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Processor seconds of the whole machine since it started."""

    busy_s: float
    total_s: float

    @classmethod
    def now(cls) -> MachineTime:
        ticks = [int(field) for field in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return cls((sum(ticks) - idle) / TICKS, sum(ticks) / TICKS)

    def load_since(self, then: MachineTime) -> float:
        """Share of all processors that was busy, 0 to 1, whoever used them."""
        total = self.total_s - then.total_s
        # The kernel adds the two up apart, so their differences may be a tick out of step.
        return min(1.0, (self.busy_s - then.busy_s) / total) if total > 0 else 0.0


def loopback_bytes() -> int:
    """Bytes that were sent over this machine's loopback, headers and everybody's included."""
    for line in (PROC / "self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    return 0


# -- sockets --------------------------------------------------------------------------------------

_DIAG_BY_FAMILY, _DUMP, _DONE, _ERROR = 20, 0x301, 3, 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=BBBBI48s")  # inet_diag_req_v2: family, protocol, extensions, pad, states
_ENDS = struct.Struct("!2H")  # in inet_diag_msg behind family, state, timer, retrans
_INODE = struct.Struct("=I")
_MESSAGE_BYTES, _INODE_AT = 72, 68  # inet_diag_msg, and its last field
_INFO = 2  # INET_DIAG_INFO: the attribute that holds tcp_info
_MOVED = struct.Struct("=QQ")
_MOVED_AT = 120  # tcpi_bytes_acked, tcpi_bytes_received


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One end of a connection and what went through it."""

    local: int
    remote: int
    inode: int
    sent: int
    received: int


def tcp_sockets() -> list[TcpSocket]:
    """All connected IPv4 TCP sockets of this machine, 0.2 ms. Linux's sock_diag(7)."""
    established = 1 << 1
    request = _REQUEST.pack(
        socket.AF_INET, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, established, b""
    )
    found: list[TcpSocket] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:
        link.settimeout(2.0)
        link.send(_HEADER.pack(_HEADER.size + len(request), _DIAG_BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            block = link.recv(1 << 18)
            at = 0
            while at < len(block):
                length, kind, _, _, _ = _HEADER.unpack_from(block, at)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", block, at + _HEADER.size)[0]
                    raise OSError(number, f"sock_diag: {os.strerror(number)}")
                one = _tcp_socket(block[at + _HEADER.size : at + length])
                if one is not None:
                    found.append(one)
                at += (length + 3) & ~3


def _tcp_socket(message: bytes) -> TcpSocket | None:
    local, remote = _ENDS.unpack_from(message, 4)
    (inode,) = _INODE.unpack_from(message, _INODE_AT)
    at = _MESSAGE_BYTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            return None
        if kind == _INFO and length >= 4 + _MOVED_AT + _MOVED.size:
            sent, received = _MOVED.unpack_from(message, at + 4 + _MOVED_AT)
            return TcpSocket(local, remote, inode, sent, received)
        at += (length + 3) & ~3
    return None


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes on the bulk links of one node."""

    sent: int = 0
    received: int = 0

    @property
    def both(self) -> int:
        return self.sent + self.received

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.sent - other.sent, self.received - other.received)


class LinkMeter:
    """Bytes moved on the bulk links of several nodes on this machine, by node.

    `ports` are their link ports. A socket at a link port is of that node; the other end is told
    apart by its inode among the open files of the daemons. Invariant: what a closed connection
    moved stays counted, as far as it was seen.
    """

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = dict(ports)  # node -> port
        self._nodes = {port: node for node, port in ports.items()}
        self._pids: dict[int, int] = {}
        self._owners: dict[int, int] = {}  # inode -> node
        self._seen: dict[int, dict[int, Moved]] = {node: {} for node in ports}

    def watch(self, pids: Mapping[int, int]) -> None:
        """The daemons' process ids by node, anew after a restart."""
        self._pids = dict(pids)
        self._owners.clear()

    def read(self) -> dict[int, Moved]:
        """By node, since this meter exists."""
        for one in tcp_sockets():
            node = self._nodes.get(one.local)
            if node is None and one.remote in self._nodes:
                node = self._owner(one.inode)
            if node is not None:
                self._seen[node][one.inode] = Moved(one.sent, one.received)
        return {
            node: Moved(
                sum(one.sent for one in sockets.values()),
                sum(one.received for one in sockets.values()),
            )
            for node, sockets in self._seen.items()
        }

    def _owner(self, inode: int) -> int | None:
        if inode not in self._owners:
            for node, pid in self._pids.items():
                for held in _socket_inodes(pid):
                    self._owners[held] = node
            # A socket between its making and its owner's table, or of a process that just ended.
            self._owners.setdefault(inode, -1)
        node = self._owners[inode]
        if node < 0:
            del self._owners[inode]
            return None
        return node


def _socket_inodes(pid: int) -> Iterable[int]:
    try:
        names = os.listdir(PROC / str(pid) / "fd")
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(PROC / str(pid) / "fd" / name)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])
