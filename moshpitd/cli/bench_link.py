"""`moshpitd bench link`: how fast one link is, beside bare sockets that move the same bytes.

One rule: all systems take turns in one call, because only ratios of one run mean anything on a
machine that does other work too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from moshpitd.cli import output
from moshpitd.errors import MoshpitError

MIB = 1 << 20
PLAIN, TLS_SOCKET, LINK = "plain socket", "tls socket", "link"
DIRECTIONS = ("one way", "both ways")


class Security(StrEnum):
    """links.security of the links that are measured."""

    TLS = "tls"
    AUTHENTICATED = "authenticated"
    BOTH = "both"

    def systems(self) -> list[str]:
        words = [Security.TLS, Security.AUTHENTICATED] if self is Security.BOTH else [self]
        return [f"{LINK} ({word})" for word in words]


def link(
    mb: Annotated[int, typer.Option(help="MiB per round and direction.", min=1)] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds; the first is a warm-up.", min=2)] = 6,
    payload_kib: Annotated[int, typer.Option(help="KiB per frame (a float16 part: 512).")] = 512,
    flows: Annotated[int, typer.Option(help="Flows per link; 0: automatic.", min=0, max=8)] = 1,
    security: Annotated[
        Security, typer.Option(help="Which links, beside the two baselines.")
    ] = Security.BOTH,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """One link between two processes over loopback, beside a TLS socket and a plain one."""
    systems = (PLAIN, TLS_SOCKET, *security.systems())
    runs = [_Run(system, direction) for direction in DIRECTIONS for system in systems]
    count = max(1, mb * MIB // (payload_kib * 1024))
    moved = count * payload_kib * 1024
    with ExitStack() as stack:
        pairs = {
            system: stack.enter_context(_pair(system, payload_kib * 1024, flows))
            for system in systems
        }
        for number in range(rounds):
            for run in runs:
                ends = pairs[run.system].round(count, both=run.both)
                run.take(ends, warm_up=number == 0)
    results = [run.figures(moved) for run in runs]
    output.console().print(_table(results))
    if json_file is not None:
        wanted = {"results": results, "ratios": _ratios(results)}
        json_file.write_text(json.dumps(wanted, indent=2) + "\n")


@dataclass(slots=True)
class _Run:
    """The rounds of one system in one direction."""

    system: str
    direction: str
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def both(self) -> bool:
        return self.direction == DIRECTIONS[1]

    def take(self, ends: list[dict[str, float]], *, warm_up: bool) -> None:
        if not warm_up:
            self.seconds.append(max(end["seconds"] for end in ends))
            self.cpu_s.append(sum(end["cpu_s"] for end in ends))

    def figures(self, moved: int) -> dict[str, Any]:
        from statistics import median

        total = moved * (2 if self.both else 1)
        median_s = median(self.seconds)
        return {
            "system": self.system,
            "direction": self.direction,
            "median_s": median_s,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "cpu_s": median(self.cpu_s),
            "bytes_sent": total,
            "mb_per_s": total / median_s / 1e6,
            "cpu_ns_per_byte": median(self.cpu_s) / total * 1e9,
        }


class _Pair:
    """Both ends of one system, as processes."""

    def __init__(self, serving: subprocess.Popen[str], dialling: subprocess.Popen[str]) -> None:
        self._ends = (dialling, serving)
        _tell(dialling, _hear(serving))
        _hear(dialling)

    def round(self, count: int, *, both: bool) -> list[dict[str, float]]:
        for number, end in enumerate(self._ends):
            first = number == 0
            _tell(end, {"send": first or both, "receive": not first or both, "count": count})
        return [_hear(end) for end in self._ends]


@contextmanager
def _pair(system: str, payload_bytes: int, flows: int) -> Iterator[_Pair]:
    ends = []
    for role in ("serve", "dial"):
        task = {"system": system, "role": role, "payload_bytes": payload_bytes, "flows": flows}
        command = [sys.executable, "-m", "moshpitd.net.linkbench", json.dumps(task)]
        ends.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    try:
        yield _Pair(*ends)
    finally:
        for end in ends:
            assert end.stdin is not None
            end.stdin.close()  # the end of its orders
        for end in ends:
            try:
                end.wait(timeout=10)
            except subprocess.TimeoutExpired:
                end.kill()
                end.wait()


def _tell(end: subprocess.Popen[str], words: dict[str, Any]) -> None:
    assert end.stdin is not None
    end.stdin.write(json.dumps(words) + "\n")
    end.stdin.flush()


def _hear(end: subprocess.Popen[str]) -> dict[str, Any]:
    assert end.stdout is not None
    line = end.stdout.readline()
    if not line:
        raise MoshpitError("one end of the link bench ended early; its own words stand above")
    heard: dict[str, Any] = json.loads(line)
    return heard


def _ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Our rate over the bare sockets' in the same direction; above 1 is faster."""
    rates = {(one["system"], one["direction"]): one["mb_per_s"] for one in results}
    return {
        f"{system} / {against}, {direction}": rates[system, direction] / rates[against, direction]
        for system, direction in rates
        if system.startswith(LINK)
        for against in (PLAIN, TLS_SOCKET)
    }


def _table(results: list[dict[str, Any]]) -> Any:
    columns = ("system", "direction", "MB/s #", "median s #", "min s #", "max s #", "CPU ns/B #")
    rows = [
        (
            one["system"],
            one["direction"],
            f"{one['mb_per_s']:.0f}",
            f"{one['median_s']:.3f}",
            f"{one['min_s']:.3f}",
            f"{one['max_s']:.3f}",
            one["cpu_ns_per_byte"],
        )
        for one in results
    ]
    return output.table("One link, two processes, loopback", columns, rows)
