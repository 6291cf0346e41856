"""`replay`: what the flight recorders of several peers say about a round.

One rule: the table and the JSON show the same `RoundLog`; nothing is concluded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.cli.daemon_calls import Json, Run
from moshpitd.cli.output import console, print_json, table, text
from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.daemon.flight import Line, Logs, RoundLog

LAST = "last"
SHORT = 8  # characters of a group that tell it from all others, and of a PeerID's end


def replay(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Data directories of daemons, or copies of flight/."),
    ],
    group: Annotated[
        str,
        typer.Option("--round", metavar="GROUP|last", help="The round to tell; else all in brief."),
    ] = "",
    run: Run = "",
    json: Json = False,
) -> None:
    """Tell from the flight recorders of one or more peers what happened, and who was left out."""
    from moshpitd.daemon.flight import Logs

    logs = Logs.read(_existing(places))
    if not logs.lives:
        where = ", ".join(map(str, places))
        raise ConfigError(
            f"no flight recording in {where}",
            file="command line",
            key="DIR",
            expected="a data directory of a daemon, or its flight/ folder",
        )
    groups = logs.groups(run)
    if group:
        told = logs.round(_chosen(group, groups))
        if json:
            print_json(_clocks(logs) | {"round": _round(told)})
        else:
            _draw(told)
            _draw_clocks(logs)
        return
    rounds = [logs.round(one) for one in groups]
    if json:
        print_json(_clocks(logs) | {"rounds": [_round(one, timeline=False) for one in rounds]})
        return
    rows = [
        (
            one.group[:SHORT],
            one.run,
            _instant(one.began),
            f"{one.over - one.began:.2f}",
            len(one.members),
            ", ".join(f"{_short(peer)}: {_ending(one, peer)}" for peer in one.ended),
            ", ".join(f"{_short(e.peer_id)}: {e.reason}" for e in one.excluded),
        )
        for one in rounds
    ]
    columns = ("round", "run", "began (UTC)", "seconds #", "members #", "ended", "excluded")
    console().print(table("", columns, rows) if rows else text("no round was recorded"))
    _draw_clocks(logs)


def say(line: Line) -> str:
    """Any note in words, also one that is newer than this command."""
    note = line.note
    words = note.what.replace("_", " ")
    if note.peer:
        words += f" {_short(note.peer)}"
    if note.reason:
        words += f" ({note.reason})"
    shown = {k: v for k, v in note.fields.items() if k not in ("group", "members")}
    facts = " ".join(f"{key}={_fact(value)}" for key, value in shown.items())
    return ": ".join(part for part in (words, note.detail) if part) + (f"  {facts}" * bool(facts))


def _existing(places: list[Path]) -> list[Path]:
    for place in places:
        if not place.is_dir():
            raise ConfigError(
                f"{place} is no directory",
                file="command line",
                key="DIR",
                expected="a data directory of a daemon, or its flight/ folder",
            )
    return places


def _chosen(wanted: str, groups: list[str]) -> str:
    matching = groups[-1:] if wanted == LAST else [g for g in groups if g.startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(group[:SHORT] for group in groups[-5:]) or "none at all"
    raise ConfigError(
        f"{wanted!r} names {len(matching)} rounds of {len(groups)} recorded",
        file="command line",
        key="--round",
        expected=f"{LAST}, or the beginning of one group, such as {known}",
    )


def _draw(told: RoundLog) -> None:
    out = console()
    size = f"{len(told.members)} members, led by {_short(told.leader)}"
    out.print(
        text(f"round {told.group[:SHORT]} of {told.run}:", "bold"),
        text(f"{size}, began {_instant(told.began)} UTC, {told.over - told.began:.3f} s"),
    )
    rows: list[tuple[object, ...]] = [
        (_short(peer), peer, _ending(told, peer)) for peer in told.members
    ]
    out.print(table("", ("member", "peer", "ended"), rows))
    if told.excluded:
        rows = [
            (
                f"{e.at - told.began:.3f}",
                _short(e.peer_id),
                _short(e.by),
                e.reason,
                "; ".join(filter(None, (e.detail, e.story))),
            )
            for e in told.excluded
        ]
        columns = ("at s #", "excluded", "by", "reason", "why")
        out.print(table("\nleft out", columns, rows))
    rows = [
        (f"{line.at - told.began:.3f}", _short(line.peer_id), line.entry.run, say(line))
        for line in told.lines
    ]
    out.print(table("\ntimeline", ("at s #", "by", "run", "what"), rows))


def _draw_clocks(logs: Logs) -> None:
    rows = []
    for life in logs.lives:
        clock = logs.clocks[life.name]
        off = f"{clock.offset_s:+.3f}" if clock.how != "wall clock" else "unknown"
        spread = f"{clock.spread_s:.3f}" if clock.moments else ""
        who = (_short(life.peer_id) or "?", life.name)
        rows.append((*who, off, spread, clock.moments, clock.how, len(life.entries), life.torn))
    columns = ("peer", "life", "clock ahead s #", "spread s #", "moments #", "aligned by")
    console().print(table("\nclocks", (*columns, "notes #", "torn bytes #"), rows))


def _clocks(logs: Logs) -> dict[str, Any]:
    return {
        "clocks": [
            {
                "peer_id": life.peer_id,
                "life": life.name,
                "software": life.software,
                "offset_s": logs.clocks[life.name].offset_s,
                "spread_s": logs.clocks[life.name].spread_s,
                "moments": logs.clocks[life.name].moments,
                "aligned_by": logs.clocks[life.name].how,
                "notes": len(life.entries),
                "torn_bytes": life.torn,
            }
            for life in logs.lives
        ],
        "torn_bytes": logs.torn,
        "dropped": logs.dropped,
    }


def _round(told: RoundLog, *, timeline: bool = True) -> dict[str, Any]:
    told_round: dict[str, Any] = {
        "group": told.group,
        "run": told.run,
        "leader": told.leader,
        "members": list(told.members),
        "began": told.began,
        "seconds": told.over - told.began,
        "ended": {
            peer: {"outcome": outcome, "reason": reason}
            for peer, (outcome, reason) in told.ended.items()
        },
        "excluded": [
            {
                "at_s": one.at - told.began,
                "peer_id": one.peer_id,
                "by": one.by,
                "reason": one.reason,
                "detail": one.detail,
                "story": one.story,
            }
            for one in told.excluded
        ],
    }
    if timeline:
        told_round["timeline"] = [
            {
                "at_s": line.at - told.began,
                "by": line.peer_id,
                "run": line.entry.run,
                "what": line.note.what,
                "peer_id": line.note.peer,
                "reason": line.note.reason,
                "detail": line.note.detail,
                "fields": _jsonable(line.note.fields),
            }
            for line in told.lines
        ]
    return told_round


def _ending(told: RoundLog, peer: str) -> str:
    outcome, reason = told.ended.get(peer, ("no end recorded", ""))
    return f"{outcome} ({reason})" if reason else outcome


def _fact(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_fact(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_fact, value)) + "]"
    return _short(value) if isinstance(value, str) and len(value) > 40 else str(value)


def _jsonable(value: object) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_jsonable(inner) for inner in value]
    return value


def _short(peer_id: str) -> str:
    return peer_id[-SHORT:]


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
