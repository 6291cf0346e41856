"""What receiving, sending and averaging of one round have in common. One rule: a part's lock first.

Whoever reads or changes anything of a part holds `lock(part)`, and tells of it (`post`) before it
lets go: so the core hears of a part in the order in which things happened to it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from moshpitd.core.effects import Open
from moshpitd.core.events import Event
from moshpitd.core.messages import Held
from moshpitd.core.outcome import Reason
from moshpitd.core.succession import Succession
from moshpitd.daemon.buffers import Bucket
from moshpitd.daemon.choosing import Choices
from moshpitd.daemon.ledger import Ledger
from moshpitd.daemon.local import LocalValues
from moshpitd.errors import LocalProtocolError, TrainerError
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import RAW, Codec, codec_for
from moshpitd.tensors.codecs.compiled import Coded, coded, stays_coded
from moshpitd.tensors.feedback import LOSSY_DTYPE, ErrorFeedback, Residuals, feeds
from moshpitd.tensors.layout import Layout, Part
from moshpitd.tensors.mapped import Rooms, Scratch, Tensor
from moshpitd.tensors.reduction import SMALL

# Two parts share a lock only by chance; a lock per part would be 100,000 of them in a large model.
LOCKS = 64


class Shared:
    """One round at one member. Invariant: nothing is posted, sent or written once `closed`, and
    nothing is written once it `takes` no more."""

    def __init__(
        self,
        opened: Open,
        layout: Layout,
        *,
        run_hash: bytes,
        buckets: Mapping[str, Bucket],
        scratch: Scratch,
        rooms: Rooms,
        post: Callable[[Event], None],
        drop: Callable[[str], None],
        timed: Callable[[str, str, float], None],
        residuals: Residuals | None = None,
        choices: Choices | None = None,
    ) -> None:
        if len(opened.reducers) != len(layout.parts):
            raise LocalProtocolError(
                f"a round of {len(opened.reducers)} parts, expected {len(layout.parts)}"
            )
        self.group = opened.group
        self.group_id = opened.group.group_id
        self.index = opened.index
        self.weight = opened.weight
        self.norm_limit = limit = opened.norm_limit
        # A squared norm up to here is small, and refused by nobody: it need not be told exactly.
        self._harmless = SMALL / 2 if limit is None else min(SMALL / 2, limit * limit)
        self.layout = layout
        self.run_hash = run_hash
        self.codecs = {r.dtype: codec_for(self.group.codec, r.dtype) for r in layout.regions}
        self.local = LocalValues(
            layout, trainers=opened.trainers, late=opened.late, buckets=buckets, scratch=scratch
        )
        self.ledger = Ledger(Succession(opened.group, opened.reducers), opened.index)
        self.scratch = scratch
        self.rooms = rooms
        self.choices = choices  # None: contributions travel with the group's codec
        self.drop = drop
        self.closed = False
        self.takes = True  # False: the buckets went back, and nothing that comes is used
        self.overtaken = False  # the next round has the buckets: what is held is not there any more
        self.bytes_sent = 0
        self.bytes_received = 0
        self.made: dict[int, int] = {}  # part -> crc32 of the result that we made of it last
        self._residuals = residuals if self._feeds() else None
        self._settled = False
        self._post_event = post
        self._timed = timed
        self._locks = [threading.Lock() for _ in range(LOCKS)]
        self._counts = threading.Lock()

    def lock(self, part: int) -> threading.Lock:
        return self._locks[part % LOCKS]

    def post(self, event: Event) -> None:
        if not self.closed:
            self._post_event(event)

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        with self._counts:
            self.bytes_sent += sent
            self.bytes_received += received

    def header(
        self,
        kind: FrameKind,
        part: int,
        *,
        epoch: int,
        codec: int,
        contributors: int = 0,
        crc: int = 0,
    ) -> Header:
        return Header(
            kind, self.run_hash, self.group_id, part,
            epoch=epoch, codec=codec, contributors=contributors, crc=crc,
        )  # fmt: skip

    def feedback(self, part: Part, *, result: bool) -> ErrorFeedback | None:
        """What is owed from earlier rounds to those who get our contribution or our result."""
        if self._residuals is None or part.dtype != LOSSY_DTYPE:
            return None
        return self._residuals.reducer if result else self._residuals.sender

    def encode(
        self,
        part: Part,
        values: Tensor,
        out: Tensor,
        *,
        result: bool,
        decoded: Tensor | None = None,
        codec: Codec | None = None,
    ) -> int:
        """Of the group, the part, the codec and us only, not of the epoch: a repeat is the same
        bytes. `decoded` is filled with what the others will decode; `codec` None: the group's."""
        codec = codec or self.codecs[part.dtype]
        feedback = self.feedback(part, result=result)
        seed = seed_of(self.group_id, part.index, self.index, result=result)
        began = time.perf_counter()
        if feedback is not None and codec is not RAW:
            size = feedback.encode(part, values, out, codec=codec, seed=seed, decoded=decoded)
        else:
            if feedback is not None and feedback.has(part):  # of rounds with another codec
                room = self.scratch.take("given", numel=part.numel, dtype=part.dtype)
                feedback.give(part, values, room)
                values = room
            size = codec.encode(values, out, seed=seed)
            if decoded is not None:
                codec.decode(out[:size], decoded)
        seconds = time.perf_counter() - began
        self._timed(codec.name, "encode", seconds)
        if self.choices is not None and part.dtype == LOSSY_DTYPE:
            self.choices.encoded(codec.name, part.nbytes, seconds)
        return size

    def decode(self, part: Part, payload: Tensor, out: Tensor) -> tuple[int | None, float]:
        """(the first value that is not finite or None, squared norm)."""
        codec = self.codecs[part.dtype]
        began = time.perf_counter()
        examined = codec.decode_examined(payload, out)
        self._timed(codec.name, "decode", time.perf_counter() - began)
        return examined

    def coded(self, codec: Codec, part: Part, payload: Tensor) -> Coded | None:
        """A payload to be used without being decoded first; None where that is not possible."""
        if part.dtype != LOSSY_DTYPE:
            return None
        began = time.perf_counter()
        found = coded(codec, payload, part.numel, enough=self._harmless)
        if found is not None:  # the other half of decoding is part of what is done with it
            self._timed(codec.name, "decode", time.perf_counter() - began)
        return found

    def stays_coded(self, part: Part, payload: Tensor) -> bool:
        """Whether `coded` has something to give of what the group's codec makes of a part there."""
        return part.dtype == LOSSY_DTYPE and stays_coded(self.codecs[part.dtype], payload)

    def put_in_place(self, part: Part, values: Tensor | Coded, held: Held) -> None:
        """Lock held; `ledger.may_place` said yes."""
        if isinstance(values, Coded):
            self.local.apply_coded(part, values)
        else:
            self.local.apply(part, values)
        self.ledger.place(held)

    def linger(self) -> None:
        """Waits for the few parts being worked on, about a millisecond each."""
        self.takes = False
        self._wait()

    def overtake(self) -> None:
        """Waits as `linger` does."""
        self.overtaken = True
        self._wait()
        self.settle()

    def close(self, *, kept: bool = True, without: Iterable[int] = ()) -> None:
        """Waits as `linger` does."""
        self.closed = True
        self.linger()
        self.settle(kept=kept, without=without)
        self.local.finish(self.ledger.parts_held())

    def settle(self, *, kept: bool = True, without: Iterable[int] = ()) -> None:
        """What is owed from here on, now that the round is over: once, and before the next begins.

        What we sent counts where the result in place says that we are inside, what we made as a
        reducer where it is in place, by whomever it was handed over in the end.
        """
        residuals = self._residuals
        if residuals is None or self._settled:
            return
        self._settled = True
        local = frozenset(without)
        for side, counts in ((residuals.sender, self._inside), (residuals.reducer, self._ours)):
            for part in side.held():
                with self.lock(part.index):
                    used = kept and part.index not in local and counts(part.index)
                    side.settle(part, included=used)

    def _wait(self) -> None:
        for lock in self._locks:
            with lock:
                pass  # whoever held it saw the round as it was and is through; later ones do not

    def _inside(self, part: int) -> bool:
        held = self.ledger.held(part)
        return held is not None and bool(held.contributors >> self.index & 1)

    def _ours(self, part: int) -> bool:
        held = self.ledger.held(part)
        return held is not None and self.made.get(part) == held.crc

    def _feeds(self) -> bool:
        """Of a codec that does not contract the residual would grow for ever, so none is kept."""
        codec = self.codecs.get(LOSSY_DTYPE)
        sizes = [part.numel for part in self.layout.parts if part.dtype == LOSSY_DTYPE]
        return codec is not None and bool(sizes) and feeds(codec, max(sizes))


def seed_of(group_id: bytes, part: int, sender: int, *, result: bool) -> int:
    """For a stochastic codec. A result is drawn apart from the contribution that its reducer sent
    in an earlier epoch, or their errors would be the same draw twice."""
    text = group_id + part.to_bytes(4, "big") + sender.to_bytes(2, "big") + bytes([result])
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def encode_failure(codec: Codec, error: Exception) -> tuple[Reason, str]:
    finite = not (isinstance(error, TrainerError) and error.reason == Reason.NOT_FINITE.value)
    return Reason.CODEC if finite else Reason.NOT_FINITE, f"{codec.name}: {error}"


def members_in(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
