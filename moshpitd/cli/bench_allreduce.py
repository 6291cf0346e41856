"""`bench allreduce`: one average of large tensors, ours beside gloo's and hivemind's.

One rule: all systems are measured in one call, in turn, round by round, on the same values, so that
whatever else the machine does slows all of them down alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.cli.bench_processes import Swarm
    from moshpitd.cli.bench_systems import System

BYTES_PER_VALUE = 16
"""Of memory, by peer and system: the tensors, a bucket or a copy of them, a donor's copy, and what
a system has in flight. hivemind holds the most."""
WIRE_WITHIN = 0.02
"""Of the codec's formula: headers, TLS records, acknowledgements and control messages."""


def allreduce(
    peers: Annotated[int, typer.Option(help="Daemons, and trainers; one group.")] = 4,
    params: Annotated[float, typer.Option(help="float32 parameters per peer.")] = 100e6,
    codec: Annotated[str, typer.Option(help="How values travel: float32, float16, int8 ...")] = (
        "float16"
    ),
    rounds: Annotated[int, typer.Option(help="Measured rounds of each system.")] = 5,
    against: Annotated[
        list[str] | None, typer.Option(metavar="SYSTEM", help="gloo, hivemind; may be repeated.")
    ] = None,
    security: Annotated[
        str, typer.Option(help="links.security: tls, or authenticated where it is built in.")
    ] = "",
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place/--copies",
            help="Whether our trainers' tensors live in the buckets, as gloo's stay in place.",
        ),
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Time one average of all peers, from the trainers' calls to the averages in their memory."""
    from moshpitd.cli.bench_figures import check_writable, write_json
    from moshpitd.cli.bench_processes import check_range, processes

    check_range("--peers", peers, 2, 16)
    check_range("--params", params, 1, 4e9)
    check_range("--rounds", rounds, 1, 1000)
    chosen = _chosen(against or [], codec)
    settings = codec_settings(codec) | security_settings(security)
    check_writable(json_file)
    numel = int(params)
    check_memory(peers * numel * BYTES_PER_VALUE * (1 + len(chosen)))
    with processes() as (children, folder):
        from moshpitd.cli.bench_processes import Swarm
        from moshpitd.cli.bench_systems import Gloo, Hivemind, Ours

        swarm = Swarm(
            children, folder, peers=peers, numel=numel, settings=settings, in_place=in_place
        )
        systems: list[System] = [Ours(swarm, codec=codec)]
        if "gloo" in chosen:
            systems.append(Gloo(children, folder, peers=peers, numel=numel))
        if "hivemind" in chosen:
            systems.append(Hivemind(children, folder, peers=peers, numel=numel, codec=codec))
        report = _measure(systems, swarm, codec=codec, rounds=rounds)
    report |= {"peers": peers, "params": numel, "codec": codec, "security": security or "tls"}
    report["in_place"] = in_place
    _judge(report)
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(0 if all(one["counted"] for one in report["results"]) else 1)


def _chosen(against: Sequence[str], codec: str) -> list[str]:
    from moshpitd.cli.bench_systems import check_baseline

    for name in against:
        if name not in ("gloo", "hivemind"):
            raise ConfigError(f"{name!r} is unknown", key="--against", expected="gloo or hivemind")
    if "hivemind" in against:
        check_baseline(codec)
    return list(dict.fromkeys(against))


def _measure(systems: Sequence[System], swarm: Swarm, *, codec: str, rounds: int) -> dict[str, Any]:
    from moshpitd.cli.bench_figures import load, ratio, summary
    from moshpitd.cli.bench_memory import GROWING, SETTLED, at_rest, watched
    from moshpitd.cli.bench_meters import MachineTime
    from moshpitd.cli.bench_systems import Measured
    from moshpitd.cli.output import console

    out = console()
    measured: dict[str, list[Measured]] = {system.name: [] for system in systems}
    began = MachineTime.now()
    settled: list[int] = []
    try:
        for system in systems:
            out.print(f"starting {system.name}", style="dim")
            system.start()
            system.renew()
            # It opens the connections, which then stay; in ours all begin with equal parameters.
            system.measure(0, same=True)
        for number in range(1, rounds + 1):
            # Who goes first changes, so that nobody always follows the same other.
            shift = number % len(systems)
            for system in [*systems[shift:], *systems[:shift]]:
                one = system.measure(number)
                measured[system.name].append(one)
                note = f"refused: {one.trouble}" if one.trouble else f"{one.seconds:.3f} s"
                out.print(f"round {number}, {system.name}: {note}", style="dim", markup=False)
            if number == SETTLED:
                settled = at_rest(swarm)
        memory = watched(swarm, rounds + 1, settled if rounds >= SETTLED + GROWING else [])
        payload = swarm.trainers[0].ask("payload", codec=codec)["bytes"]
    finally:
        for system in systems:
            system.close()
    results = [summary(name, ones) for name, ones in measured.items()]
    ours = results[0]["median_s"]
    return {
        "results": results,
        "ratios": {one["system"]: ratio(ours, one["median_s"]) for one in results[1:]},
        "payload_bytes": payload,
        # Every value goes to its reducer and comes back, but for what a peer reduces itself.
        "bytes_formula": 2 * (len(swarm.nodes) - 1) * payload or None,
        "memory": memory,
        "load": load(),
        "machine_busy": MachineTime.now().load_since(began),
    }


