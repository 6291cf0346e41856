"""Machines that share this one: network namespaces with a capped line each, joined by a bridge.

One rule: whatever was made is removed by whoever made it; their names carry its pid, so what one
that was killed has left behind is removed by whoever makes the next.

Needs root and Linux's `ip` and `tc` (iproute2); random loss needs `nft`. Every namespace has one
interface, eth0; its own end is capped by what it may upload, the bridge's end by what it may
download. All of it is inside namespaces, also the bridge: the machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moshpitd.errors import ConfigError

PREFIX = "moshpitd"
LEFT_BEHIND = re.compile(rf"{PREFIX}-(\d+)-\S+")
SUBNET = "10.231.77"  # inside the namespaces only
# A token bucket holds one full GSO packet, or the kernel cuts each into small ones first.
BURST_BYTES = 64 << 10
# What a home router or a switch queues before it drops.
QUEUE_MS = 50
COMMAND_S = 20.0


@dataclass(frozen=True, slots=True)
class Line:
    """Megabit per second of one namespace's line, headers included."""

    up_mbps: float
    down_mbps: float


@dataclass(frozen=True, slots=True)
class Namespace:
    name: str
    host: str  # its IPv4 address
    line: Line
    hub: str  # the namespace of the bridge
    port: str  # the bridge's end of its line

    @property
    def within(self) -> tuple[str, ...]:
        """In front of a command line that shall run in here; the pid stays the same."""
        return (_tool("ip"), "netns", "exec", self.name)


def missing(*, loss: bool = False) -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", *(["nft"] if loss else [])):
        if not _tool(tool):
            return f"`{tool}` is not installed"
    try:
        with namespaces([Line(1.0, 1.0)], loss=0.5 if loss else 0.0):
            return ""
    except ConfigError as error:
        return f"the kernel or this container refuses: {error}"


_serial = itertools.count()


@contextmanager
def namespaces(lines: Sequence[Line], *, loss: float = 0.0) -> Iterator[list[Namespace]]:
    """One namespace per line. `loss`: share of packets, 0 to 1, that each of them loses at random
    of what arrives. ConfigError where the machine refuses."""
    remove_left_behind()
    stem = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
    made: list[str] = []
    try:
        hub = f"{stem}-hub"
        _make(hub, made)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        found = []
        for index, line in enumerate(lines):
            one = Namespace(f"{stem}-{index}", f"{SUBNET}.{index + 1}", line, hub, f"port{index}")
            _make(one.name, made)
            _connect(one)
            if loss:
                lose(one, loss)
            found.append(one)
        yield found
    finally:
        for name in reversed(made):
            _remove(name)


def lose(one: Namespace, share: float) -> None:
    """From now on it loses this share, 0 to 1, of the packets that arrive, at random."""
    # Between two ends of a veth a "packet" may be 64 KiB that no real line would carry in one.
    _run("ip", "-n", one.name, "link", "set", "eth0", "gso_max_segs", "1")
    _run("ip", "-n", one.hub, "link", "set", one.port, "gso_max_segs", "1")
    rule = f'iifname "eth0" numgen random mod 10000 < {share * 10000:.0f} counter drop'
    chain = f"chain arriving {{ type filter hook prerouting priority -300; {rule}; }}"
    _run("ip", "netns", "exec", one.name, _tool("nft"), f"table inet loss {{ {chain}; }}")


def lost(one: Namespace) -> int:
    """Packets that `lose` took from it so far."""
    told = _run("ip", "netns", "exec", one.name, _tool("nft"), "list", "table", "inet", "loss")
    found = re.search(r"counter packets (\d+)", told)
    return int(found[1]) if found else 0


def sent_bytes(one: Namespace) -> int:
    """What its line has carried away from it so far, headers included, as the kernel counts."""
    told = json.loads(_run("ip", "-n", one.name, "-j", "-s", "link", "show", "eth0"))
    return int(told[0]["stats64"]["tx"]["bytes"])


def remove_left_behind() -> list[str]:
    """Namespaces whose maker is not alive any more; returns their names."""
    ip = _tool("ip")
    if not ip:
        return []
    listed = subprocess.run(
        [ip, "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    removed = []
    for line in listed.stdout.splitlines():
        found = LEFT_BEHIND.match(line)
        if found and not Path(f"/proc/{found[1]}").exists():
            removed.append(found[0])
            _remove(found[0])
    return removed


def _make(name: str, made: list[str]) -> None:
    made.append(name)  # before, because half of it may stand when the command fails
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _connect(one: Namespace) -> None:
    _run(
        "ip", "link", "add", "eth0", "netns", one.name,
        "type", "veth", "peer", "name", one.port, "netns", one.hub,
    )  # fmt: skip
    _run("ip", "-n", one.hub, "link", "set", one.port, "master", "bridge", "up")
    _run("ip", "-n", one.name, "address", "add", f"{one.host}/24", "dev", "eth0")
    _run("ip", "-n", one.name, "link", "set", "eth0", "up")
    _cap(one.name, "eth0", one.line.up_mbps)
    _cap(one.hub, one.port, one.line.down_mbps)


def _cap(name: str, interface: str, mbps: float) -> None:
    _run(
        "tc", "-n", name, "qdisc", "add", "dev", interface, "root",
        "tbf", "rate", f"{mbps * 1000:.0f}kbit", "burst", str(BURST_BYTES),
        "latency", f"{QUEUE_MS}ms",
    )  # fmt: skip


def _remove(name: str) -> None:
    # Its interfaces go with it, and with them their other ends. Processes that still run in it keep
    # it alive without a name; they are their starter's.
    with contextlib.suppress(ConfigError):
        _run("ip", "netns", "delete", name)


def _run(tool: str, *arguments: str) -> str:
    command = [_tool(tool) or tool, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _tool(name: str) -> str:
    # Not in everybody's PATH.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return shutil.which(name, path=path) or ""
