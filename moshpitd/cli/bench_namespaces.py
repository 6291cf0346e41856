"""`bench namespaces`: one exchange over capped lines, beside plain TCP that moves the same bytes.

Every peer's daemon runs in a network namespace of its own, whose line `tc` caps in both directions;
the trainers are outside and speak to it through its Unix socket. `even`: all lines alike; `slow`:
the last one slower, and plain TCP is given the optimal shares.

One rule: both use the same lines in turn, round by round; what is compared is the exchange alone,
because whoever moves bytes by hand finds no group first.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moshpitd.errors import ConfigError

if TYPE_CHECKING:
    from moshpitd.cli.bench_processes import Swarm, Worker
    from moshpitd.cli.demo_processes import Children
    from moshpitd.cli.namespaces import Line, Namespace

AT_MOST = {"even": 1.05, "slow": 1.10}  # of plain TCP's time
PATIENCE_S = 120.0  # sixty times what the slowest line of the bars needs


def namespaces(
    peers: Annotated[int, typer.Option(help="Namespaces, each with a daemon; one group.")] = 4,
    params: Annotated[float, typer.Option(help="float32 parameters per peer.")] = 8e6,
    codec: Annotated[str, typer.Option(help="How values travel.")] = "float16",
    mbps: Annotated[float, typer.Option(help="Cap of every line, both directions.")] = 100.0,
    slow_mbps: Annotated[
        float, typer.Option(help="Cap of the last line in the second case; 0: no such case.")
    ] = 25.0,
    loss: Annotated[float, typer.Option(help="Share of packets lost at random, 0 to 0.5.")] = 0.0,
    part_kib: Annotated[
        int, typer.Option(help="averaging.part_bytes in KiB; 0: the daemon's default.")
    ] = 0,
    rounds: Annotated[int, typer.Option(help="Measured rounds of each system and case.")] = 5,
    security: Annotated[str, typer.Option(help="links.security: tls or authenticated.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Time one exchange over slow lines, beside plain TCP. Needs root, ip and tc."""
    from moshpitd.cli.bench_allreduce import codec_settings, security_settings
    from moshpitd.cli.bench_figures import check_writable, load, write_json
    from moshpitd.cli.bench_processes import check_range
    from moshpitd.cli.namespaces import Line, missing

    check_range("--peers", peers, 2, 16)
    check_range("--params", params, 1, 4e9)
    check_range("--rounds", rounds, 1, 1000)
    check_range("--mbps", mbps, 1, 1e5)
    check_range("--slow-mbps", slow_mbps, 0, mbps)
    check_range("--loss", loss, 0, 0.5)
    check_range("--part-kib", part_kib, 0, 1 << 16)
    check_writable(json_file)
    reason = missing(loss=loss > 0)
    if reason:
        raise ConfigError(f"no network namespaces here: {reason}")
    settings = codec_settings(codec) | security_settings(security)
    if part_kib:
        settings["averaging.part_bytes"] = part_kib << 10
    lines = {"even": [Line(mbps, mbps)] * peers}
    if slow_mbps:
        lines["slow"] = [*[Line(mbps, mbps)] * (peers - 1), Line(slow_mbps, slow_mbps)]
    report: dict[str, Any] = {
        "peers": peers, "params": int(params), "codec": codec, "mbps": mbps,
        "slow_mbps": slow_mbps, "loss": loss, "part_kib": part_kib,
        "security": security or "tls", "cases": [],
    }  # fmt: skip
    for case, its in lines.items():
        report["cases"].append(
            {"case": case}
            | _measure(
                its, numel=int(params), codec=codec, rounds=rounds, loss=loss, settings=settings
            )
        )
    report["load"] = load()
    _judge(report)
    _show(report)
    write_json(json_file, report)
    raise typer.Exit(1 if any(bar["refused"] for bar in report["bars"]) else 0)


def _measure(
    lines: Sequence[Line],
    *,
    numel: int,
    codec: str,
    rounds: int,
    loss: float,
    settings: dict[str, object],
) -> dict[str, Any]:
    from moshpitd.cli import namespaces as kernel
    from moshpitd.cli.bench_figures import median, ratio, summary
    from moshpitd.cli.bench_meters import MachineTime
    from moshpitd.cli.bench_processes import Swarm, processes
    from moshpitd.cli.bench_systems import Measured
    from moshpitd.cli.output import console

    out = console()
    ours: list[Measured] = []
    plain: list[Measured] = []
    # The namespaces last longer than the processes in them: `processes` ends first.
    with kernel.namespaces(lines, loss=loss) as places, processes() as (children, folder):
        swarm = Swarm(
            children, folder, peers=len(lines), numel=numel, settings=settings,
            places=[place_of(one) for one in places],
        )  # fmt: skip
        baseline = Plain(children, folder, places)
        try:
            out.print(f"starting {len(lines)} daemons in namespaces", style="dim")
            swarm.start()
            payload = swarm.trainers[0].ask("payload", codec=codec)["bytes"]
            plan = baseline.start(payload)
            swarm.attach(f"bench-{secrets.token_hex(4)}")
            one_exchange(swarm, 0, codec="")  # it opens the links, which then stay
            baseline.measure()
            began = MachineTime.now()
            for number in range(1, rounds + 1):
                measured = one_exchange(swarm, number, codec=codec)
                ours.append(measured)
                plain.append(baseline.measure())
                note = f"refused: {measured.trouble}" if measured.trouble else ""
                out.print(
                    f"round {number}: exchange {measured.seconds:.3f} s, "
                    f"plain TCP {plain[-1].seconds:.3f} s {note}",
                    style="dim",
                    markup=False,
                )
            busy = MachineTime.now().load_since(began)
        finally:
            swarm.close()
            baseline.close()
    results = [summary("exchange", ours), summary("plain tcp", plain)]
    pairs = [a.seconds / b.seconds for a, b in zip(ours, plain, strict=True) if not a.trouble]
    return {
        "lines": [[line.up_mbps, line.down_mbps] for line in lines],
        "ideal_s": plan["ideal_s"],
        "shares": plan["shares"],
        "results": results,
        "ratio": ratio(results[0]["median_s"], results[1]["median_s"]),
        "median_of_ratios": median(pairs),
        "machine_busy": busy,
    }


