"""The flag that compiled code looks at between two segments: set as long as a frame waits that
overtakes the one being sent, and no longer."""

from __future__ import annotations

import pytest

from moshpitd.net.frames import FrameKind, Header
from moshpitd.net.outbox import URGENT, Outbox

PONG = Header(FrameKind.PONG)


@pytest.fixture
def outbox() -> Outbox:
    made = Outbox(frames_max=8)
    made.hand_to("link")
    return made


def test_only_what_overtakes_sets_the_flag(outbox: Outbox) -> None:
    outbox.put(0, Header(FrameKind.RESULT), lambda room: room[:0])
    assert not outbox.urgent[0]
    outbox.put(URGENT, PONG, None)
    outbox.put(URGENT, PONG, None)
    assert outbox.urgent[0]


@pytest.mark.parametrize("frames", [1, 2])
def test_the_flag_goes_with_the_last_urgent_frame(outbox: Outbox, frames: int) -> None:
    for _ in range(frames):
        outbox.put(URGENT, PONG, None)
    for left in reversed(range(frames)):
        assert outbox.take_urgent("link") is not None
        assert bool(outbox.urgent[0]) == (left > 0)
    assert outbox.take_urgent("link") is None


def test_the_flag_goes_when_a_writer_takes_the_frame_as_its_next(outbox: Outbox) -> None:
    outbox.put(URGENT, PONG, None)
    taken = outbox.take("link")
    assert taken is not None
    assert taken.header is PONG
    assert not outbox.urgent[0]


def test_the_flag_goes_with_a_discarded_group_and_with_the_end(outbox: Outbox) -> None:
    outbox.put(URGENT, Header(FrameKind.PING, group=bytes(16)), None)
    outbox.discard(bytes(16))
    assert not outbox.urgent[0]
    outbox.put(URGENT, PONG, None)
    outbox.close()
    assert not outbox.urgent[0]
