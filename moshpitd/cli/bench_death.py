"""`bench death`: daemons are killed in the middle of rounds; what do the survivors hold?

One rule: every trial is told, also the one that proves the opposite of what was hoped for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moshpitd.cli.bench_trials import Trial
    from moshpitd.cli.bench_victims import Fate

UNDISTURBED = 5  # rounds; their median is what the trials are held against
BAR_ONE, BAR_MANY, SLACK_S = 1.5, 2.0, 0.5
"""Of the undisturbed median: with one victim, and (without slack) with several."""
REDRAWS = 4
ONE_GROUP = 16
BYTES_PER_VALUE = 20  # of memory by peer: tensors, bucket, donor's copy, results of ended rounds


def death(
    peers: Annotated[int, typer.Option(help="Daemons, and trainers; one group.")] = 4,
    params: Annotated[float, typer.Option(help="float32 parameters per peer.")] = 100e6,
    trials: Annotated[int, typer.Option(help="Rounds in which somebody dies.")] = 30,
    kill: Annotated[int, typer.Option(help="Daemons that die in one round.")] = 1,
    codec: Annotated[str, typer.Option(help="How values travel.")] = "float16",
    seed: Annotated[int, typer.Option(help="Of who dies, and when.")] = 1,
    undisturbed: Annotated[int, typer.Option(help="Rounds in which nobody dies.")] = UNDISTURBED,
    redraws: Annotated[
        int, typer.Option(help="Times that a missed moment is drawn anew; tiny rounds need it.")
    ] = REDRAWS,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the trials there.")
    ] = None,
) -> None:
    """SIGKILL daemons at a moment uniform in the bytes that they move, and judge the survivors."""
    from moshpitd.cli.bench_processes import check_range

    check_range("--kill", kill, 1, max(1, peers - 1))
    factor, slack_s = (BAR_ONE, SLACK_S) if kill == 1 else (BAR_MANY, 0.0)
    report = perform(
        "kill",
        peers=peers,
        params=params,
        trials=trials,
        kill=kill,
        codec=codec,
        seed=seed,
        undisturbed=undisturbed,
        redraws=redraws,
        bar=(factor, slack_s),
        json_file=json_file,
    )
    raise typer.Exit(0 if len(report["trials"]) == trials else 1)


def perform(
    fate: Fate,
    *,
    peers: int,
    params: float,
    trials: int,
    kill: int,
    codec: str,
    seed: int,
    undisturbed: int,
    bar: tuple[float, float],
    json_file: Path | None,
    redraws: int = REDRAWS,
) -> dict[str, Any]:
    """The trials, shown and written; the report."""
    import random
    from dataclasses import asdict

    from moshpitd.cli.bench_allreduce import check_memory, codec_settings
    from moshpitd.cli.bench_figures import check_writable, load, median, write_json
    from moshpitd.cli.bench_meters import MachineTime
    from moshpitd.cli.bench_processes import Swarm, check_range, processes
    from moshpitd.cli.bench_trials import bars_of, counts, median_s, plan_moments
    from moshpitd.cli.bench_victims import Victims
    from moshpitd.cli.output import console

    check_range("--peers", peers, 2, ONE_GROUP)
    check_range("--params", params, 1, 4e9)
    check_range("--trials", trials, 1, 10_000)
    check_range("--undisturbed", undisturbed, 1, 1000)
    check_writable(json_file)
    numel = int(params)
    check_memory(peers * numel * BYTES_PER_VALUE)
    out, done = console(), []
    began = MachineTime.now()
    with processes() as (children, folder):
        settings = codec_settings(codec)
        swarm = Swarm(children, folder, peers=peers, numel=numel, settings=settings)
        say = _sayer(out)
        victims = Victims(swarm, codec=codec, seed=seed, redraws=redraws, say=say)
        try:
            victims.start(undisturbed)
            for number, moment in enumerate(plan_moments(trials, random.Random(seed)), 1):
                trial = victims.trial(number, moment, kill=kill, fate=fate)
                if trial is None:
                    say(f"trial {number} of {trials}: the round was over before the victim was hit")
                    continue
                done.append(trial)
                say(line_of(trial, of=trials))
        finally:
            swarm.close()
    usual = median(victims.undisturbed)
    bars = bars_of(done, usual, factor=bar[0], slack_s=bar[1])
    report = {
        "peers": peers,
        "params": numel,
        "codec": codec,
        "fate": fate,
        "kill": kill,
        "seed": seed,
        "undisturbed_median_s": usual,
        "undisturbed_s": victims.undisturbed,
        "median_s": median_s(done),
        "missed": trials - len(done),
        "counts": counts(done),
        "trials": [asdict(one) for one in done],
        "bars": [one.as_dict() for one in bars],
        "load": load(),
        "machine_busy": MachineTime.now().load_since(began),
    }
    _show(report, done)
    write_json(json_file, report)
    return report


def line_of(trial: Trial, *, of: int) -> str:
    """One trial in one line."""
    where = " and ".join(
        f"{victim} at {fraction:.0%}"
        for victim, fraction in zip(trial.victims, trial.fractions, strict=True)
    )
    said = {
        "completed": trial.completed,
        "bit-equal": trial.bit_equal,
        "weights exact": trial.weights_exact,
        "one round": not trial.retried,
    }
    verdict = ", ".join(word if holds else f"NOT {word}" for word, holds in said.items())
    return f"trial {trial.trial} of {of}: peer {where}: {trial.seconds:.2f} s, {verdict}"


def _sayer(out: Any) -> Any:
    def say(words: str) -> None:
        out.print(words, style="dim", markup=False)

    return say


def _show(report: dict[str, Any], trials: Sequence[Trial]) -> None:
    from moshpitd.cli.bench_figures import Bar, show_bars, words
    from moshpitd.cli.output import console, table, text

    out = console()
    title = (
        f"{report['peers']} peers, {report['params']:,} float32 each, {report['codec']}, "
        f"{report['kill']} of them hit ({report['fate']}); machine busy "
        f"{report['machine_busy']:.0%}, load {report['load']:.1f}"
    )
    out.print(text(title, "bold"))
    rows = [
        (
            one.trial,
            ",".join(map(str, one.victims)),
            " ".join(f"{fraction:.2f}" for fraction in one.fractions),
            "yes" if one.after_first_result else "",
            words(one.seconds),
            "; ".join(dict.fromkeys(one.outcomes)),
            "; ".join(dict.fromkeys(one.problems))[:120],
        )
        for one in trials
    ]
    heads = ("trial #", "victim", "at", "result left", "seconds #", "survivors", "problems")
    out.print(table("", heads, rows))
    hits = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in report["counts"].items()
    )
    out.print(text(f"undisturbed median {words(report['undisturbed_median_s'])} s; hits: {hits}"))
    show_bars([Bar(one["what"], one["value"], one["at_most"]) for one in report["bars"]])
