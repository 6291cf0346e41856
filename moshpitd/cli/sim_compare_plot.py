"""The figure of `moshpitd sim compare`. One rule: it alone imports matplotlib, so that everything
else works without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")  # a file, never a window: there may be no screen

from matplotlib import patches, pyplot  # the backend has to be chosen first

from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.sim.costs.calibration import Row as CalibrationRow
    from moshpitd.sim.costs.choice import TrainingCell
    from moshpitd.sim.costs.scaling import Row as ScalingRow
    from moshpitd.sim.costs.trajectory import Point

SHOWN_NETWORK = "volunteers"
SHOWN_FAILURE = 0.01
LEAST_DISTORTION = 1e-10  # of float32 parameters nothing is left below it
COLOURS = {
    method: f"C{number}"
    for number, method in enumerate(
        (
            "allreduce_ring",
            "allreduce_butterfly",
            "ps",
            "gossip_ring",
            "one_peer_exp",
            "random_matching",
            "random_groups",
            "moshpit",
        )
    )
}
LONGEST_S = 1e6  # eleven days; beyond it the axis would show nothing but gossip


def draw(
    path: Path,
    fits: Sequence[CalibrationRow],
    grown: Sequence[ScalingRow],
    trained: Sequence[TrainingCell],
    raced: Mapping[str, Sequence[Point]],
) -> None:
    """Six panels: both sweeps of the calibration, the map of links, seconds against peers without
    and with failures, and distortion against seconds of one drawn run."""
    kinds = pyplot.figure().canvas.get_supported_filetypes()
    pyplot.close()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"{path}: no figure has that ending", key="--plot", expected=f".{', .'.join(kinds)}"
        )
    figure, panels = pyplot.subplots(2, 3, figsize=(18, 10), layout="constrained")
    _sweep(panels[0][0], fits, "bandwidth_Gbps", "bandwidth per server (Gb/s)")
    _sweep(panels[0][1], fits, "latency_ms", "added one-way latency (ms)")
    _links(panels[0][2], trained)
    _growth(panels[1][0], grown, 0.0)
    _growth(panels[1][1], grown, SHOWN_FAILURE)
    _race(panels[1][2], raced)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _sweep(panel: Any, rows: Sequence[CalibrationRow], knob: str, label: str) -> None:
    for number, system in enumerate(dict.fromkeys(row.system for row in rows)):
        here = [row for row in rows if (row.system, row.knob) == (system, knob)]
        values, colour = [row.value for row in here], f"C{number}"
        panel.plot(values, [row.model_epoch_s for row in here], color=colour, label=system)
        panel.plot(values, [row.figure_epoch_s for row in here], "o", color=colour, mfc="none")
    if knob.startswith("bandwidth"):
        panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel(label)
    panel.set_ylabel("seconds per epoch of BERT-large")
    panel.set_title("lines: model, circles: published")
    if knob.startswith("bandwidth"):  # the same colours in both; there is room in this one
        panel.legend(fontsize="small")
    panel.grid(alpha=0.3)


def _growth(panel: Any, rows: Sequence[ScalingRow], failure: float) -> None:
    here = [r for r in rows if (r.network, r.p_fail) == (SHOWN_NETWORK, failure)]
    for method in dict.fromkeys(row.method for row in here):
        mine = [row for row in here if row.method == method and row.seconds <= LONGEST_S]
        peers, seconds = [r.peers for r in mine], [r.seconds for r in mine]
        panel.plot(peers, seconds, marker=".", label=method, color=COLOURS[method])
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("peers")
    panel.set_ylabel("seconds to distortion 1e-4")
    away = f"each away in {failure:.0%} of the rounds" if failure else "no failures"
    panel.set_title(f"{SHOWN_NETWORK}, {away}")
    panel.legend(fontsize="small")
    panel.grid(alpha=0.3)


def _race(panel: Any, raced: Mapping[str, Sequence[Point]]) -> None:
    for method, points in raced.items():
        seconds, distortion = [p.seconds for p in points], [p.distortion for p in points]
        panel.plot(seconds, distortion, marker=".", label=method, color=COLOURS[method])
    panel.set_yscale("log")
    panel.set_ylim(bottom=LEAST_DISTORTION)
    panel.set_xlabel("modelled seconds")
    panel.set_ylabel("distortion (mean squared deviation, relative)")
    panel.set_title(f"one drawn run of 1024 {SHOWN_NETWORK}, {SHOWN_FAILURE:.0%} away per round")
    panel.legend(fontsize="small")
    panel.grid(alpha=0.3)


def _links(panel: Any, cells: Sequence[TrainingCell]) -> None:
    rates = list(dict.fromkeys(cell.gbps for cell in cells))
    latencies = list(dict.fromkeys(cell.latency_ms for cell in cells))
    winners = list(dict.fromkeys(cell.winner for cell in cells))
    number = {(cell.gbps, cell.latency_ms): winners.index(cell.winner) for cell in cells}
    grid = [[number[rate, latency] for latency in latencies] for rate in rates]
    panel.imshow(grid, origin="lower", aspect="auto", cmap="Pastel1", vmin=0, vmax=8)
    for cell in cells:
        x, y = latencies.index(cell.latency_ms), rates.index(cell.gbps)
        panel.text(x, y, _short(cell.step_s), ha="center", va="center", fontsize="small")
    colours = matplotlib.colormaps["Pastel1"]
    handles = [
        patches.Patch(color=colours(index / 8), label=winner)
        for index, winner in enumerate(winners)
    ]
    panel.legend(handles=handles, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.06))
    panel.set_xticks(range(len(latencies)), [f"{one:g}" for one in latencies])
    panel.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    panel.set_xlabel("added one-way latency (ms)")
    panel.set_ylabel("bandwidth per server (Gb/s)")
    panel.set_title("fastest synchronous step of BERT-large, in seconds")


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{math.floor(seconds + 0.5)}"
