"""Buckets: made whole or not at all, swept only when their daemon is dead."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from pathlib import Path

import pytest

from moshpitd.daemon import buffers
from moshpitd.daemon.buffers import HEADER_BYTES, create_bucket, sweep
from moshpitd.errors import TrainerError


def trainer_view(path: Path) -> mmap.mmap:
    """The file as the other process sees it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def test_a_bucket_is_private_allocated_and_zero(tmp_path: Path) -> None:
    bucket = create_bucket(tmp_path / "buffers", nbytes=100_000, data_dir=tmp_path)
    status = bucket.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == bucket.file_bytes == HEADER_BYTES + 100_000
    assert status.st_blocks * 512 >= status.st_size, "a sparse file is a SIGBUS later"
    assert bucket.data.numel() == 100_000
    assert not bucket.data.any()
    header = trainer_view(bucket.path)[:16]
    assert header == b"MPB1" + struct.pack("<IQ", 1, 0)


def test_both_sides_see_the_same_bytes_and_the_generation(tmp_path: Path) -> None:
    bucket = create_bucket(tmp_path, nbytes=64, data_dir=tmp_path)
    view = trainer_view(bucket.path)
    view[HEADER_BYTES : HEADER_BYTES + 3] = b"abc"
    assert bytes(bucket.data[:3].tolist()) == b"abc"
    struct.pack_into("<Q", view, 8, 4)
    assert bucket.generation == bucket.expected == 4
    assert bucket.hand_over(4)
    for later in (5, 6):  # being filled, and filled anew
        struct.pack_into("<Q", view, 8, later)
        assert bucket.expected == 4, "what was handed over, whatever is there now"
        assert not bucket.intact(bucket.expected)
    assert not bucket.hand_over(4), "the trainer names a generation that is not there"
    bucket.hand_back()
    assert bucket.intact(bucket.expected)


def test_a_bucket_that_is_being_filled_cannot_be_handed_over(tmp_path: Path) -> None:
    bucket = create_bucket(tmp_path, nbytes=64, data_dir=tmp_path)
    struct.pack_into("<Q", trainer_view(bucket.path), 8, 3)
    assert not bucket.hand_over(3)
    bucket.hand_back()
    assert not bucket.intact(bucket.expected)


def test_an_empty_layout_still_has_a_header(tmp_path: Path) -> None:
    bucket = create_bucket(tmp_path, nbytes=0, data_dir=tmp_path)
    assert bucket.data.numel() == 0
    assert bucket.path.stat().st_size == HEADER_BYTES


def test_the_memory_outlives_the_file_and_the_bucket(tmp_path: Path) -> None:
    bucket = create_bucket(tmp_path, nbytes=64, data_dir=tmp_path)
    values = bucket.data
    bucket.close()
    bucket.close()
    assert list(tmp_path.iterdir()) == []
    del bucket
    values.fill_(7)
    assert int(values.sum()) == 7 * 64


def test_no_room_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(TrainerError) as caught:
        create_bucket(tmp_path, nbytes=free + (1 << 40), data_dir=tmp_path)
    error = caught.value
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "no_room")
    need = HEADER_BYTES + free + (1 << 40)
    for word in (str(tmp_path), f"{need} bytes needed", "free", "buffers_dir"):
        assert word in error.message
    assert list(tmp_path.iterdir()) == []


def test_room_that_goes_while_allocating_is_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(buffers.os, "posix_fallocate", full)
    with pytest.raises(TrainerError, match="no room") as caught:
        create_bucket(tmp_path, nbytes=4096, data_dir=tmp_path)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match="buffers_dir") as caught:
        create_bucket(tmp_path / "file" / "buffers", nbytes=64, data_dir=tmp_path)
    assert caught.value.code == "FAILED_PRECONDITION"
    assert str(tmp_path / "file") in caught.value.message


def test_sweep_takes_only_what_dead_daemons_of_this_directory_left(tmp_path: Path) -> None:
    store, mine, theirs = tmp_path / "shm", tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    living = create_bucket(store, nbytes=64, data_dir=mine).path
    foreign = create_bucket(store, nbytes=64, data_dir=theirs).path
    _, place, pid, born, serial = living.stem.split("-")
    reused_pid = store / f"moshpit-{place}-{pid}-{int(born) - 1}-{serial}.bucket"
    dead = store / f"moshpit-{place}-{2**22 + 1}-5-1.bucket"  # above every pid Linux hands out
    other_dead = store / foreign.name.replace(f"-{pid}-", f"-{2**22 + 1}-")
    stranger = store / "psm_1234"
    for path in (reused_pid, dead, other_dead, stranger):
        path.write_bytes(b"x")
    folder = store / f"moshpit-{place}-{2**22 + 1}-5-2.bucket"
    folder.mkdir()
    assert sweep(store, data_dir=mine) == sorted([reused_pid, dead])
    assert set(store.iterdir()) == {living, foreign, other_dead, stranger, folder}
    assert sweep(tmp_path / "absent", data_dir=mine) == []
