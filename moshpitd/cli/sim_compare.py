"""`moshpitd sim compare`: the cost model as tables, files and a figure. One rule: every number
comes from `moshpitd.sim.costs`; here they are only laid out.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.cli.output import console, table, text
from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from moshpitd.sim.costs.calibration import Row as CalibrationRow
    from moshpitd.sim.costs.choice import AveragingCell, Order, TrainingCell
    from moshpitd.sim.costs.scaling import Row as ScalingRow

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write everything to this file, as JSON.")
]
CsvFile = Annotated[
    Path | None, typer.Option("--csv", help="Write the rows of both tables to this file.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw a figure to this file (.png, .svg or .pdf).")
]
SHOWN_FAILURES = (0.0, 0.01)
RACED_ROUNDS = 14  # as many as a random matching needs
WINDOW_S = 5.0  # core.params: what a leader waits for peers that are not ready


def compare(
    json: JsonFile = None,
    csv: CsvFile = None,
    plot: PlotFile = None,
    peers: Annotated[int, typer.Option(min=0, max=1_000_000, help="Ask about your own swarm.")] = 0,
    parameters: Annotated[float, typer.Option(min=1, max=1e13, help="Of your model.")] = 17.7e6,
    codec: Annotated[str, typer.Option(help="How your parameters travel.")] = "float32",
    latency_ms: Annotated[float, typer.Option(min=0, help="One way, between your peers.")] = 40.0,
    up_mbps: Annotated[float, typer.Option(min=0.001, help="Upload of each peer.")] = 20.0,
    down_mbps: Annotated[float, typer.Option(min=0.001, help="Download of each peer.")] = 100.0,
    compute_s: Annotated[float, typer.Option(min=0, help="Work between two averages.")] = 1.0,
    sigma: Annotated[float, typer.Option(min=0, max=3, help="Its spread (lognormal).")] = 0.5,
    lifetime_min: Annotated[
        float, typer.Option(min=0, help="Minutes until a peer is preempted, on average; 0: never.")
    ] = 0.0,
) -> None:
    """Show which averaging algorithm is fastest on which network, and how far to trust that.

    The model is checked against published epoch times first; then it is asked about 16 to 100,000
    peers, with and without failures, and with --peers about your own.
    """
    draw = _plotter() if plot is not None else None  # a missing package is told before the work
    for path in (json, csv, plot):
        _check_folder(path)

    from moshpitd.sim.costs import calibration, choice, scaling
    from moshpitd.sim.costs.payload import Payload

    own = None
    if peers:
        own = _Own(
            peers, parameters, codec, latency_ms, up_mbps, down_mbps, compute_s, sigma, lifetime_min
        ).rows()
    fits, grown = calibration.table(), scaling.table()
    orders, trained, averaged = choice.orders(), choice.training_map(), choice.averaging_map(grown)
    out = console()
    _show_calibration(out, fits)
    _show_scaling(out, grown)
    _show_orders(out, orders)
    _show_maps(out, trained, averaged)
    if own is not None:
        _show_own(out, own)
    if json is not None:
        _write_json(json, _Found(fits, grown, orders, trained, averaged, own or []))
    if csv is not None:
        _write_csv(csv, fits, [*grown, *(own or [])])
    if draw is not None and plot is not None:
        from moshpitd.sim.costs import trajectory

        volunteers = scaling.SETTINGS[-1]
        payload = Payload(scaling.PARAMETERS, "float16")
        draw(
            plot,
            fits,
            grown,
            trained,
            trajectory.race(volunteers, payload, peers=1024, failure=0.01, rounds=RACED_ROUNDS),
        )


@dataclass(frozen=True, slots=True)
class _Own:
    """A swarm as the flags describe it."""

    peers: int
    parameters: float
    codec: str
    latency_ms: float
    up_mbps: float
    down_mbps: float
    compute_s: float
    sigma: float
    lifetime_min: float

    def rows(self) -> list[ScalingRow]:
        from moshpitd.sim.costs.churn import Churn
        from moshpitd.sim.costs.net import Lognormal, Net
        from moshpitd.sim.costs.payload import Payload
        from moshpitd.sim.costs.scaling import Setting, of_swarm

        if self.peers < 2:
            raise ConfigError("one peer has nobody to agree with", key="--peers", expected="2..")
        net = Net("yours", self.latency_ms / 1e3, self.up_mbps * 1e6, self.down_mbps * 1e6)
        compute = Lognormal(self.compute_s, self.sigma)
        churn = Churn(self.lifetime_min * 60.0) if self.lifetime_min else Churn()
        payload = Payload(int(self.parameters), self.codec)
        setting = Setting(net, compute, window_s=WINDOW_S)
        return of_swarm(setting, payload, peers=self.peers, churn=churn)


def _plotter() -> Any:
    try:
        from moshpitd.cli import sim_compare_plot
    except ImportError as error:
        raise ConfigError(
            f"no figure without {error.name or 'matplotlib'}",
            key="--plot",
            expected="the extra `plots`: pip install 'moshpitd[plots]'",
        ) from None
    return sim_compare_plot.draw


def _check_folder(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist", expected="a file in a folder")


# -- on the screen ---------------------------------------------------------------------------------


def _show_calibration(out: Console, rows: Sequence[CalibrationRow]) -> None:
    from moshpitd.sim.costs.calibration import TOLERANCE

    points = list(dict.fromkeys((row.knob, row.value) for row in rows))
    names = [f"{value:g} {'Gb/s' if knob.startswith('b') else 'ms'} #" for knob, value in points]
    lines: list[list[object]] = []
    for system in dict.fromkeys(row.system for row in rows):
        found = {(row.knob, row.value): row for row in rows if row.system == system}
        lines.append([system, *(_against(found.get(point)) for point in points)])
    out.print(text("BERT-large on 16 servers, seconds per epoch: model / published", "bold"))
    out.print(table("", ("system", *names), lines))
    off = [row for row in rows if not row.fits]
    out.print(
        text(f"{len(rows) - len(off)} of {len(rows)} within {TOLERANCE:.0%}; marked ! are not:")
    )
    for row in off:
        words = f"  {row.system}, {row.knob} {row.value:g}: {row.ratio:.2f} of the published"
        out.print(text(f"{words}{' (' + row.note + ')' if row.note else ''}", "yellow"))


def _against(row: CalibrationRow | None) -> str:
    if row is None:
        return "-"
    return f"{'' if row.fits else '! '}{row.model_epoch_s:.0f} / {row.figure_epoch_s:.0f}"


def _show_scaling(out: Console, rows: Sequence[ScalingRow]) -> None:
    from moshpitd.sim.costs.scaling import PEERS, TARGET

    for network in dict.fromkeys(row.network for row in rows):
        for failure in SHOWN_FAILURES:
            here = [r for r in rows if r.network == network and r.p_fail == failure]
            lines = [
                [method, *(_seconds(r.seconds) for r in here if r.method == method)]
                for method in dict.fromkeys(r.method for r in here)
            ]
            away = f"each peer away in {failure:.0%} of the rounds" if failure else "no failures"
            out.print()
            out.print(text(f"{network}, {away}: seconds to distortion {TARGET:g}", "bold"))
            out.print(table("", ("method", *(f"N={count} #" for count in PEERS)), lines))


def _seconds(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:.3g}" if value < 1000 else f"{value:.1e}".replace("e+0", "e")


def _show_orders(out: Console, orders: Iterable[Order]) -> None:
    out.print()
    out.print(text("Which algorithm when (~: closer than the model's own error)", "bold"))
    for order in orders:
        out.print(text(f"  {order.question} ({order.setting}; seconds {order.what})"))
        out.print(text(f"    {order.sentence}", "green"))


def _show_maps(
    out: Console, trained: Sequence[TrainingCell], averaged: Sequence[AveragingCell]
) -> None:
    latencies = list(dict.fromkeys(cell.latency_ms for cell in trained))
    lines = [
        [f"{rate:g} Gb/s", *(cell.winner for cell in trained if cell.gbps == rate)]
        for rate in dict.fromkeys(cell.gbps for cell in trained)
    ]
    out.print()
    out.print(text("Fastest step of BERT-large, asynchronous training aside", "bold"))
    out.print(table("", ("link", *(f"{one:g} ms" for one in latencies)), lines))
    sizes = list(dict.fromkeys(cell.peers for cell in averaged))
    rows = [
        [f"{network}, {failure:.1%}", *(c.winner_few_links for c in averaged
         if (c.network, c.p_fail) == (network, failure))]
        for network, failure in dict.fromkeys((c.network, c.p_fail) for c in averaged)
    ]  # fmt: skip
    out.print()
    out.print(text("First to agree, with at most 64 links per node", "bold"))
    out.print(table("", ("network, failures", *(f"N={size}" for size in sizes)), rows))


def _show_own(out: Console, rows: Sequence[ScalingRow]) -> None:
    lines = [
        (r.method, r.rounds, _seconds(r.round_s), f"{r.p_fail:.1%}", _seconds(r.seconds))
        for r in rows
    ]
    out.print()
    out.print(text(f"Your {rows[0].peers} peers: seconds until they agree", "bold"))
    columns = ("method", "rounds #", "s a round #", "away in a round #", "seconds #")
    out.print(table("", columns, lines))


# -- files -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    fits: Sequence[CalibrationRow]
    grown: Sequence[ScalingRow]
    orders: Sequence[Order]
    trained: Sequence[TrainingCell]
    averaged: Sequence[AveragingCell]
    own: Sequence[ScalingRow]


def _write_json(path: Path, found: _Found) -> None:
    """Infinite seconds are null: JSON has no word for never."""
    value = {
        "calibration": {
            "within_15_percent": sum(row.fits for row in found.fits),
            "rows": [_calibration_line(row) for row in found.fits],
        },
        "scaling": {"target": 1e-4, "rows": [_scaling_line(row) for row in found.grown]},
        "orders": [
            {
                "question": order.question,
                "setting": order.setting,
                "seconds_are": order.what,
                "sentence": order.sentence,
                "places": [
                    {"algorithm": place.algorithm, "seconds": _finite(place.seconds)}
                    for place in order.places
                ],
            }
            for order in found.orders
        ],
        "fastest_training_step": [
            {
                "gbps": cell.gbps,
                "latency_ms": cell.latency_ms,
                "winner": cell.winner,
                "step_s": cell.step_s,
            }
            for cell in found.trained
        ],
        "first_to_agree": [
            {
                "network": cell.network,
                "p_fail": cell.p_fail,
                "peers": cell.peers,
                "winner": cell.winner,
                "seconds": _finite(cell.seconds),
                "winner_with_64_links": cell.winner_few_links,
                "seconds_with_64_links": _finite(cell.seconds_few_links),
            }
            for cell in found.averaged
        ],
        "yours": [_scaling_line(row) for row in found.own],
    }
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_csv(path: Path, fits: Sequence[CalibrationRow], grown: Sequence[ScalingRow]) -> None:
    """One file, two kinds of lines: `table` says which, and a column that a line has not is
    empty."""
    lines = [{"table": "calibration", **_calibration_line(row)} for row in fits]
    lines += [{"table": "scaling", **_scaling_line(row)} for row in grown]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(lines)


def _calibration_line(row: CalibrationRow) -> dict[str, Any]:
    return {
        "system": row.system,
        "knob": row.knob,
        "value": row.value,
        "figure_epoch_s": row.figure_epoch_s,
        "model_epoch_s": round(row.model_epoch_s, 1),
        "ratio": round(row.ratio, 3),
        "within_15_percent": row.fits,
        "note": row.note,
    }


def _scaling_line(row: ScalingRow) -> dict[str, Any]:
    return {
        "network": row.network,
        "p_fail": row.p_fail,
        "peers": row.peers,
        "method": row.method,
        "rounds": row.rounds,
        "round_s": _finite(row.round_s),
        "seconds": _finite(row.seconds),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
