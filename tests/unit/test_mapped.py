"""Memory that is used again: only when nobody can still read it."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moshpitd.errors import TrainerError
from moshpitd.tensors import mapped
from moshpitd.tensors.mapped import ROOMS_CUT_BYTES, Area, Rooms, anonymous, bytes_of


def test_a_room_comes_back_when_its_last_view_goes() -> None:
    rooms = Rooms(keep_bytes=1 << 20)
    room = rooms.take(4096)
    where = room.data_ptr()
    on_its_way = bytes_of(room.view(torch.float32)[256:])  # as a link holds a payload
    del room
    assert rooms.waiting_bytes == 0
    other = rooms.take(4096)
    assert other.data_ptr() != where
    del on_its_way
    assert rooms.waiting_bytes == 4096
    assert rooms.take(4096).data_ptr() == where


def test_a_room_of_another_size_is_left_for_others() -> None:
    rooms = Rooms(keep_bytes=1 << 20)
    del_me = rooms.take(100)
    del del_me
    assert rooms.take(101).numel() == 101
    # Both wait now, and each size finds its own.
    assert rooms.waiting_bytes == 201
    held = rooms.take(100), rooms.take(101)
    assert rooms.waiting_bytes == 0
    assert [room.numel() for room in held] == [100, 101]


def test_what_waits_is_bounded_and_the_oldest_goes() -> None:
    rooms = Rooms(keep_bytes=2000)
    held = [rooms.take(size) for size in (900, 901, 902)]
    for _ in range(3):
        held.pop(0)
    assert rooms.waiting_bytes == 901 + 902


def test_no_bytes_are_a_room_too() -> None:
    assert Rooms(keep_bytes=1 << 20).take(0).numel() == 0


def test_a_round_finds_the_rooms_of_the_last_one_however_they_came_back() -> None:
    """Payloads stay until the round is over, accumulators come back at once: long before them."""
    rooms = Rooms(keep_bytes=128 << 20)
    waiting = set()
    for _ in range(4):
        payloads = []
        for _ in range(40):
            accumulator = rooms.take(1 << 20)
            payloads.append(rooms.take(1 << 19))
            del accumulator
        payloads.clear()
        waiting.add(rooms.waiting_bytes)
    assert len(waiting) == 1


def test_what_does_not_wait_is_given_back_whoever_came_back_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 rooms lie in one mapping here: one of them that waited would hold all 16 in memory."""
    mappings: list[weakref.ref[object]] = []

    def mapping(nbytes: int, **_: object) -> Tensor:
        memory = np.zeros(nbytes, np.uint8)
        mappings.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    monkeypatch.setattr(mapped, "anonymous", mapping)
    rooms = Rooms(keep_bytes=2 * ROOMS_CUT_BYTES)
    held = [rooms.take(ROOMS_CUT_BYTES // 16) for _ in range(16 * 8)]
    assert len(mappings) == 8
    random.Random(0).shuffle(held)
    while held:
        held.pop()
        assert rooms.waiting_bytes <= 2 * ROOMS_CUT_BYTES
    assert 0 < sum(memory() is not None for memory in mappings) <= 2


def test_rooms_are_lent_to_one_holder_each() -> None:
    rooms = Rooms(keep_bytes=4 << 20)

    def borrow(number: int) -> bool:
        chance = random.Random(number)
        held = []
        for turn in range(400):
            room = rooms.take(chance.choice((1000, 131_072, 262_144)))
            room[:8].view(torch.int64)[0] = number * 1000 + turn
            held.append((room, number * 1000 + turn))
            if len(held) > 6:
                before, mark = held.pop(chance.randrange(7))
                if int(before[:8].view(torch.int64)[0]) != mark:
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(borrow, range(4)))
    assert 0 < rooms.waiting_bytes <= 4 << 20


def test_a_room_may_come_back_at_any_line_of_looking_for_another() -> None:
    """As when garbage is collected there: nobody waits for himself, and nothing is lent twice."""
    lines, moment = 1, 0
    while moment < lines:
        rooms = Rooms(keep_bytes=1 << 20)
        waited, late = rooms.take(1000), [rooms.take(1000)]
        del waited
        lines = 0

        def step(
            frame: FrameType, event: str, _: object, late: list[Tensor] = late, moment: int = moment
        ) -> Callable[..., Any] | None:
            nonlocal lines
            if frame.f_code.co_filename != mapped.__file__:
                return None
            if event == "line":
                if lines == moment:
                    late.clear()
                lines += 1
            return step

        before = sys.gettrace()
        sys.settrace(step)
        try:
            held = [rooms.take(1000)]
        finally:
            sys.settrace(before)
        assert not late
        held += [rooms.take(1000), rooms.take(1000)]
        assert len({room.data_ptr() for room in held}) == 3
        assert rooms.waiting_bytes == 0
        moment += 1
    assert lines > 5


def test_memory_that_is_not_there_is_an_error_that_says_what_for() -> None:
    with pytest.raises(TrainerError, match="no memory for what codecs left over"):
        Area(1 << 20).take(1 << 60)
    with pytest.raises(TrainerError, match="no memory for a copy of the parameters"):
        anonymous(1 << 60)
