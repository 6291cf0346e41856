"""Golden transcripts: what three peers say to each other, word for word.

One rule: a transcript changes only together with a decision about the protocol. To write them anew
after one, run this file with MOSHPITD_WRITE_TRANSCRIPTS=1 and read the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moshpitd.core.messages import Accepted
from tests.kit.hands import Hands

FOLDER = Path(__file__).parents[1] / "golden" / "transcripts"


def three_ready() -> Hands:
    hands = Hands(3)
    hands.attach_all()
    hands.start()
    hands.finish()
    return hands


def one_idle() -> Hands:
    hands = Hands(3)
    hands.attach_all()
    hands.start(2)
    hands.finish()
    return hands


def sender_dies() -> Hands:
    hands = Hands(3)
    hands.attach_all()
    hands.drop = lambda sender, to, what: isinstance(what, tuple) and sender == "p02"
    hands.start()
    while len(hands.nodes["p02"].opened) == 0:
        hands.step(1)
    hands.kill("p02")
    hands.finish()
    return hands


def follower_leaves() -> Hands:
    hands = Hands(3)
    hands.attach_all()
    tokens = hands.start(2)
    while not hands.said(Accepted):
        hands.step(1)
    hands.cancel(tokens["p01"])
    hands.finish()
    return hands


SCENES: list[Callable[[], Hands]] = [three_ready, one_idle, sender_dies, follower_leaves]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_transcript_is_what_it_was(scene: Callable[[], Hands]) -> None:
    path = FOLDER / f"{scene.__name__}.txt"
    said = "\n".join(scene().transcript) + "\n"
    if os.environ.get("MOSHPITD_WRITE_TRANSCRIPTS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")
