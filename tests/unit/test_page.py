"""The status page and the words of readiness: pure text, everything escaped."""

from __future__ import annotations

from moshpitd.daemon.page import MAX_ROWS, render
from moshpitd.daemon.readiness import readiness

EVIL = "<script>alert(1)</script>\"'&"


def test_an_empty_node_is_a_whole_page() -> None:
    html = render({}, ready=True, sentences=())
    assert html.startswith("<!doctype html>")
    assert "No trainer has attached yet." in html
    assert 'class="ok">ready' in html


def test_whatever_peers_and_trainers_say_is_escaped() -> None:
    row = {"run": EVIL, "peer_id": EVIL, "note": EVIL, "status": EVIL, "detail": EVIL}
    view = {
        "peer_id": EVIL,
        "addresses": [EVIL],
        "join": EVIL,
        "warnings": [EVIL],
        "runs": [row],
        "peers": [row],
        "rounds": [row],
    }
    html = render(view, ready=False, sentences=[EVIL])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 8


def test_the_page_is_bounded() -> None:
    rows = [{"run": "x" * 64, "round": i} for i in range(100_000)]
    html = render({"peers": rows, "rounds": rows, "runs": rows}, ready=True, sentences=())
    assert html.count("<tr>") < 3 * MAX_ROWS + 20


def test_sentences_are_not_said_twice() -> None:
    html = render({"warnings": ["one", "two"]}, ready=False, sentences=["one"])
    assert html.count("<li>one</li>") == 1
    assert html.count("<li>two</li>") == 1


def test_the_first_peer_of_a_swarm_is_ready() -> None:
    ready, sentences = readiness(joined=False, bootstrap=[])
    assert ready
    assert "no bootstrap address" in sentences[0]


def test_dead_bootstrap_peers_are_named_with_their_cause() -> None:
    dead = [("/ip4/8.8.8.8/tcp/1", "refused"), ("/ip4/8.8.4.4/tcp/1", "timeout")]
    ready, sentences = readiness(joined=False, bootstrap=dead)
    assert not ready
    assert sentences == (
        "bootstrap /ip4/8.8.8.8/tcp/1: refused, trying again",
        "bootstrap /ip4/8.8.4.4/tcp/1: timeout, trying again",
    )


def test_one_living_bootstrap_peer_is_enough_and_the_dead_one_is_still_named() -> None:
    bootstrap = [("/ip4/8.8.8.8/tcp/1", "ok"), ("/ip4/8.8.4.4/tcp/1", "wrong PeerID")]
    ready, sentences = readiness(joined=True, bootstrap=bootstrap)
    assert ready
    assert sentences == ("bootstrap /ip4/8.8.4.4/tcp/1: wrong PeerID, trying again",)


def test_before_anything_was_tried_and_between_answer_and_entry() -> None:
    ready, sentences = readiness(joined=False, bootstrap=[("a", "waiting")])
    assert (ready, sentences) == (False, ("bootstrap a: not tried yet",))
    ready, sentences = readiness(joined=False, bootstrap=[("a", "ok")])
    assert not ready
    assert len(sentences) == 1


def test_a_draining_node_is_not_ready() -> None:
    ready, sentences = readiness(joined=True, drain=(12.4, "SIGTERM"), bootstrap=[])
    assert not ready
    assert "draining" in sentences[0]


def test_a_run_without_trainers_says_for_how_long_and_when_it_goes() -> None:
    idle = {"run": "a", "trainers": 0, "idle_s": 61.2, "forgotten_in_s": 1738.8}
    html = render({"runs": [idle]}, ready=True, sentences=())
    assert "61 s, let go in 1739 s" in html
    assert "let go" not in render({"runs": [idle | {"trainers": 1}]}, ready=True, sentences=())
    kept = idle | {"forgotten_in_s": -1.0}
    assert "61 s, kept" in render({"runs": [kept]}, ready=True, sentences=())
