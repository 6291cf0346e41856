"""`status`, `peers`, `rounds`: what the daemon knows.

One rule: they change nothing, and the JSON is the reply, field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from moshpitd.cli.daemon_calls import Config, Json, Run, Socket, daemon
from moshpitd.cli.output import as_dict, console, duration, print_json, size, table, text

if TYPE_CHECKING:
    from moshpitd.rpc.stubs import messages

LINK_COLUMNS = ("peer", "protection", "flows #", "sent #", "received #", "up #", "down #", "rtt #")


def status(socket: Socket = None, config: Config = None, json: Json = False) -> None:
    """Show whether this node is in the swarm, and how its runs are doing."""
    with daemon(socket, config) as calls:
        reply = calls.status()
    if json:
        print_json(as_dict(reply))
        return
    out = console()
    state, style = _state(reply)
    out.print(text("moshpitd"), text(reply.version), text(state, style))
    for warning in reply.warnings:
        out.print(text(f"  ! {warning}", "yellow"))
    facts = table("", ("", ""), _facts(reply))
    facts.show_header = False
    out.print(facts)
    if reply.bootstrap:
        rows = [(entry.address, entry.state) for entry in reply.bootstrap]
        out.print(table("\nbootstrap", ("address", "state"), rows))
    if reply.links:
        out.print(table("\nlinks", LINK_COLUMNS, [_link(line) for line in reply.links]))
    if not reply.runs:
        out.print(text("\nno trainer has attached yet"))
        return
    columns = ("run", "phase", "version #", "trainers #", "peers #", "round #", "grid", "codec")
    rows_of_runs = [
        (
            run.run,
            run.phase,
            run.version,
            run.trainers,
            run.peers,
            run.round,
            _grid(run),
            _codec(run),
            run.rounds_complete,
            run.rounds_partial,
            run.rounds_alone,
            run.rounds_failed,
            run.last_outcome,
        )
        for run in reply.runs
    ]
    outcomes = ("complete #", "partial #", "alone #", "failed #", "last outcome")
    out.print(table("\nruns", columns + outcomes, rows_of_runs))
    idle = [(run.run, duration(run.idle_s), _end(run)) for run in reply.runs if not run.trainers]
    if idle:
        out.print(table("\nwithout a trainer", ("run", "since #", "let go in #"), idle))


def peers(run: Run = "", socket: Socket = None, config: Config = None, json: Json = False) -> None:
    """Show the other peers of this node's runs."""
    with daemon(socket, config) as calls:
        reply = calls.peers(run=run)
    if json:
        print_json(as_dict(reply))
        return
    rows = [
        (
            peer.run,
            peer.peer_id,
            peer.state,
            peer.version,
            peer.round,
            ",".join(map(str, peer.coordinates)),
            duration(peer.heard_s),
            f"{peer.strikes:.1f}",
            " ".join(peer.addresses),
            peer.note,
        )
        for peer in reply.peers
    ]
    columns = ("run", "peer", "state", "version #", "round #", "key", "heard #", "strikes #")
    _print(table("", (*columns, "links", "note"), rows), rows, empty="no other peer is known")


def rounds(
    run: Run = "",
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="How many; 0: all kept.")] = 20,
    socket: Socket = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show the last rounds of this node and how they ended."""
    with daemon(socket, config) as calls:
        reply = calls.rounds(run=run, last=last)
    if json:
        print_json(as_dict(reply))
        return
    rows = [
        (
            line.run,
            line.round,
            f"{line.status} ({line.reason})" if line.reason else line.status,
            line.group_size,
            line.participants,
            line.version,
            f"{line.seconds:.2f}",
            size(line.bytes_sent),
            size(line.bytes_received),
            duration(line.ago_s),
            line.detail or ", ".join(f"{e.peer_id[-6:]}: {e.reason}" for e in line.excluded),
        )
        for line in reply.rounds
    ]
    columns = ("run", "round #", "outcome", "group #", "in it #", "version #", "seconds #")
    more = ("sent #", "received #", "ago #", "detail")
    _print(table("", columns + more, rows), rows, empty="no round yet")


def _print(drawn: object, rows: Sequence[object], *, empty: str) -> None:
    console().print(drawn if rows else text(empty))


def _state(reply: messages.StatusReply) -> tuple[str, str]:
    if reply.draining:
        return f"draining, at most {reply.drain_left_s:.0f} s ({reply.drain_reason})", "yellow"
    return ("joined", "green") if reply.joined else ("not in the swarm yet", "red")


def _facts(reply: messages.StatusReply) -> list[tuple[str, str]]:
    facts = [
        ("peer", reply.peer_id),
        ("up", duration(reply.uptime_s)),
        ("peers", f"{reply.swarm_peers} in the routing table, with us"),
        ("addresses", "\n".join(reply.addresses)),
        ("links", reply.link_address),
        ("traffic", f"{size(reply.bytes_sent)} sent, {size(reply.bytes_received)} received"),
        ("join with", reply.join),
    ]
    return [(name, value) for name, value in facts if value]


def _grid(run: messages.RunStatus) -> str:
    if not run.grid:
        return ""
    place = ",".join(map(str, run.coordinates))
    return f"{'x'.join(map(str, run.grid))} at {place}"


def _end(run: messages.RunStatus) -> str:
    return duration(run.forgotten_in_s) if run.forgotten_in_s >= 0 else "never"


def _codec(run: messages.RunStatus) -> str:
    """With codec auto also how many links contributions travel on with each."""
    counts: dict[str, int] = {}
    for one in run.contributions:
        counts[one.codec] = counts.get(one.codec, 0) + 1
    links = ", ".join(f"{codec} to {count}" for codec, count in sorted(counts.items()))
    return f"{run.codec} ({links})" if links else str(run.codec)


def _link(line: messages.LinkLine) -> tuple[object, ...]:
    return (
        line.peer_id,
        line.cipher if line.integrity else "none: may be read and changed on the way",
        line.flows,
        size(line.bytes_sent),
        size(line.bytes_received),
        _rate(line.up_bytes_per_s),
        _rate(line.down_bytes_per_s),
        f"{line.rtt_s * 1e3:.1f} ms" if line.rtt_s else "",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{size(int(bytes_per_s))}/s" if bytes_per_s else ""
