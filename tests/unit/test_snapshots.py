"""Snapshots: the donor copy, transfers of it, and everything that can come between."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moshpitd.core.effects import (
    Average,
    Close,
    Digest,
    DropSnapshot,
    FetchSnapshot,
    LoadSnapshot,
    PushSnapshot,
    RefreshSnapshot,
)
from moshpitd.core.events import (
    Averaged,
    Digested,
    SnapshotArrived,
    SnapshotFailed,
    SnapshotProgressed,
    SnapshotRefreshed,
    SnapshotSent,
)
from moshpitd.core.outcome import Reason
from moshpitd.daemon import staging, transfer
from moshpitd.daemon.ongoing import run_hash
from moshpitd.errors import LocalProtocolError, TrainerError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.hashing import digest
from tests.kit.planes import (
    RUN,
    Plane,
    group_of,
    layout_of,
    open_round,
    planes,
    set_generation,
    some_tensors,
)
from tests.unit.test_exchange import over_tcp

NONCE = b"n" * 16


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Plane]]:
    """A donor and a newcomer, each with a trainer; nothing has been copied yet."""
    with planes(2, layout_of(some_tensors(0)), tmp_path) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", some_tensors(number))
        yield made


def fetch(newcomer: Plane, donor: Plane, *, state_bytes: int = 0, **changes: Any) -> None:
    effect = FetchSnapshot(
        NONCE, donor.peer_id, donor.addresses, len(donor.layout.parts), state_bytes
    )
    newcomer.exchange.handle(RUN, replace(effect, **changes))


def push(donor: Plane, newcomer: Plane) -> None:
    donor.exchange.handle(RUN, PushSnapshot(NONCE, newcomer.peer_id, newcomer.addresses))


@pytest.mark.parametrize("wire", ["memory", "tcp"])
@pytest.mark.parametrize("state", [b"", b"step 7", bytes(range(256)) * 4096 * 3 + b"tail"])
def test_a_newcomer_gets_the_donors_bytes_and_state(
    wire: str, state: bytes, tmp_path: Path
) -> None:
    make = over_tcp if wire == "tcp" else None
    with planes(2, layout_of(some_tensors(0)), tmp_path, make) as (donor, newcomer):
        theirs = donor.trainer("t", some_tensors(0))
        for number in (1, 2):
            newcomer.trainer(f"t{number}", some_tensors(number))
        value = donor.exchange.initial_snapshot(RUN, "t", 4)
        assert value == digest(theirs.data)
        donor.exchange.set_state(RUN, state)
        before = theirs.data.clone()
        fetch(newcomer, donor, state_bytes=len(state))
        push(donor, newcomer)
        donor.wait(SnapshotSent)
        theirs.data.fill_(3)  # the donor's trainer trains on
        assert newcomer.wait(SnapshotArrived) == SnapshotArrived(NONCE, value)
        assert any(isinstance(event, SnapshotProgressed) for event in newcomer.seen)
        newcomer.exchange.handle(RUN, LoadSnapshot(NONCE, 4, ("t1", "t2", "gone")))
        for name in ("t1", "t2"):
            assert torch.equal(newcomer.buckets[name].data, before)
        assert newcomer.exchange.state(RUN) == state
        assert newcomer.exchange.snapshot_version(RUN) == 4
        newcomer.exchange.handle(RUN, Digest(4))
        assert newcomer.wait(Digested) == Digested(4, value)
        # Its copy is good for the next newcomer; here the former donor.
        fetch(donor, newcomer, state_bytes=len(state), nonce=b"m" * 16)
        effect = PushSnapshot(b"m" * 16, donor.peer_id, donor.addresses)
        newcomer.exchange.handle(RUN, effect)
        assert donor.wait(SnapshotArrived).digest == value


def test_frames_of_a_transfer_may_come_before_the_offer(pair: list[Plane]) -> None:
    donor, newcomer = pair
    value = donor.exchange.initial_snapshot(RUN, "t", 1)
    push(donor, newcomer)
    donor.wait(SnapshotSent)
    fetch(newcomer, donor)
    assert newcomer.wait(SnapshotArrived).digest == value


def test_refresh_follows_the_bucket(pair: list[Plane]) -> None:
    plane = pair[0]
    bucket = plane.buckets["t"]
    first = plane.exchange.initial_snapshot(RUN, "t", 1)
    bucket.data.zero_()
    plane.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    plane.exchange.handle(RUN, RefreshSnapshot(3, "nobody"))
    assert plane.wait(SnapshotRefreshed) == SnapshotRefreshed(2)
    for version, value in ((1, b""), (2, digest(bucket.data))):
        plane.exchange.handle(RUN, Digest(version))
        assert plane.wait(Digested) == Digested(version, value)
    assert first != value


class Gate:
    """Stops the snapshot pool, so that something can happen before its next task."""

    def __init__(self, plane: Plane) -> None:
        self._go_on = threading.Event()
        plane.exchange._submit(plane.exchange._copying, lambda: self._go_on.wait(20) and None)

    def open(self) -> None:
        self._go_on.set()


def refreshed(plane: Plane, version: int) -> bool:
    """Whether the refresh that was asked for was good; a digest request queues behind it."""
    plane.exchange.handle(RUN, Digest(version))
    return bool(plane.wait(Digested).digest)


def test_a_bucket_that_changes_while_it_is_copied_is_no_snapshot(pair: list[Plane]) -> None:
    plane = pair[0]
    bucket = plane.buckets["t"]
    plane.exchange.initial_snapshot(RUN, "t", 1)
    gate = Gate(plane)
    plane.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    set_generation(bucket, 3)  # the trainer fills it for the next round
    gate.open()
    assert not refreshed(plane, 2)
    assert plane.exchange.snapshot_version(RUN) is None, "neither the old nor the new one"
    push(plane, pair[1])
    assert plane.wait(SnapshotFailed) == SnapshotFailed(NONCE, Reason.NO_SNAPSHOT)
    set_generation(bucket, 4)
    plane.exchange.handle(RUN, RefreshSnapshot(3, "t"))
    assert plane.wait(SnapshotRefreshed) == SnapshotRefreshed(3)
    assert not any(e == SnapshotRefreshed(2) for e in plane.quiet())


def test_results_of_the_next_round_that_land_during_the_copy_spoil_it_too(
    pair: list[Plane],
) -> None:
    plane = pair[0]
    gate = Gate(plane)
    plane.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    group = group_of(pair)  # the next round of a sweep: the generation stays
    open_round([plane], group)
    plane.exchange.handle(RUN, Average(group.group_id, 0))
    plane.wait(Averaged)
    gate.open()
    assert not refreshed(plane, 2)
    plane.exchange.handle(RUN, Close(group.group_id))


def test_a_copy_that_is_being_served_is_left_alone(pair: list[Plane]) -> None:
    donor, newcomer = pair
    newcomer.addresses = ()  # no link comes up, so the transfer hangs
    value = donor.exchange.initial_snapshot(RUN, "t", 1)
    push(donor, newcomer)
    donor.buckets["t"].data.zero_()
    donor.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    assert not refreshed(donor, 2)
    assert donor.exchange.snapshot_version(RUN) == 1
    donor.exchange.handle(RUN, Digest(1))
    assert donor.wait(Digested) == Digested(1, value)
    assert donor.exchange.initial_snapshot(RUN, "t", 3) == digest(donor.buckets["t"].data)
    assert donor.exchange.snapshot_version(RUN) == 1
    donor.exchange.handle(RUN, DropSnapshot(NONCE))
    donor.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    assert donor.wait(SnapshotRefreshed) == SnapshotRefreshed(2)


def test_a_newcomer_that_takes_nothing_does_not_block_the_donor_for_ever(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, newcomer = pair
    newcomer.addresses = ()
    donor.exchange.initial_snapshot(RUN, "t", 1)
    push(donor, newcomer)
    monkeypatch.setattr(transfer, "STALLED_S", -1.0)
    donor.exchange.handle(RUN, RefreshSnapshot(2, "t"))
    assert donor.wait(SnapshotFailed) == SnapshotFailed(NONCE, Reason.SILENT)
    assert donor.wait(SnapshotRefreshed) == SnapshotRefreshed(2)


def test_a_lost_link_ends_transfers_both_ways(pair: list[Plane]) -> None:
    donor, newcomer = pair
    donor.exchange.initial_snapshot(RUN, "t", 1)
    # Nobody dials: whatever is sent waits.
    donor.exchange.handle(RUN, PushSnapshot(NONCE, newcomer.peer_id, ()))
    fetch(newcomer, donor, addresses=())
    for here, there in ((donor, newcomer), (newcomer, donor)):
        here.exchange.link_lost(there.peer_id)
        assert here.wait(SnapshotFailed) == SnapshotFailed(NONCE, Reason.LINK_LOST)
    newcomer.exchange.handle(RUN, LoadSnapshot(NONCE, 1, ("t",)))
    assert newcomer.wait(SnapshotFailed) == SnapshotFailed(NONCE, Reason.NO_SNAPSHOT)


def test_a_link_lost_after_everything_is_staged_changes_nothing(pair: list[Plane]) -> None:
    donor, newcomer = pair
    value = donor.exchange.initial_snapshot(RUN, "t", 1)
    fetch(newcomer, donor)
    push(donor, newcomer)
    assert newcomer.wait(SnapshotArrived).digest == value
    newcomer.exchange.link_lost(donor.peer_id)
    newcomer.exchange.handle(RUN, LoadSnapshot(NONCE, 1, ("t",)))
    assert torch.equal(newcomer.buckets["t"].data, donor.buckets["t"].data)


def part_frame(plane: Plane, part: int = 0, **changes: Any) -> tuple[Header, memoryview]:
    spot = plane.layout.parts[part]
    payload = changes.pop("payload", memoryview(bytearray(spot.nbytes)))
    header = Header(
        FrameKind.SNAPSHOT, run_hash(RUN), NONCE, part,
        length=len(payload), crc=zlib.crc32(payload),
    )  # fmt: skip
    if "index" in changes:
        changes["part"] = changes.pop("index")
    return replace(header, **changes), payload


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index": 1 << 20}, Reason.PART_SIZE),
        ({"payload": memoryview(bytearray(5))}, Reason.PART_SIZE),
        ({"codec": 1}, Reason.PART_SIZE),
        ({"contributors": 5}, Reason.SUPERSEDED),  # another state than the one offered
    ],
)
def test_a_wrong_frame_ends_the_transfer(
    pair: list[Plane], changes: dict[str, Any], reason: Reason
) -> None:
    donor, newcomer = pair
    before = newcomer.buckets["t"].data.clone()
    fetch(newcomer, donor)
    header, payload = part_frame(newcomer, **changes)
    newcomer.exchange.on_frame(donor.peer_id, header, payload)
    assert newcomer.wait(SnapshotFailed) == SnapshotFailed(NONCE, reason)
    newcomer.exchange.handle(RUN, DropSnapshot(NONCE))
    newcomer.exchange.on_frame(donor.peer_id, *part_frame(newcomer))
    assert newcomer.exchange.dropped == {"group_closed": 1}
    assert torch.equal(newcomer.buckets["t"].data, before)


def test_only_the_named_donor_is_listened_to(pair: list[Plane]) -> None:
    donor, newcomer = pair
    fetch(newcomer, donor)
    newcomer.exchange.on_frame("peer-9", *part_frame(newcomer))
    header, payload = part_frame(newcomer, kind=FrameKind.RESULT)
    newcomer.exchange.on_frame(donor.peer_id, header, payload)
    assert newcomer.exchange.dropped == {"not_the_donor": 1, "wrong_kind": 1}
    assert newcomer.quiet() == []


def test_progress_is_told_at_a_bounded_rate(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PROGRESS_INTERVAL_S", 3600.0)
    donor, newcomer = pair
    fetch(newcomer, donor)
    for part in range(len(newcomer.layout.parts) - 1):
        for _ in range(2):  # a repeated part changes nothing
            newcomer.exchange.on_frame(donor.peer_id, *part_frame(newcomer, part))
    assert newcomer.quiet() == [SnapshotProgressed(NONCE)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parts": 3}, Reason.PART_SIZE),
        ({"state_bytes": (64 << 20) + 1}, Reason.PART_SIZE),
        ({"state_bytes": -1}, Reason.PART_SIZE),
    ],
)
def test_an_offer_that_does_not_fit_is_refused(
    pair: list[Plane], changes: dict[str, Any], reason: Reason
) -> None:
    donor, newcomer = pair
    fetch(newcomer, donor, **changes)
    assert newcomer.wait(SnapshotFailed) == SnapshotFailed(NONCE, reason)


def test_transfers_at_once_are_bounded(pair: list[Plane], monkeypatch: pytest.MonkeyPatch) -> None:
    donor, newcomer = pair
    for serial in range(3):
        fetch(newcomer, donor, nonce=bytes([serial]) * 16)
    assert newcomer.wait(SnapshotFailed) == SnapshotFailed(b"\2" * 16, Reason.BUSY)
    monkeypatch.setattr(transfer, "MAX_OUTGOING", 1)
    donor.exchange.initial_snapshot(RUN, "t", 1)
    for serial in range(2):
        donor.exchange.handle(RUN, PushSnapshot(bytes([serial]) * 16, "peer-1", ()))
    assert donor.wait(SnapshotFailed) == SnapshotFailed(b"\1" * 16, Reason.BUSY)


def test_a_trainer_that_came_with_something_older_loads_our_own_copy(pair: list[Plane]) -> None:
    plane = pair[0]
    stale = plane.trainer("stale", some_tensors(8))
    plane.exchange.handle(RUN, LoadSnapshot(b"", 1, ("stale",)))
    assert plane.wait(SnapshotFailed) == SnapshotFailed(b"", Reason.NO_SNAPSHOT)
    plane.exchange.initial_snapshot(RUN, "t", 1)
    plane.exchange.handle(RUN, LoadSnapshot(b"", 1, ("stale",)))
    assert torch.equal(stale.data, plane.buckets["t"].data)
    plane.exchange.handle(RUN, LoadSnapshot(b"", 2, ("stale",)))
    assert plane.wait(SnapshotFailed) == SnapshotFailed(b"", Reason.NO_SNAPSHOT)


def test_no_room_for_a_copy_means_no_donor_and_no_newcomer(
    pair: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int) -> None:
        raise TrainerError("no memory", code="RESOURCE_EXHAUSTED", reason="no_room")

    monkeypatch.setattr(transfer, "anonymous", full)
    monkeypatch.setattr(staging, "anonymous", full)
    donor, newcomer = pair
    value = donor.exchange.initial_snapshot(RUN, "t", 1)
    assert value == digest(donor.buckets["t"].data), "attach goes on without"
    assert donor.exchange.snapshot_version(RUN) is None
    fetch(newcomer, donor)
    newcomer.exchange.on_frame(donor.peer_id, *part_frame(newcomer))
    assert newcomer.wait(SnapshotFailed) == SnapshotFailed(NONCE, Reason.NO_SNAPSHOT)


def test_trainer_state_is_bounded(pair: list[Plane]) -> None:
    plane = pair[0]
    with pytest.raises(TrainerError) as caught:
        plane.exchange.set_state(RUN, bytes((64 << 20) + 1))
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert plane.exchange.state(RUN) == b""
    with pytest.raises(LocalProtocolError, match="no bucket"):
        plane.exchange.initial_snapshot(RUN, "nobody", 1)
