"""Figures of the simulator. One rule: matplotlib is imported here and only when a figure is asked
for, without a display."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moshpitd.errors import ConfigError


def save_figure(path: Path, fill: Callable[[Any], None], *, size: tuple[float, float]) -> None:
    """Let `fill` draw into a new figure and write it; the suffix names the format."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "figures need matplotlib, which is not installed",
            key="--plot",
            expected="pip install 'moshpitd[plots]'",
        ) from None
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it would look for a display and keep global state
    fill(figure)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not write
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: {reason}", key="--plot") from None
