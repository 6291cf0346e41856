"""`moshpitd bench VERB`: figures about this machine, with their baselines in the same run.

One rule: one file per verb, which imports what it needs when it runs; here they only get names.
"""

from __future__ import annotations

import typer

from moshpitd.cli import (
    bench_algorithms,
    bench_allreduce,
    bench_asysg,
    bench_churn,
    bench_codecs,
    bench_death,
    bench_delay,
    bench_freeze,
    bench_latency,
    bench_link,
    bench_namespaces,
    bench_onebit,
    bench_overlap,
)

app = typer.Typer(
    name="bench", help="Measure this machine, beside gloo and hivemind.", no_args_is_help=True
)
app.command("allreduce")(bench_allreduce.allreduce)
app.command("asysg")(bench_asysg.asysg)
app.command("algorithms")(bench_algorithms.algorithms)
app.command("codecs")(bench_codecs.codecs)
app.command("latency")(bench_latency.latency)
app.command("link")(bench_link.link)
app.command("death")(bench_death.death)
app.command("delay")(bench_delay.delay)
app.command("freeze")(bench_freeze.freeze)
app.command("churn")(bench_churn.churn)
app.command("onebit")(bench_onebit.onebit)
app.command("overlap")(bench_overlap.overlap)
app.command("namespaces")(bench_namespaces.namespaces)