# -- what is asked for ----------------------------------------------------------------------------


def codec_settings(codec: str) -> dict[str, object]:
    """A bench averages values that nobody trains with: any codec may round them."""
    from moshpitd.daemon.settings import Settings

    found: dict[str, object] = {"averaging.codec": codec}
    if codec != "float32" and has_setting(Settings, "averaging.allow_no_error_feedback"):
        found["averaging.allow_no_error_feedback"] = True
    return found


def security_settings(security: str) -> dict[str, object]:
    """Settings by dotted key for `--security`; nothing for the default."""
    from moshpitd.daemon.settings import Settings

    if not security:
        return {}
    if not has_setting(Settings, "links.security"):
        raise ConfigError(
            "this version of moshpitd has no links.security",
            key="--security",
            expected="nothing: links are TLS",
        )
    found: dict[str, object] = {"links.security": security}
    if security != "tls":
        found |= {
            key: True
            for key in ("links.trusted_network", "network.trusted_network")
            if has_setting(Settings, key)
        }
    return found


def has_setting(settings: Any, key: str) -> bool:
    """Whether the settings know this dotted key."""
    section, _, name = key.partition(".")
    field = settings.model_fields.get(section)
    return field is not None and name in getattr(field.annotation, "model_fields", {})


def check_memory(need: int) -> None:
    """Raise ConfigError before the machine starts to swap: a figure from there says nothing."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            if need > free:
                raise ConfigError(
                    f"about {need / 1e9:.0f} GB of memory needed, {free / 1e9:.0f} GB available",
                    key="--params",
                    expected="fewer parameters or peers, or one system after the other",
                )


# -- what comes of it -----------------------------------------------------------------------------


def _judge(report: dict[str, Any]) -> None:
    from moshpitd.cli.bench_figures import Bar, refused
    from moshpitd.cli.bench_memory import memory_bars

    against_gloo = {"float16": 2.0, "int8": 1.6}.get(report["codec"])
    if report["security"] == "authenticated":
        against_gloo = {"float16": 1.4}.get(report["codec"])
    out = refused(report["results"][0])
    bars = []
    if against_gloo is not None and "gloo" in report["ratios"]:
        bars.append(Bar("time, in gloo's", report["ratios"]["gloo"], against_gloo, out))
    if "hivemind" in report["ratios"]:
        bars.append(Bar("time, in hivemind's", report["ratios"]["hivemind"], 1 / 6, out))
    formula, sent = report["bytes_formula"], report["results"][0]["bytes_sent"]
    if formula and sent is not None:
        beyond = sent / formula - 1
        report["bytes_beyond_formula"] = beyond
        bars.append(Bar("bytes on the wire beyond the formula", beyond, WIRE_WITHIN))
    if report["payload_bytes"]:
        bars += memory_bars(
            report["memory"],
            bucket=4 * report["params"],
            payload=report["payload_bytes"],
            peers=report["peers"],
        )
    report["bars"] = [bar.as_dict() for bar in bars]


def _show(report: dict[str, Any]) -> None:
    from moshpitd.cli.bench_figures import Bar, show_bars, show_results, words
    from moshpitd.cli.output import console, size, text

    title = (
        f"{report['peers']} peers, {report['params']:,} float32 each, {report['codec']}, "
        f"{report['security']}, {'in place' if report['in_place'] else 'copies'}; "
        f"machine busy {report['machine_busy']:.0%}, "
        f"load {report['load']:.1f}"
    )
    show_results(title, report["results"])
    out = console()
    for name, value in report["ratios"].items():
        out.print(text(f"ours / {name}: {words(value)}"))
    memory = report["memory"]
    grown = [
        peak - idle
        for peak, idle in zip(
            memory["peak_anonymous_bytes"], memory["idle_anonymous_bytes"], strict=True
        )
    ]
    out.print(text(f"a daemon's own memory grows by {size(max(grown))} in a round (its peak)"))
    show_bars([Bar.again(one) for one in report["bars"]])
