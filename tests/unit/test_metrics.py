"""Metrics: each note of the core has a place, labels are bounded, two nodes do not mix."""

from __future__ import annotations

import pytest

from moshpitd.core.effects import NOTES, Note
from moshpitd.core.outcome import Reason
from moshpitd.daemon.choosing import Choice
from moshpitd.daemon.metrics import MAX_RUNS, NodeMetrics

DESIGNED = (
    "moshpit_rounds_total",
    "moshpit_round_seconds",
    "moshpit_group_size",
    "moshpit_peers",
    "moshpit_peer_events_total",
    "moshpit_bytes_total",
    "moshpit_parts_total",
    "moshpit_codec_seconds_total",
    "moshpit_link_bytes_per_second",
    "moshpit_strikes_total",
    "moshpit_parity_mismatches_total",
    "moshpit_trainers",
    "moshpit_version",
    "moshpit_version_lag",
    "moshpit_draining",
    "moshpit_build_info",
    "process_open_fds",
)


@pytest.fixture
def metrics() -> NodeMetrics:
    return NodeMetrics("0.1.0")


def value(metrics: NodeMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_every_note_has_a_place(metrics: NodeMetrics) -> None:
    assert metrics._observers.keys() == NOTES.keys()
    for what in NOTES:
        metrics.observe("digits", Note(what))
        metrics.observe("digits", Note(what, "Qm", "silent", "words"))


def test_a_note_of_a_newer_core_is_not_an_error(metrics: NodeMetrics) -> None:
    metrics.observe("digits", Note("something_new"))


@pytest.mark.parametrize(
    ("note", "name", "labels"),
    [
        (Note("peer_heard"), "moshpit_peer_events_total", {"event": "joined"}),
        (Note("peer_lost", reason="silent"), "moshpit_peer_events_total", {"event": "lost"}),
        (Note("peer_lost", reason="draining"), "moshpit_peer_events_total", {"event": "left"}),
        (
            Note("peer_lost", reason="preempted"),
            "moshpit_peer_events_total",
            {"event": "preempted"},
        ),
        (
            Note("round_ended", fields={"outcome": "partial", "parts": 3, "without_result": 2}),
            "moshpit_parts_total",
            {"result": "averaged"},
        ),
        (
            Note("part_without_result", reason="silent"),
            "moshpit_parts_total",
            {"result": "without_result"},
        ),
        (
            Note("offers_less", reason="too_slow", fields={"parts": 3, "offered": 2}),
            "moshpit_parts_total",
            {"result": "withheld"},
        ),
        (
            Note("member_excluded", reason="link_lost"),
            "moshpit_excluded_total",
            {"reason": "link_lost"},
        ),
        (
            Note("refused", reason="schema_differs"),
            "moshpit_refusals_total",
            {"reason": "schema_differs"},
        ),
        (
            Note("attempt_ended", reason="no_peers"),
            "moshpit_attempts_without_group_total",
            {"reason": "no_peers"},
        ),
        (Note("parity_differs"), "moshpit_parity_mismatches_total", {}),
        (Note("snapshot_loaded"), "moshpit_snapshots_total", {"event": "loaded"}),
        (Note("snapshot_served"), "moshpit_snapshots_total", {"event": "served"}),
    ],
)
def test_what_a_note_counts(
    metrics: NodeMetrics, note: Note, name: str, labels: dict[str, str]
) -> None:
    metrics.observe("digits", note)
    metrics.observe("digits", note)
    assert value(metrics, name, run="digits", **labels) == 2


def test_a_round(metrics: NodeMetrics) -> None:
    fields = {
        "outcome": "complete",
        "group_size": 4,
        "version": 7,
        "seconds": {"matchmaking": 0.2, "exchange": 1.5, "invented": 1.0},
    }
    metrics.observe("digits", Note("round_ended", fields=fields))
    assert value(metrics, "moshpit_rounds_total", run="digits", outcome="complete") == 1
    assert value(metrics, "moshpit_group_size", run="digits") == 4
    assert value(metrics, "moshpit_version", run="digits") == 7
    seconds = "moshpit_round_seconds_sum"
    assert value(metrics, seconds, run="digits", phase="exchange") == 1.5
    assert value(metrics, seconds, run="digits", phase="invented") is None


def test_seconds_may_be_pairs(metrics: NodeMetrics) -> None:
    fields = {"outcome": "alone", "seconds": (("exchange", 2.0),)}
    metrics.observe("digits", Note("round_ended", fields=fields))
    assert value(metrics, "moshpit_round_seconds_sum", run="digits", phase="exchange") == 2.0


def test_a_reason_that_a_peer_invented_is_other(metrics: NodeMetrics) -> None:
    for reason in ("one", "two", "12D3KooW", *(reason.value for reason in Reason)):
        metrics.observe("digits", Note("strike", reason=reason))
    assert value(metrics, "moshpit_strikes_total", reason="other") == 3
    text = metrics.render().decode()
    assert text.count("moshpit_strikes_total{") == len(Reason) + 1


def test_runs_beyond_the_bound_share_a_label(metrics: NodeMetrics) -> None:
    for i in range(2 * MAX_RUNS):
        metrics.set_trainers(f"run {i}", 1)
        metrics.observe(f"run {i}", Note("peer_heard"))
    assert metrics.render().decode().count("moshpit_trainers{") == MAX_RUNS + 1
    name = "moshpit_peer_events_total"
    assert value(metrics, name, run="other", event="joined") == MAX_RUNS
    assert value(metrics, name, run="run 0", event="joined") == 1


def test_what_the_daemon_counts_itself(metrics: NodeMetrics) -> None:
    metrics.add_carried("digits", "part", True, 10)
    metrics.add_carried("digits", "part", True, 5)
    metrics.add_codec_seconds("float32", "encode", 0.5)
    metrics.set_link_rates(None, 2e6)
    metrics.set_peers("digits", {"heard": 3, "lost": 1})
    metrics.set_version("digits", 9, lag=2)
    metrics.set_joined(True)
    metrics.set_draining(True)
    got = {
        "sent": value(metrics, "moshpit_bytes_total", run="digits", direction="sent", kind="part"),
        "codec": value(metrics, "moshpit_codec_seconds_total", codec="float32", op="encode"),
        "rate": value(metrics, "moshpit_link_bytes_per_second", direction="received"),
        "heard": value(metrics, "moshpit_peers", run="digits", state="heard"),
        "member": value(metrics, "moshpit_peers", run="digits", state="member"),
        "lag": value(metrics, "moshpit_version_lag", run="digits"),
        "joined": value(metrics, "moshpit_joined"),
        "draining": value(metrics, "moshpit_draining"),
        "build": value(metrics, "moshpit_build_info", version="0.1.0"),
    }
    assert got == {
        "sent": 15,
        "codec": 0.5,
        "rate": 2e6,
        "heard": 3,
        "member": 0,
        "lag": 2,
        "joined": 1,
        "draining": 1,
        "build": 1,
    }


def test_two_nodes_of_one_process_do_not_mix() -> None:
    one, two = NodeMetrics("1"), NodeMetrics("2")
    one.set_trainers("digits", 3)
    assert value(two, "moshpit_trainers", run="digits") is None


def test_the_metrics_of_the_design_are_there(metrics: NodeMetrics) -> None:
    text = metrics.render().decode()
    for name in DESIGNED:
        assert f"# TYPE {name} " in text, name


def test_links_by_what_contributions_travel_with(metrics: NodeMetrics) -> None:
    name = "moshpit_contribution_links"
    coded = {"run": "digits", "codec": "float16", "reason": "coding_pays"}
    raw = {"run": "digits", "codec": "float32", "reason": "raw_is_faster"}
    metrics.set_choices("digits", [])
    assert value(metrics, name, **coded) is None
    metrics.set_choices("digits", [Choice("float16", "coding_pays", "")] * 3)
    assert value(metrics, name, **coded) == 3
    metrics.set_choices("digits", [Choice("float32", "raw_is_faster", "")])
    assert (value(metrics, name, **coded), value(metrics, name, **raw)) == (0, 1)


def test_a_run_that_was_let_go_has_no_series_and_frees_its_label(metrics: NodeMetrics) -> None:
    def live(run: str) -> None:
        for what in NOTES:
            metrics.observe(run, Note(what, reason="silent", fields={"seconds": {"parity": 1.0}}))
        metrics.add_carried(run, "part", True, 10)
        metrics.set_residual_bytes(run, {"sender": 1})
        metrics.set_choices(run, [Choice("float16", "coding_pays", "")])
        metrics.set_peers(run, {})
        metrics.set_version(run, 9)

    for i in range(MAX_RUNS):
        live(f"run {i}")
    before = metrics.render().decode()
    ended = {line for line in before.splitlines() if 'run="run 7"' in line}
    assert len(ended) > 40
    metrics.forget("run 7", "idle")
    after = metrics.render().decode()
    assert {line for line in before.splitlines() if 'run="' in line} - ended == {
        line for line in after.splitlines() if 'run="' in line
    }
    assert value(metrics, "moshpit_runs_forgotten_total", reason="idle") == 1
    live("the next")
    assert value(metrics, "moshpit_version", run="the next") == 9
    live("run 7")
    assert value(metrics, "moshpit_version", run="run 7") is None, "no room for its label now"
    metrics.forget("a run that nothing was counted of", "limit")
