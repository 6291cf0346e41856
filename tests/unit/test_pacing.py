"""Frames in front of a link: in order, a few at a time, urgent ones first, none after its end."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from concurrent.futures import Future

from moshpitd.daemon.pacing import FRAMES_AHEAD, Frame, Links, Pacer, PayloadFunction
from moshpitd.errors import LocalProtocolError, Unreachable
from moshpitd.net.frames import FrameKind, Header


class OneLink:
    """A link whose writer is the test: `write()` takes the next frame and asks for its payload."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, Header, PayloadFunction]] = []
        self.refuses: Exception | None = None
        self._numbers = iter(range(1 << 30))

    def send(
        self, peer_id: str, header: Header, payload_fn: PayloadFunction | None, *, priority: int = 0
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        assert payload_fn is not None
        heapq.heappush(self.waiting, (priority, next(self._numbers), header, payload_fn))

    def write(self) -> int:
        _, _, header, payload_fn = heapq.heappop(self.waiting)
        payload_fn(memoryview(b""))
        return header.part

    def write_all(self) -> list[int]:
        parts = []
        while self.waiting:
            parts.append(self.write())
        return parts

    def discard(self, group: bytes) -> int:
        before = len(self.waiting)
        self.waiting = [one for one in self.waiting if one[2].group != group]
        heapq.heapify(self.waiting)
        return before - len(self.waiting)

    def dial(self, peer_id: str, addresses: tuple[str, ...]) -> Future[None]:
        raise NotImplementedError

    def expect(self, peer_id: str) -> None: ...

    def is_up(self, peer_id: str) -> bool:
        return True

    def ping(self, peer_id: str) -> None: ...

    def heard(self, peer_id: str) -> int:
        return 0


def group(number: int) -> bytes:
    return number.to_bytes(16, "big")


def frames(parts: range, number: int = 1) -> Iterator[Frame]:
    for part in parts:
        yield Header(FrameKind.RESULT, group=group(number), part=part), lambda _: b""


def paced() -> tuple[OneLink, Pacer]:
    link = OneLink()
    as_links: Links = link
    return link, Pacer(as_links)


def test_a_long_push_waits_here_and_goes_out_in_order() -> None:
    link, pacer = paced()
    pacer.put("a", group(1), frames(range(1000)), priority=0)
    longest = len(link.waiting)
    sent = []
    while link.waiting:
        sent.append(link.write())
        longest = max(longest, len(link.waiting))
    assert sent == list(range(1000))
    assert longest == FRAMES_AHEAD
    assert pacer._lanes == {}, "nothing is kept of a peer that nothing waits for"


def test_a_round_overtakes_a_snapshot() -> None:
    link, pacer = paced()
    pacer.put("a", group(1), frames(range(100, 150)), priority=10)
    pacer.put("a", group(2), frames(range(3), 2), priority=0)
    sent = link.write_all()
    assert sorted(sent.index(part) for part in range(3))[-1] <= FRAMES_AHEAD + 3
    assert [part for part in sent if part >= 100] == list(range(100, 150))


def test_streams_of_one_priority_go_one_after_another() -> None:
    link, pacer = paced()
    pacer.put("a", group(1), frames(range(10)), priority=0)
    pacer.put("a", group(2), frames(range(20, 30), 2), priority=0)
    assert link.write_all() == [*range(10), *range(20, 30)]


def test_a_discarded_group_leaves_room_for_the_others() -> None:
    link, pacer = paced()
    pacer.put("a", group(1), frames(range(100)), priority=0)
    pacer.put("a", group(2), frames(range(200, 210), 2), priority=0)
    pacer.discard(group(1))
    assert link.write_all() == list(range(200, 210))


def test_a_lost_link_takes_what_waited_with_it() -> None:
    link, pacer = paced()
    pacer.put("a", group(1), frames(range(100)), priority=0)
    old = list(link.waiting)
    link.waiting.clear()
    pacer.forget("a")
    pacer.put("a", group(2), frames(range(5), 2), priority=0)
    for _, _, _, payload_fn in old:  # a writer that was in the middle of one
        payload_fn(memoryview(b""))
    assert link.write_all() == list(range(5))


def test_a_link_that_takes_nothing_is_not_an_error_here() -> None:
    for refusal in (Unreachable("no link"), LocalProtocolError("its queue is full")):
        link, pacer = paced()
        link.refuses = refusal
        pacer.put("a", group(1), frames(range(100)), priority=0)
        link.refuses = None
        pacer.put("a", group(2), frames(range(2), 2), priority=0)
        assert link.write_all() == [0, 1]


def test_a_push_that_keeps_pace_with_others_goes_out_whole_and_in_order() -> None:
    link, pacer = paced()
    pacer.put("a", group(1), frames(range(40)), priority=0, abreast=40)
    pacer.put("b", group(1), frames(range(100, 140)), priority=0, abreast=40)
    sent = link.write_all()
    assert [part for part in sent if part < 100] == list(range(40))
    assert [part for part in sent if part >= 100] == list(range(100, 140))


def test_what_a_lane_has_sent_counts_for_the_pace_of_its_round() -> None:
    link, pacer = paced()
    pacer.put("a", group(1), frames(range(40)), priority=0, abreast=40)
    pacer.put("b", group(1), frames(range(100, 140)), priority=0, abreast=40)
    assert [link.write() for _ in range(3)] == [0, 1, 2]
    assert {peer: lane.taken for peer, lane in pacer._rounds[group(1)]._lanes.items()} == {
        "a": 3, "b": 0,
    }  # fmt: skip


def test_a_lane_is_not_waited_for_when_its_link_is_lost_or_its_round_is_over() -> None:
    _, pacer = paced()
    for number in (1, 2):
        pacer.put("a", group(number), frames(range(40), number), priority=0, abreast=40)
        pacer.put("b", group(number), frames(range(40), number), priority=0, abreast=40)
    first, second = (pacer._rounds[group(number)] for number in (1, 2))
    for together in (first, second):
        for _ in range(10):
            together.take("a", 0.0)
        assert together.ahead("a")
    pacer.forget("b")
    assert not first.ahead("a")
    assert not second.ahead("a")
    pacer.discard(group(1))
    assert list(pacer._rounds) == [group(2)]
