"""The cost model against the published figures, against our reference tables, and against itself:
formula, draws and events of one operation have to agree. One rule: no clock is read."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import pytest

from moshpitd.core.balance import load_shares
from moshpitd.core.grid import sides_for
from moshpitd.core.topologies import OnePeerExponential, Ring, schedule_for
from moshpitd.net.frames import HEADER_BYTES
from moshpitd.sim.costs import calibration, choice, events, scaling
from moshpitd.sim.costs.churn import Churn, join_s
from moshpitd.sim.costs.net import Lognormal, Net
from moshpitd.sim.costs.operations import (
    Operation,
    asynchronous,
    butterfly,
    group_round,
    neighbours,
    parameter_server,
    ring,
)
from moshpitd.sim.costs.payload import (
    FRAME_HEADER_BYTES,
    Payload,
    group_s,
    group_traffic,
    layout_of,
    part_payloads,
)
from moshpitd.sim.costs.steps import Circumstances, attempts_of, closed_form, monte_carlo, step
from moshpitd.tensors.codecs import CODECS, codec_for
from moshpitd.tensors.layout import Layout, TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden"
Line: TypeAlias = dict[str, str]


def lines(name: str) -> list[Line]:
    with (GOLDEN / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- calibration -----------------------------------------------------------------------------------

REFERENCE = {
    (line["system"], line["knob"], float(line["value"])): line
    for line in lines("netsim_calibration.csv")
}


def test_every_published_point_is_in_the_table_with_its_figure() -> None:
    rows = calibration.table()
    assert {(row.system, row.knob, row.value) for row in rows} == REFERENCE.keys()
    for row in rows:
        line = REFERENCE[row.system, row.knob, row.value]
        assert row.figure_epoch_s == float(line["figure_epoch_s"])


def test_the_model_is_within_15_percent_wherever_the_reference_is() -> None:
    for row in calibration.table():
        line = REFERENCE[row.system, row.knob, row.value]
        expected = abs(float(line["ratio"]) - 1.0) <= 0.15
        assert row.fits == expected, f"{row.system} {row.knob} {row.value:g}: {row.ratio:.3f}"
        # Our reference was computed with steps per epoch and padding of its own.
        assert row.model_epoch_s == pytest.approx(float(line["model_epoch_s"]), rel=0.002)


def test_what_does_not_fit_is_shown_and_explained() -> None:
    off = {(row.system, row.knob, row.value): row for row in calibration.table() if not row.fits}
    horovod = {("Horovod", "latency_ms", float(ms)) for ms in range(1, 6)}
    assert off.keys() == horovod | {
        ("ByteGrad", "latency_ms", 5.0),
        ("QAdam1bit", "latency_ms", 1.0),
    }
    for key in horovod:
        assert 0.70 <= off[key].ratio <= 0.80
        assert "negotiates" in off[key].note


# -- scaling ---------------------------------------------------------------------------------------

SCALING = {
    (line["network"], float(line["p_fail"]), int(line["N"]), line["method"]): line
    for line in lines("netsim_scaling.csv")
}
# Rounds that differ from the reference, (method, p, N) -> ours, and why ours are kept.
OTHER_ROUNDS = {
    # The reference takes the expected number of the living, 63.94, for a group count of 1; with 64
    # alive, which is 94 % of the rounds, there are 2 groups.
    ("random_groups", 0.001, 64): 3,
    # The reference leaves failures out of the matching.
    ("random_matching", 0.01, 64): 14,
}
# One peer per round: the reference has log2 N rounds, half as many more off the powers of two, and
# 2 more at 1 %. Ours are exact without failures and drawn with them.
ONE_PEER_ROUNDS = {
    0.0: {16: 4, 64: 6, 256: 8, 1024: 10, 4096: 12, 16384: 13, 100_000: 14},
    0.001: {16: 6, 64: 7, 256: 8, 1024: 10, 4096: 12, 16384: 13, 100_000: 14},
    0.01: {16: 8, 64: 10, 256: 11, 1024: 11, 4096: 12, 16384: 13, 100_000: 14},
}


@pytest.fixture(scope="module")
def grown() -> dict[tuple[str, float, int, str], scaling.Row]:
    return {(row.network, row.p_fail, row.peers, row.method): row for row in scaling.table()}


Grown: TypeAlias = dict[tuple[str, float, int, str], scaling.Row]


def test_rounds_to_agreement_are_those_of_the_reference(grown: Grown) -> None:
    assert grown.keys() == SCALING.keys()
    for (_, failure, peers, method), row in grown.items():
        reference = int(float(SCALING[row.network, failure, peers, method]["rounds_to_1e-4"]))
        if method == "one_peer_exp":
            assert row.rounds == ONE_PEER_ROUNDS[failure][peers]
        elif method == "gossip_ring":
            # 1 - cos loses digits where we do not: 3499509445 of the reference is 3499509705.
            assert row.rounds == pytest.approx(reference, rel=1e-7)
        else:
            assert row.rounds == OTHER_ROUNDS.get((method, failure, peers), reference)


def reference_round_s(network: str, failure: float, peers: int, method: str) -> float:
    line = SCALING[network, failure, peers, method]
    return float(line["seconds"]) / float(line["rounds_to_1e-4"])


def test_seconds_per_round_are_those_of_the_reference(grown: Grown) -> None:
    """Within 16 %: the reference waits for the slowest of one small sample, we for the expected
    one. The test below takes that apart."""
    for (network, failure, peers, method), row in grown.items():
        reference = float(SCALING[network, failure, peers, method]["seconds"])
        if reference > scaling.NEVER_S or math.isinf(row.seconds):
            assert reference > scaling.NEVER_S
            assert math.isinf(row.seconds)
            continue
        expected = reference_round_s(network, failure, peers, method)
        if method == "ps" and network == "volunteers":
            # The reference's server receives at the 20 Mb/s of an uplink; its downlink has 100.
            expected *= (1 / 20 + 1 / 100) / (2 / 20)
        assert row.round_s == pytest.approx(expected, rel=0.16), (network, failure, peers, method)


def test_with_its_own_sample_of_stragglers_the_reference_is_matched_within_1_percent() -> None:
    """What the reference waited for at a size is in its datacenter rows; with that, all others have
    to come out."""
    payload = Payload(scaling.PARAMETERS, "float16")
    datacenter, *others = scaling.SETTINGS
    for method in scaling.METHODS:
        for peers in scaling.PEERS:
            if method.name == "ps":
                continue  # its 0.05 s of waiting drown in minutes of transfer
            operation = method.operation(peers, payload)

            def without_waiting(
                setting: scaling.Setting, operation: Operation = operation
            ) -> float:
                around = Circumstances(window_s=setting.window_s)
                return step(operation, setting.net, around, wait_s=0.0).seconds

            known = reference_round_s(datacenter.name, 0.0, peers, method.name)
            waited = (known - without_waiting(datacenter)) / datacenter.compute.median_s
            for setting in others:
                expected = reference_round_s(setting.name, 0.0, peers, method.name)
                ours = without_waiting(setting) + waited * setting.compute.median_s
                assert ours == pytest.approx(expected, rel=0.01), (setting.name, peers, method.name)


def test_decentralized_training_of_resnet20_on_seven_nodes() -> None:
    """The two sweeps of D-PSGD, from the reference's own numbers: 65 tensors, 0.27 M parameters."""
    payload = Payload(271_200, bucket_bytes=4 * math.ceil(271_200 / 65))
    assert len(payload.buckets) == 65
    far, slow = Net("5 ms", 0.005, 10e9), Net("10 Mb/s", 1e-4, 10e6)
    for operation, by_latency, by_bandwidth in (
        (ring(7, payload), 3.90, 1.72),
        (parameter_server(7, payload), 1.31, 13.5),
        (neighbours(7, payload, degree=2), 0.33, 1.93),
    ):
        assert closed_form(operation, far, CALM).seconds == pytest.approx(by_latency, rel=0.03)
        assert closed_form(operation, slow, CALM).seconds == pytest.approx(by_bandwidth, rel=0.03)


