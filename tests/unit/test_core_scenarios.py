"""What the scenario tests on real daemons found in the core, each as the shortest scene by hand.

One rule: a scene here fails for the reason in its docstring and no other; when the core is right
the strict xfail goes and the scene stays.
"""

from __future__ import annotations

from moshpitd.core import events as ev
from moshpitd.core.messages import Declined
from moshpitd.core.outcome import Reason, Status
from tests.kit.hands import Hands


def test_a_leader_that_declines_one_by_one_does_not_part_the_others() -> None:
    """S9. p00's contribution was refused (a NaN), so it declines. p02 hears that first and joins
    p01, which still waits for p00's answer and redirects p02 to p00. p02 counts p01 as gone with
    p00, although p00 has just declined, and ends alone at once; p01 waits a whole window for it.
    On four daemons about one round in five, when the refused peer has the lowest PeerID.
    """
    hands = Hands(3)
    hands.attach_all()
    hands.tell("p00", ev.ContributionRefused("t"))
    hands.settle()
    hands.hold = lambda sender, to, message: isinstance(message, Declined) and to == "p01"
    tokens = [hands.contribute("p01"), hands.contribute("p02")]
    hands.settle()
    hands.release()
    hands.finish()
    assert [hands.outcomes[token].group_size for token in tokens] == [2, 2], hands.tail()


def test_a_leader_of_far_too_large_a_weight_is_told_so_and_costs_the_others_nothing() -> None:
    """S18. 10^9 among 1s, and it is the leader's own: it begins a group that nobody enters, the
    others wait 2.25 s for a leader that never comes, and the leader is told "partial, not_member,
    accepted" and goes up to version 1 with its own values.
    """
    hands = Hands(4)
    hands.attach_all()
    start = hands.now
    tokens = [
        hands.contribute(f"p{i:02d}", [float(i)] * hands.parts, weight=1 if i else 10**9)
        for i in range(4)
    ]
    hands.finish()
    heavy, *others = (hands.outcomes[token] for token in tokens)
    assert [one.participants for one in others] == [3, 3, 3], hands.tail()
    assert max(hands.ended_at[token] for token in tokens[1:]) - start < 1.0
    assert heavy.status in (Status.ALONE, Status.FAILED)
    assert Reason.WEIGHT in hands.reasons()
    assert hands.value("p00") == 0.0


def test_a_codec_that_failed_is_named_to_everybody() -> None:
    """S14. The reason travels and the codec is in Begin, but the others read no more than "1 of 4
    parts have no result: 2".
    """
    hands = Hands(3)
    hands.attach_all()
    for name in hands.nodes:
        hands.average_fault[name, 2] = Reason.CODEC
    tokens = hands.start()
    hands.finish()
    for name, token in tokens.items():
        outcome = hands.outcomes[token]
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.CODEC), hands.tail()
        assert outcome.parts_without_result == (2,)
        assert "float32" in outcome.detail, (name, outcome.detail)
