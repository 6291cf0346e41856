"""The frame of a bulk link: 52 bytes of header, then the payload. Pure: bytes in, values out.

One rule: a header from outside becomes a checked `Header` or a `RemoteProtocolError`, before one
byte of its payload is read or one byte of memory is set aside for it.

A payload travels in segments of SEGMENT_BYTES. Before each one but the first stands one byte: MORE,
or ASIDE and a whole header without payload (PING or PONG), and then such a byte again. So a round
trip takes no longer because a large frame is on its way.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from moshpitd.errors import LocalProtocolError, RemoteProtocolError

# 2: segments, and the checked bit in the reserved field.
WIRE_VERSION = 2
RUN_BYTES = 8
GROUP_BYTES = 16
NO_RUN = bytes(RUN_BYTES)
NO_GROUP = bytes(GROUP_BYTES)

# 25 Mbit/s carry a segment in 0.08 s, the longest that a round trip may wait for; on a fast link it
# is what one call encrypts and sends, so that the byte between two of them costs nothing.
SEGMENT_BYTES = 256 * 1024
MORE = b"\x00"
ASIDE = b"\x01"

_CHECKED = 1  # in the bits: the crc is that of the payload; without it the crc is 0

# version, kind, codec, flags, part, epoch, bits, run, group, contributors, length, crc32.
_LAYOUT = struct.Struct("!BBBBIHH8s16sQII")
HEADER_BYTES = _LAYOUT.size


class FrameKind(IntEnum):
    """What a frame carries. The first six belong to the caller, the others to the links
    themselves.
    """

    CONTRIBUTION = 1
    RESULT = 2
    SNAPSHOT = 3
    # A result in raw values from a bucket: 8 bytes with the crc32 of the payload it was made from,
    # then the values.
    HANDOVER = 4
    # A contribution once more, for a member that checks the part's reducer.
    AUDIT = 5
    # A message to a neighbour; bit 0 of the flags says that it is what those before add up to.
    NEIGHBOUR = 6
    # A control message that belongs to what the link carries: it goes the same way.
    WORD = 7
    # A part of what a parameter store holds or gets; the flags say of which.
    STORE = 8
    # First frame in both directions; its payload is the PeerID that the sender believes it talks
    # to.
    HELLO = 16
    # Last frame in its direction; its payload says why in UTF-8. After it, silence is not a loss.
    FAREWELL = 17
    # Round trip; `contributors` holds the asker's clock and comes back unchanged.
    PING = 18
    PONG = 19


# A crc32 is one more pass over the payload at either end. The stream's own seal is enough for what
# is used up where it arrives; all else is compared with what others got (parity) by its crc.
SEAL_IS_ENOUGH = frozenset({FrameKind.CONTRIBUTION, FrameKind.SNAPSHOT, FrameKind.NEIGHBOUR})

CALLER_KINDS = frozenset(
    {
        FrameKind.CONTRIBUTION,
        FrameKind.RESULT,
        FrameKind.SNAPSHOT,
        FrameKind.HANDOVER,
        FrameKind.AUDIT,
        FrameKind.NEIGHBOUR,
        FrameKind.WORD,
        FrameKind.STORE,
    }
)


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about a payload except its bytes. `length` is filled in by whoever sends it, and
    so is `crc`, unless the caller knows it already: then nobody computes it again.

    `contributors` is a bit mask of member indices: bit i is set when member i's contribution is in.
    """

    kind: FrameKind
    run: bytes = NO_RUN
    group: bytes = NO_GROUP
    part: int = 0
    epoch: int = 0
    codec: int = 0
    flags: int = 0
    contributors: int = 0
    length: int = 0
    crc: int = 0
    checked: bool = True

    def pack(self, *, length: int, crc: int | None) -> bytes:
        """The 52 bytes for a payload of `length` bytes whose crc32 is `crc`; None: unchecked."""
        if len(self.run) != RUN_BYTES or len(self.group) != GROUP_BYTES:
            raise LocalProtocolError(
                f"a frame header needs a run hash of {RUN_BYTES} and a group id of {GROUP_BYTES} "
                f"bytes, not {len(self.run)} and {len(self.group)}"
            )
        try:
            return _LAYOUT.pack(
                WIRE_VERSION, self.kind, self.codec, self.flags, self.part, self.epoch,
                0 if crc is None else _CHECKED,
                self.run, self.group, self.contributors, length, crc or 0,
            )  # fmt: skip
        except struct.error as error:
            raise LocalProtocolError(f"{self} does not fit its header: {error}") from error

    @classmethod
    def unpack(cls, raw: bytes | bytearray | memoryview, *, payload_bytes_max: int) -> Header:
        """Check and read 52 bytes from a peer. A length above `payload_bytes_max` is refused
        here.
        """
        version, kind, codec, flags, part, epoch, bits, run, group, contributors, length, crc = (
            _LAYOUT.unpack(raw)
        )
        if version != WIRE_VERSION:
            raise RemoteProtocolError(f"frame of version {version}, expected {WIRE_VERSION}")
        try:
            frame_kind = FrameKind(kind)
        except ValueError:
            raise RemoteProtocolError(f"frame of unknown kind {kind}") from None
        if bits & ~_CHECKED or (crc and not bits):
            raise RemoteProtocolError("reserved bits of a frame header are not zero")
        if length > payload_bytes_max:
            raise RemoteProtocolError(
                f"frame announces {length} bytes of payload, "
                f"at most {payload_bytes_max} are allowed"
            )
        return cls(
            frame_kind, run, group, part, epoch, codec, flags, contributors, length, crc, bool(bits)
        )
