"""Addresses (0: none) of float32 values and of payload bytes that the caller holds on to. The
interpreter is let go for the whole call."""

def squared_norm(values: int, numel: int, /) -> float: ...
def half_encode(
    values: int, added: int, left: int, decoded: int, payload: int, room: int, numel: int, /
) -> bool: ...
def half_decode(payload: int, out: int, numel: int, /) -> float: ...
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
def absmax_decode(payload: int, out: int, numel: int, width: int, /) -> float: ...
def crc32(payload: bytes | bytearray | memoryview, /) -> int: ...
def tls_read(
    ssl_read: int, ssl_get_error: int, ssl: int, to: int, wanted: int, /
) -> tuple[int, int]: ...
