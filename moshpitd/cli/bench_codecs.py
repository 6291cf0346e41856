"""`bench codecs`: what each codec costs and how fast it is, on one thread of this machine.

One rule: the fastest pass is held against the bars and the median is shown beside it: on a shared
machine the slower ones measure the neighbours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moshpitd.errors import ConfigError

PASSES_MAX = 1000
PASS_S = 60.0  # one pass of all codecs on a machine that is very busy
PLACES, VERBS = ("slices", "memory"), ("encode", "decode", "decode_add")


def codecs(
    passes: Annotated[int, typer.Option(help="Measured passes of each, about 10 ms.")] = 5,
    codec: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Time encode, decode, and decode + add of every codec, in GB/s of float32."""
    from moshpitd.cli.bench_figures import check_writable, write_json
    from moshpitd.cli.bench_processes import START_S, check_range, processes, start_worker
    from moshpitd.cli.demo_processes import DemoFailed

    check_range("--passes", passes, 1, PASSES_MAX)
    check_writable(json_file)
    arguments = ["-m", "moshpitd.testing.bench.codecs", "--passes", str(passes)]
    for name in codec or []:
        arguments += ["--codec", name]
    with processes() as (children, folder):
        worker = start_worker(children, "the codecs' process", arguments, folder / "log")
        try:
            report = worker.hear(START_S + passes * PASS_S)
        except DemoFailed:
            words = (folder / "log").read_text(encoding="utf-8")
            if "invalid choice" not in words:
                raise
            raise ConfigError(words.split("invalid choice: ")[1], key="--codec") from None
    _show(report)
    write_json(json_file, report)


def _show(report: dict[str, Any]) -> None:
    from moshpitd.cli.output import console, table, text

    out = console()
    heads = [f"{verb.replace('_', ' + ')}, {place} #" for place in PLACES for verb in VERBS]
    rows = []
    for one in report["results"]:
        cells = [one[place][f"{verb}_gbps"] for place in PLACES for verb in VERBS]
        figures = [f"{cell['median']:.1f} ({cell['max']:.1f})" for cell in cells]
        rows.append((one["codec"], one["formula"], f"{one['bits_per_value']:.2f}", *figures))
    title = f"GB/s of float32 on one thread: median (best) of passes; load {report['load']:.1f}"
    out.print(table(title, ("", "bytes for d values", "bits #", *heads), rows))
    for one in report["results"]:
        for verb, bar in one["bars"].items():
            word, style = ("met", "green") if bar["met"] else ("MISSED", "red")
            words = f"{one['codec']} {verb}, slices, at least {bar['at_least']:g} GB/s"
            out.print(text(f"bar: {words}: {word}", style))
