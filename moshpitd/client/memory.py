"""Memory that all trainers of one node share: `client.primitives.SharedParameters` on a daemon. One
rule: whoever maps the file first fills it, under a lock that the kernel gives back when its holder
dies; everything after that is done without one.

The daemon makes the file and removes it with the last trainer that maps it; it never reads it. So
the trainers go on with each other while there is no daemon, and when the next one makes a new file,
the first of them brings along what the old one held.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from moshpitd.client.buckets import Bucket
from moshpitd.client.keeper import Attachment
from moshpitd.client.primitives import Tensors
from moshpitd.client.session import Session
from moshpitd.client.sources import source_of
from moshpitd.errors import DaemonUnavailable
from moshpitd.rpc.status import refusal
from moshpitd.tensors.rules.asysg import BlockUpdate

log = logging.getLogger("moshpitd.client")


class NodeMemory:
    """Invariant: `_values` are views of the file that the current attachment names, or of this
    trainer's own memory while it never had one."""

    def __init__(self, session: Session, start: Tensors) -> None:
        self._session = session
        # Contiguous, as in the file: a block of elements must be a view of them.
        self._values = {
            name: x.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, x in start.items()
        }
        self._path = ""
        self._bucket: Bucket | None = None

    @classmethod
    def opened(cls, beside: Session, name: str, start: Tensors, within_s: float) -> NodeMemory:
        """`RUN.NAME` of the daemon that `beside` is attached to."""
        zeros = {key: torch.zeros_like(x, device="cpu") for key, x in start.items()}
        session = Session(
            f"{beside.run}.{name}", source_of(None, zeros), socket=beside.socket, shared=True
        )
        session.start(sync=False)
        if beside.attached:
            session.wait_attached(within_s)
        memory = cls(session, start)
        memory._look()
        return memory

    def read(self, into: Tensors) -> None:
        """Also the moment at which a new daemon's file is taken up: then nothing is between a read
        and the write that follows from it."""
        self._look()
        with torch.no_grad():
            for name, x in into.items():
                x.copy_(self._values[name])

    def add(self, writes: Mapping[str, BlockUpdate]) -> None:
        for name, write in writes.items():
            # A sum is one pass; one trainer's NaN would be everybody's, and for ever.
            if not bool(write.delta.sum().isfinite()) and not bool(write.delta.isfinite().all()):
                raise refusal(
                    "not_finite", f"the update of {name!r} holds a NaN or an infinity; nothing of "
                    "this step was written"
                )  # fmt: skip
        with torch.no_grad():
            for name, write in writes.items():
                flat = self._values[name].reshape(-1)
                part = flat[write.start : write.start + write.delta.numel()]
                part.add_(write.delta.to(part.device))

    def close(self) -> None:
        self._session.close()

    def _look(self) -> None:
        try:
            attachment = self._session.attachment()
        except DaemonUnavailable:
            return  # the memory that we have is as good as before
        if attachment.shared_path and attachment.shared_path != self._path:
            self._map(attachment)

    def _map(self, attachment: Attachment) -> None:
        path = attachment.shared_path
        try:
            with _locked(path):
                bucket = Bucket(
                    path,
                    layout=attachment.bucket.layout,
                    data_offset=attachment.bucket.data_offset,
                    nbytes=attachment.bucket.nbytes,
                )
                if not bucket.filled:
                    bucket.fill([self._values[spec.name] for spec in bucket.layout.specs])
        except FileNotFoundError:
            return  # the daemon that made it is gone already; the next one makes another
        views = bucket.layout.views(bucket.data)
        names = [spec.name for spec in bucket.layout.specs]
        self._values = dict(zip(names, views, strict=True))
        self._bucket, self._path = bucket, path
        log.info("%s: shares %s", self._session.run, path)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # and with it the lock
