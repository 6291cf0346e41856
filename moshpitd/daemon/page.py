"""The status page: one HTML text from plain values.

One rule: everything is escaped, because peers and trainers choose some of the words.

No script and no file of its own, so that it also works through `ssh -L` and in a text browser. It
reloads itself every five seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

RELOAD_S = 5
MAX_ROWS = 200

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }
th { font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .9em; overflow-wrap: anywhere; }
.ok { color: #1a7f37; } .bad { color: #cf222e; } .quiet { opacity: .7; }
"""

# (title, key, numeric)
_RUNS = (
    ("run", "run", False),
    ("phase", "phase", False),
    ("version", "version", True),
    ("trainers", "trainers", True),
    ("peers", "peers", True),
    ("round", "round", True),
    ("complete", "rounds_complete", True),
    ("partial", "rounds_partial", True),
    ("alone", "rounds_alone", True),
    ("failed", "rounds_failed", True),
    ("last outcome", "last_outcome", False),
    ("without a trainer", "idle", False),
)
_PEERS = (
    ("run", "run", False),
    ("peer", "peer_id", False),
    ("state", "state", False),
    ("version", "version", True),
    ("heard, s ago", "heard_s", True),
    ("note", "note", False),
)
_ROUNDS = (
    ("run", "run", False),
    ("round", "round", True),
    ("outcome", "status", False),
    ("reason", "reason", False),
    ("group", "group_size", True),
    ("participants", "participants", True),
    ("version", "version", True),
    ("seconds", "seconds", True),
    ("s ago", "ago_s", True),
    ("detail", "detail", False),
)
_Columns = Sequence[tuple[str, str, bool]]


def render(view: Mapping[str, Any], *, ready: bool, sentences: Sequence[str]) -> str:
    """`view` has the fields of StatusReply, and `peers` and `rounds` as lists of mappings."""
    state = '<span class="ok">ready</span>' if ready else '<span class="bad">not ready</span>'
    warnings = [*sentences, *(w for w in view.get("warnings", ()) if w not in sentences)]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="refresh" content="{RELOAD_S}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>moshpitd {_text(view.get('peer_id', ''))[-8:]}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>moshpitd: {state}</h1>",
        _list(warnings),
        _facts(view),
        _table("Runs", _RUNS, map(_run, view.get("runs", ())), "No trainer has attached yet."),
        _table("Peers", _PEERS, view.get("peers", ()), "No other peer is known."),
        _table("Last rounds", _ROUNDS, view.get("rounds", ()), "No round yet."),
        "</body></html>",
    ]
    return "\n".join(parts)


def _facts(view: Mapping[str, Any]) -> str:
    facts = (
        ("peer", view.get("peer_id", "")),
        ("software", view.get("version", "")),
        ("up", f"{float(view.get('uptime_s', 0)):.0f} s"),
        ("peers in the routing table, with us", view.get("swarm_peers", 0)),
        ("addresses", ", ".join(view.get("addresses", ()))),
        ("links", view.get("link_address", "")),
        ("to join from another host", view.get("join", "")),
    )
    rows = (
        f"<tr><th>{_text(name)}</th><td><code>{_text(value)}</code></td></tr>"
        for name, value in facts
        if value != ""
    )
    return f"<table>{''.join(rows)}</table>"


def _run(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """With how long nobody has trained it, in words."""
    if run.get("trainers", 0):
        return run
    left_s = float(run.get("forgotten_in_s", 0))
    ends = f"let go in {left_s:.0f} s" if left_s >= 0 else "kept"
    return {**run, "idle": f"{float(run.get('idle_s', 0)):.0f} s, {ends}"}


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(s)}</li>' for s in sentences)}</ul>" if sentences else ""


def _table(title: str, columns: _Columns, rows: Iterable[Mapping[str, Any]], empty: str) -> str:
    rows = list(rows)[:MAX_ROWS]
    if not rows:
        return f'<h2>{title}</h2><p class="quiet">{empty}</p>'
    head = "".join(f"<th{_class(numeric)}>{_text(name)}</th>" for name, _, numeric in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class(n)}>{_text(row.get(key, ''))}</td>" for _, key, n in columns)
        + "</tr>"
        for row in rows
    )
    return f'<h2>{title}</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _class(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def _text(value: object) -> str:
    return escape(f"{value:.2f}" if isinstance(value, float) else str(value))