def one_exchange(swarm: Swarm, number: int, *, codec: str) -> Any:
    """One round of all trainers; `seconds` are the longest exchange phase of all members. Without
    `codec` all contribute the same and nothing is checked, as in the first round of a run."""
    from moshpitd.cli.bench_processes import ask_all
    from moshpitd.cli.bench_systems import Measured, not_the_mean, not_whole

    trainers = swarm.trainers
    ask_all(trainers, "fill", round=number, same=not codec)
    swarm.average(timeout_s=PATIENCE_S)
    answers = [trainer.hear(PATIENCE_S + 30.0) for trainer in trainers]
    results = [answer["result"] for answer in answers if answer.get("result")]
    measured = Measured(max((one["seconds"].get("exchange", 0.0) for one in results), default=0.0))
    for one in results:
        for phase, seconds in one["seconds"].items():
            measured.phases[phase] = max(seconds, measured.phases.get(phase, 0.0))
        measured.bytes_sent += one["bytes_sent"]
    measured.trouble = not_whole(answers)
    if codec and not measured.trouble:
        weights = [1] * len(trainers)
        checks = ask_all(trainers, "check", round=number, weights=weights, codec=codec)
        measured.trouble = not_the_mean(checks, len(trainers))
    return measured


class Plain:
    """The members of a plain TCP all-to-all, one per namespace."""

    def __init__(self, children: Children, folder: Path, places: Sequence[Namespace]) -> None:
        self._children, self._folder, self._places = children, folder, places
        self._members: list[Worker] = []
        self._counts: list[list[int]] = []

    def start(self, payload_bytes: int) -> dict[str, Any]:
        """Connected; returns what each sends to each, with the optimal shares."""
        from moshpitd.cli.bench_processes import START_S, ask_all, start_worker

        for index, place in enumerate(self._places):
            arguments = ["-m", "moshpitd.testing.bench.plain"]
            arguments += ["--index", str(index), "--host", place.host]
            log = self._folder / f"plain-{index}.log"
            name = f"plain TCP's member {index}"
            self._members.append(
                start_worker(self._children, name, arguments, log, within=place.within)
            )
        for member in self._members:
            member.hear(START_S)
        addresses = [one["address"] for one in ask_all(self._members, "address")]
        ask_all(self._members, "connect", addresses=addresses)
        plan = self._members[0].ask(
            "plan",
            up_mbps=[place.line.up_mbps for place in self._places],
            down_mbps=[place.line.down_mbps for place in self._places],
            payload_bytes=payload_bytes,
        )
        self._counts = plan["bytes"]
        return plan

    def measure(self) -> Any:
        """One exchange of all bytes."""
        from moshpitd.cli.bench_processes import HEADSTART_S
        from moshpitd.cli.bench_systems import Measured

        at = time.monotonic() + HEADSTART_S
        for index, member in enumerate(self._members):
            out = self._counts[index]
            back = [row[index] for row in self._counts]
            member.tell("exchange", at=at, bytes=out, expect=back)
        answers = [member.good(member.hear(PATIENCE_S), "exchange") for member in self._members]
        seconds = max(one["ended"] for one in answers) - min(one["began"] for one in answers)
        return Measured(seconds, bytes_sent=sum(map(sum, self._counts)))

    def close(self) -> None:
        for member in self._members:
            member.close()


def place_of(namespace: Namespace) -> Any:
    """Where a daemon runs, told what its line carries, as an operator who pays for it knows."""
    from moshpitd.cli.bench_processes import Place

    line = namespace.line
    rates = {"network.up_mbps": line.up_mbps, "network.down_mbps": line.down_mbps}
    return Place(namespace.within, namespace.host, rates)


def _judge(report: dict[str, Any]) -> None:
    from moshpitd.cli.bench_figures import Bar, refused

    report["bars"] = [
        Bar(
            f"{one['case']}, in plain TCP's time",
            one["ratio"],
            AT_MOST[one["case"]],
            refused(*one["results"]),
        ).as_dict()
        for one in report["cases"]
    ]


def _show(report: dict[str, Any]) -> None:
    from moshpitd.cli.bench_figures import Bar, show_bars, show_results, words
    from moshpitd.cli.output import console, text

    for one in report["cases"]:
        caps = ", ".join(f"{up:g}" for up, _ in one["lines"])
        show_results(
            f"{one['case']}: {report['params']:,} float32 each, {report['codec']}, "
            f"{report['security']}, lines of {caps} Mbit/s, loss {report['loss']:g}; "
            f"machine busy {one['machine_busy']:.0%}, load {report['load']:.1f}",
            one["results"],
        )
        ideal = f"ideal {words(one['ideal_s'])} s: payload over the slowest line"
        plain = one["results"][1]["median_s"]
        beside = f", plain TCP {plain / one['ideal_s']:.3f} of it" if plain else ""
        console().print(text(f"{ideal}{beside}; exchange / plain TCP {words(one['ratio'])}"))
    show_bars([Bar.again(one) for one in report["bars"]])