# -- three modes, one number -----------------------------------------------------------------------

CALM = Circumstances()
NETS = (
    Net("even", 0.01, 1e9),
    Net("fast down", 0.04, 20e6, 100e6),
    Net("small windows", 0.05, 1e9, window_bytes=1e5, base_rtt_s=1e-3),
)
ONE = Payload(1_000_000)
SEVERAL = Payload(1_000_000, "float16", bucket_bytes=1_000_000)
OPERATIONS: dict[str, Callable[[int], Operation]] = {
    "ring": lambda n: ring(n, SEVERAL),
    "butterfly": lambda n: butterfly(n, SEVERAL),
    "eager butterfly": lambda n: butterfly(n, SEVERAL, eager=True),
    "parameter server": lambda n: parameter_server(n, SEVERAL, shards=2),
    "neighbours": lambda n: neighbours(n, ONE, degree=2),
    "one peer": lambda n: neighbours(n, ONE, degree=1),
    "groups": lambda n: group_round(n, 4, ONE),
    "asynchronous": lambda n: asynchronous(n, ONE),
}


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("overlap", [False, True])
def test_without_variance_draws_give_the_formula(name: str, net: Net, overlap: bool) -> None:
    operation = OPERATIONS[name](9)
    around = Circumstances(Lognormal(0.3), Lognormal(0.1), window_s=0.5, overlap=overlap)
    drawn = monte_carlo(operation, net, around, rounds=5, seed=1)
    assert drawn.seconds == pytest.approx(closed_form(operation, net, around).seconds, rel=1e-12)
    assert drawn.error_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", OPERATIONS)
