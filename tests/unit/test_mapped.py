"""Memory that is used again: only when nobody can still read it."""

from __future__ import annotations

import torch

from moshpitd.tensors.mapped import Rooms, bytes_of


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
