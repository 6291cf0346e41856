"""From rounds to figures: medians, ratios, bars, tables, JSON.

One rule: a round that does not count is shown with its reason and is in no figure; a figure without
a round that counts is null, never 0.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moshpitd.cli.output import console, size, table, text
from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.cli.bench_systems import Measured


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure is held against. `met` is None where the figure does not exist. A figure that
    `refused` rounds are not in meets nothing: what is left of them is what went well."""

    what: str
    value: float | None
    at_most: float
    refused: int = 0

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value <= self.at_most and not self.refused

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    @classmethod
    def again(cls, told: Mapping[str, Any]) -> Bar:
        """Of what `as_dict` made."""
        return cls(told["what"], told["value"], told["at_most"], told["refused"])


def median(values: Iterable[float]) -> float | None:
    held = list(values)
    return statistics.median(held) if held else None


def summary(system: str, rounds: Sequence[Measured]) -> dict[str, Any]:
    """One entry of `results`: medians over the rounds that count."""
    good = [one for one in rounds if not one.trouble]
    told = [one.told_bytes for one in good if one.told_bytes is not None]
    return {
        "system": system,
        "median_s": median(one.seconds for one in good),
        "min_s": min((one.seconds for one in good), default=None),
        "max_s": max((one.seconds for one in good), default=None),
        "cpu_s": median(one.cpu_s for one in good),
        "bytes_sent": median(one.bytes_sent for one in good),
        "told_bytes": median(told),
        "peak_rss_bytes": max((one.peak_rss_bytes for one in good), default=None),
        "phases": phases_of(good),
        "rounds": len(rounds),
        "counted": len(good),
        "seconds": [round(one.seconds, 6) for one in good],
        "troubles": [one.trouble for one in rounds if one.trouble],
    }


def refused(*results: Mapping[str, Any]) -> int:
    """Rounds of these `results` that do not count."""
    return sum(one["rounds"] - one["counted"] for one in results)


def phases_of(rounds: Sequence[Measured]) -> dict[str, float]:
    """Median seconds of each phase that any round had."""
    names = dict.fromkeys(phase for one in rounds for phase in one.phases)
    return {name: statistics.median(one.phases.get(name, 0.0) for one in rounds) for name in names}


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Our median over theirs: below 1 we are faster."""
    return ours / theirs if ours is not None and theirs else None


def show_results(title: str, results: Sequence[Mapping[str, Any]]) -> None:
    columns = ("", "median s #", "min #", "max #", "CPU s #", "sent #", "peak RSS #", "counted #")
    rows = [
        (
            one["system"],
            *(words(one[key]) for key in ("median_s", "min_s", "max_s", "cpu_s")),
            size(int(one["bytes_sent"])) if one["bytes_sent"] is not None else "-",
            size(one["peak_rss_bytes"]) if one["peak_rss_bytes"] is not None else "-",
            f"{one['counted']} of {one['rounds']}",
        )
        for one in results
    ]
    out = console()
    out.print(text(title, "bold"))
    out.print(table("", columns, rows))
    for one in results:
        if one["phases"]:
            each = ", ".join(f"{name} {words(value)}" for name, value in one["phases"].items())
            out.print(text(f"{one['system']}, seconds per phase: {each}"))
        for trouble in one["troubles"]:
            out.print(text(f"{one['system']}, refused: {trouble}", "red"))


def show_bars(bars: Sequence[Bar]) -> None:
    for bar in bars:
        word, style = {
            True: ("met", "green"),
            False: ("MISSED", "red"),
            None: ("no figure", "yellow"),
        }[bar.met]
        line = f"bar: {bar.what}: {words(bar.value)}, at most {bar.at_most:.4g}: {word}"
        if bar.refused:
            line += f", {bar.refused} of its rounds do not count"
        console().print(text(line, style))


def words(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def load() -> float:
    """Processes that want a processor, over the last minute: a figure is worth what it says."""
    return os.getloadavg()[0]


def check_writable(path: Path | None) -> None:
    """Before minutes of work, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: no such directory", key="--json")


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno or 0)}", key="--json") from None