def test_with_stragglers_and_failures_draws_agree_within_their_error(name: str) -> None:
    operation = OPERATIONS[name](9)
    around = Circumstances(Lognormal(1.0, 0.5), failure=0.02)
    drawn = monte_carlo(operation, NETS[0], around, rounds=4000, seed=7)
    formula = closed_form(operation, NETS[0], around).seconds
    assert abs(drawn.seconds - formula) < 4.0 * drawn.error_s
    assert drawn.error_s < 0.03 * formula


EVENTS: dict[str, Callable[[int, Net], tuple[float, Operation]]] = {
    "ring": lambda n, net: (events.ring_s(n, SEVERAL, net), ring(n, SEVERAL)),
    "butterfly": lambda n, net: (events.butterfly_s(n, SEVERAL, net), butterfly(n, SEVERAL)),
    "eager butterfly": lambda n, net: (
        events.butterfly_s(n, SEVERAL, net, eager=True),
        butterfly(n, SEVERAL, eager=True),
    ),
    "parameter server": lambda n, net: (
        events.server_s(n, SEVERAL, net),
        parameter_server(n, SEVERAL),
    ),
    "ring of neighbours": lambda n, net: (
        events.schedule_s(Ring(n), ONE, net, rounds=1),
        neighbours(n, ONE, degree=2),
    ),
    "one peer": lambda n, net: (
        events.schedule_s(OnePeerExponential(n), ONE, net, rounds=1),
        neighbours(n, ONE, degree=1),
    ),
}


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
@pytest.mark.parametrize("peers", [3, 4, 9, 16])
@pytest.mark.parametrize("name", EVENTS)
def test_synchronous_methods_take_as_long_event_by_event(name: str, peers: int, net: Net) -> None:
    seconds, operation = EVENTS[name](peers, net)
    assert seconds == pytest.approx(closed_form(operation, net, CALM).seconds, rel=1e-9)


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
def test_a_moshpit_sweep_takes_as_long_event_by_event(net: Net) -> None:
    """The daemon's own grid: every group of every round as long as the formula, d times."""
    around = Circumstances(Lognormal(0.2), window_s=3.0)
    for sides in ((4, 4), (3, 3, 3)):
        peers = math.prod(sides)
        schedule = schedule_for("moshpit", peers, sides=sides)
        seconds = events.schedule_s(
            schedule, ONE, net, rounds=len(sides), window_s=3.0, compute=around.compute
        )
        one = closed_form(group_round(peers, sides[0], ONE), net, around).seconds
        assert seconds == pytest.approx(len(sides) * one, rel=1e-9)


def test_without_barriers_a_straggler_holds_up_only_those_it_meets() -> None:
    """Rounds of groups overlap event by event, so they take less than the sum of their waits."""
    net, compute, payload = Net("fast", 1e-6, 1e12), Lognormal(1.0, 0.8), Payload(1000)
    schedule = schedule_for("random-groups", 64, group_size=4)
    seconds = events.schedule_s(schedule, payload, net, rounds=20, compute=compute, seed=3)
    assert 20 * compute.slowest_s(4) * 0.8 < seconds < 20 * compute.slowest_s(64) * 0.75


def test_asynchronous_workers_read_what_the_others_are_about_to_change() -> None:
    """In lockstep the k-th to arrive is k old; otherwise n-1 others write in between, on average,
    which is what the theory takes for the staleness."""
    net = Net("fast", 1e-4, 1e12)
    for workers in (1, 4, 10):
        even = events.server_steps(workers, ONE, net, compute=Lognormal(0.5), seconds=20.0)
        assert even.stalest == workers - 1
        uneven = events.server_steps(workers, ONE, net, compute=Lognormal(0.5, 0.5), seconds=400.0)
        applied = sum(uneven.staleness.values())
        mean = sum(age * count for age, count in uneven.staleness.items()) / applied
        assert mean == pytest.approx(workers - 1, rel=0.02)
        assert uneven.stalest > workers - 1 or workers == 1
        assert uneven.steps_per_s == pytest.approx(workers / Lognormal(0.5, 0.5).mean_s, rel=0.05)


