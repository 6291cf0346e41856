"""Addresses (0: none) of float32 values and of payload bytes that the caller holds on to. The
interpreter is let go for the whole call."""

def squared_norm(values: int, numel: int, /) -> float: ...
def sum_into(values: int, added: int, out: int, numel: int, /) -> float: ...
def copy_past(to: int, source: int, count: int, /) -> None: ...
def half_encode(
    values: int, added: int, left: int, decoded: int, payload: int, room: int, numel: int, /
) -> bool: ...
def half_decode(payload: int, out: int, numel: int, past: bool, /) -> float: ...
def half_bound(payload: int, numel: int, /) -> float: ...
def half_mix(payload: int, mean: int, numel: int, share: float, rest: float, /) -> None: ...
def absmax_encode(
    values: int,
    added: int,
    left: int,
    decoded: int,
    payload: int,
    room: int,
    numel: int,
    width: int,
    /,
) -> bool: ...
def absmax_decode(payload: int, out: int, numel: int, width: int, past: bool, /) -> float: ...
def absmax_bound(payload: int, numel: int, width: int, /) -> float: ...
def absmax_mix(
    payload: int, mean: int, numel: int, width: int, share: float, rest: float, /
) -> None: ...
def crc32(payload: bytes | bytearray | memoryview, /) -> int: ...
def tls_read(
    ssl_read: int, ssl_get_error: int, ssl: int, to: int, wanted: int, /
) -> tuple[int, int]: ...
def conversation(
    ssl: int,
    incoming: int,
    outgoing: int,
    ssl_read: int,
    ssl_write: int,
    ssl_get_error: int,
    bio_read: int,
    bio_write: int,
    clear_error: int,
    /,
) -> object: ...
def lock(conversation: object, /) -> None: ...
def unlock(conversation: object, /) -> None: ...

# A payload by segments, over a conversation or as it is (None; then `room` is not used). Refused by
# OpenSSL (2), both leave the conversation locked.
def receive_segments(
    conversation: object | None,
    descriptor: int,
    to: memoryview,
    got: int,
    segment: int,
    room: memoryview,
    heard: bytearray,
    /,
) -> tuple[int, int, int, int]: ...
def send_segments(
    conversation: object | None,
    descriptor: int,
    head: memoryview | bytes,
    body: memoryview,
    start: int,
    segment: int,
    urgent: bytearray,
    room: memoryview,
    handed: bytearray,
    /,
) -> tuple[int, int, int]: ...