def test_pairs_never_wait_for_a_straggler() -> None:
    """AD-PSGD steps at the mean speed, a ring of neighbours at that of the slowest of three."""
    net, compute = Net("fast", 1e-4, 1e11), Lognormal(1.0, 1.0)
    came = events.pair_steps(32, Payload(1000), net, compute=compute, seconds=300.0)
    assert 32 / came.steps_per_s == pytest.approx(compute.mean_s, rel=0.05)
    assert came.stalest > 0


# -- the pieces ------------------------------------------------------------------------------------


def test_the_slowest_of_many() -> None:
    """Against what is known: the mean, two draws in closed form, growth with their number."""
    compute = Lognormal(2.0, 0.5)
    assert compute.slowest_s(1) == pytest.approx(2.0 * math.exp(0.125))
    below = 0.5 * math.erfc(-0.5 / math.sqrt(2.0) / math.sqrt(2.0))
    assert compute.slowest_s(2) == pytest.approx(2.0 * 2.0 * math.exp(0.125) * below, rel=1e-6)
    many = [compute.slowest_s(2**k) for k in range(17)]
    assert many == sorted(many)
    assert Lognormal(2.0).slowest_s(1000) == 2.0
    # The largest of n has the distribution Phi^n, so it can be drawn without drawing n.
    rng, normal = np.random.default_rng(1), NormalDist()
    largest = [math.exp(normal.inv_cdf(u ** (1 / 100_000))) for u in rng.random(20_000).tolist()]
    drawn = sum(largest) / len(largest)
    assert Lognormal(1.0, 1.0).slowest_s(100_000) == pytest.approx(drawn, rel=0.01)


def test_windows_cost_only_what_the_rate_does_not() -> None:
    net = Net("w", 0.05, 80e6, goodput=1.0, window_bytes=1e6)  # 10 MB/s, 10 MB/s per connection
    assert net.excess_s(1e7, 1e7, 1) == pytest.approx(0.0)
    assert replace(net, latency_s=0.1).excess_s(1e7, 1e7, 1) == pytest.approx(1.0)
    assert replace(net, latency_s=0.1).excess_s(1e7, 1e7, 2) == pytest.approx(0.0)


def test_a_collective_starts_again_until_nobody_is_away() -> None:
    assert attempts_of(100, 0.0) == 1.0
    assert attempts_of(100, 0.01) == pytest.approx(0.99**-100)
    assert math.isinf(attempts_of(100_000, 0.01))
    assert math.isinf(attempts_of(2, 1.0))


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_of_the_codec(codec: str) -> None:
    """Bucket by bucket and chunk by chunk, as they would be encoded."""
    real = codec_for(codec, "float32")
    payload = Payload(1_000_003, codec, bucket_bytes=1 << 20)
    counts = [262_144, 262_144, 262_144, 213_571]
    assert list(payload.buckets) == counts
    assert payload.nbytes == sum(real.payload_bytes(count, "float32") for count in counts)
    chunks = [real.payload_bytes(math.ceil(count / 7), "float32") for count in counts]
    assert payload.chunked(7) == 7 * sum(chunks)


def test_frames_have_the_header_of_the_links() -> None:
    assert FRAME_HEADER_BYTES == HEADER_BYTES


MIXED = Layout.from_specs(
    [
        TensorSpec("w", (700_001,), "float32"),
        TensorSpec("steps", (3,), "int64"),
        TensorSpec("half", (1000, 3), "bfloat16"),
    ],
    part_bytes=65_536,
)


@pytest.mark.parametrize("codec", ["float32", "float16", "int8", "sign-l1"])
@pytest.mark.parametrize("rates", [[1.0] * 4, [1.0] * 9, [5.0, 1.0, 1.0, 0.5, 0.0], [1.0, 3.0]])
def test_what_a_group_sends_is_received(codec: str, rates: list[float]) -> None:
    traffic = group_traffic(MIXED, codec, rates)
    total, members = sum(part_payloads(MIXED, codec)), len(rates)
    assert sum(one.sent for one in traffic) == 2 * (members - 1) * total
    assert sum(one.received for one in traffic) == 2 * (members - 1) * total
    assert sum(one.frames for one in traffic) == 2 * (members - 1) * len(MIXED.parts)
    for one, rate in zip(traffic, rates, strict=True):
        if rate == 0.0:
            assert one.sent == total  # it reduces nothing: contributions out, results in


def test_an_uneven_group_takes_what_the_balance_promises() -> None:
    layout, rates = layout_of(4_000_000, part_bytes=16_384), [5e6, 2e6, 2e6, 1e6, 0.3e6]
    size, members = layout.nbytes, len(rates)
    promised = max(
        (1 + (members - 2) * share) * size / rate
        for share, rate in zip(load_shares(rates), rates, strict=True)
    )
    assert group_s(layout, "float32", rates) == pytest.approx(promised, rel=0.01)
    even = (1 + (members - 2) / members) * size / min(rates)
    assert group_s(layout, "float32", rates) < 0.75 * even


def test_churn_makes_slow_rounds_fail_more_often() -> None:
    churn = Churn(lifetime_s=600.0, arrivals_per_s=0.5)
    assert churn.failure(6.0) == pytest.approx(0.01, rel=0.01)
    assert churn.failure(1e9) == 1.0
    assert Churn().failure(1e9) == 0.0
    assert Churn().useful_share(1e9) == 1.0


def test_a_population_has_the_size_that_its_lifetime_says() -> None:
    """Drawn arrival by arrival; its spread is that of a Poisson number."""
    churn = Churn(lifetime_s=600.0, arrivals_per_s=0.5)
    drawn = churn.sizes(np.random.default_rng(5), seconds=600_000.0, samples=1000)
    assert drawn.mean() == pytest.approx(churn.peers, rel=0.02)
    assert drawn.std() == pytest.approx(math.sqrt(churn.peers), rel=0.1)


def test_a_newcomer_loads_through_the_narrower_end() -> None:
    net = Net("", 0.05, 9e6, 90e6, goodput=8 / 9)  # 1 MB/s up, 10 MB/s down
    assert join_s(net, 60e6) == pytest.approx(60.2)
    assert Churn(lifetime_s=600.0).useful_share(60.0) == pytest.approx(math.exp(-0.1))


# -- answers ---------------------------------------------------------------------------------------


def test_which_algorithm_when() -> None:
    """The rules of thumb have to come out of the model: low precision where bandwidth is short, few
    hops where latency is long, no barriers among stragglers, small groups among failures."""
    orders = {order.question: order for order in choice.orders()}

    def ranked(question: str, *algorithms: str) -> None:
        seconds = [orders[question].seconds(name) for name in algorithms]
        assert seconds == sorted(seconds), (question, algorithms, seconds)

    ranked(
        "bandwidth-bound", "QAdam1bit", "ByteGrad", "LowPrecDecentralized", "Decentralized", "DDP"
    )
    assert "ByteGrad ~ LowPrecDecentralized" in orders["bandwidth-bound"].sentence
    ranked("latency-bound", "Async", "LowPrecDecentralized", "QAdam1bit", "ByteGrad", "DDP")
    ranked("latency-bound", "Decentralized", "Horovod", "DDP")
    for free in ("AsySG", "AD-PSGD", "asynchronous averaging", "Moshpit groups of 16"):
        ranked("stragglers", free, "butterfly all-reduce", "ring all-reduce")
        assert orders["stragglers"].seconds(free) < 0.7 * orders["stragglers"].seconds(
            "butterfly all-reduce"
        )
    assert orders["no failures"].places[0].algorithm == "allreduce_butterfly"
    assert {place.algorithm for place in orders["failures"].places[:2]} == {
        "moshpit",
        "random_groups",
    }
    ranked("failures", "moshpit", "one_peer_exp", "allreduce_butterfly", "allreduce_ring")


def test_an_order_is_told_with_its_ties() -> None:
    places = tuple(
        choice.Place(*it) for it in (("a", 1.0), ("b", 1.1), ("c", 2.0), ("d", math.inf))
    )
    assert choice.Order("", "", "", places).sentence == "a ~ b < c < d"


def test_few_links_rule_out_the_large_butterfly() -> None:
    rows = scaling.table([scaling.SETTINGS[1]], peers=[16, 1024], failures=[0.0])
    small, large = choice.averaging_map(rows)
    assert small.winner == small.winner_few_links == "allreduce_butterfly"
    assert large.winner == "allreduce_butterfly"
    assert large.winner_few_links == "moshpit"
    assert large.seconds_few_links > large.seconds


def test_sides_of_the_grid_are_the_daemons() -> None:
    """One home for the rule; what is priced is what peers would build."""
    moshpit = scaling.METHODS[-1].operation(100_000, ONE)
    assert moshpit.waits_for == max(sides_for(100_000, scaling.MAX_GROUP)) == 18
