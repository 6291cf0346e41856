"""TLS by the OpenSSL that comes with the cryptography package, where it is the faster one.

One rule: it behaves as ssl.SSLObject over ssl.MemoryBIO does, exceptions included.

Python uses the OpenSSL of its system. Those before 3.1 encrypt AES-GCM at 5 GB/s on a processor
whose wide instructions (VAES) carry 18; cryptography's own is new on any system. It is reached
through pyOpenSSL, which libp2p brings. Per record pyOpenSSL allocates and copies once more, so the
calls that move payloads go to the library below it; were those names ever to change, `AVAILABLE` is
False and the system's OpenSSL is used.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

_Any = Any  # neither package types what is below its surface
T = TypeVar("T")

SSL: _Any = None
_lib: _Any = None
_ffi: _Any = None
_version = 0
try:
    from OpenSSL import SSL as _pyopenssl
    from OpenSSL import crypto as _crypto

    _lib, _ffi = getattr(_pyopenssl, "_lib"), getattr(_pyopenssl, "_ffi")  # noqa: B009
    _NEEDED = (_lib.SSL_read, _lib.SSL_write, _lib.BIO_read, _lib.BIO_write, _ffi.from_buffer)
    _CLEARS = (_lib.SSL_CTX_clear_mode, _lib.SSL_MODE_ENABLE_PARTIAL_WRITE, _lib.ERR_clear_error)
    _probe: _Any = _pyopenssl.Connection(_pyopenssl.Context(_pyopenssl.TLS_METHOD), None)
    _PRIVATE = (_probe._ssl, _probe._into_ssl, _probe._from_ssl, _probe._raise_ssl_error)
    _INNER = _probe.get_context()._context
    del _probe, _PRIVATE, _INNER  # they were only looked up
    SSL, _version = _pyopenssl, int(_pyopenssl.OPENSSL_VERSION_NUMBER)
except (ImportError, AttributeError):
    pass

COMPILED = False
"""Whether whole segments are read and written in the compiled loops."""
try:
    from cryptography.hazmat.bindings._rust import _openssl

    from moshpitd import _native

    # Where the loop finds the functions of this very library.
    _FUNCTIONS = tuple(
        int(_ffi.cast("uintptr_t", _ffi.addressof(getattr(_openssl, "lib"), name)))  # noqa: B009
        for name in (
            "SSL_read", "SSL_write", "SSL_get_error", "BIO_read", "BIO_write", "ERR_clear_error",
        )
    )  # fmt: skip
    _SSL_READ, _SSL_GET_ERROR = _FUNCTIONS[0], _FUNCTIONS[2]
    _conversation = _native.conversation  # one that was built of an older source has none
    COMPILED = True
except (ImportError, AttributeError):
    pass

# The first with AES-GCM on VAES and AVX512.
_FAST = 0x30100000
AVAILABLE = _version >= _FAST > ssl.OPENSSL_VERSION_NUMBER
"""Whether it is there and Python's own is slower."""

# How a compiled call ended (see _native.c): OpenSSL or the kernel says why.
_REFUSED, _FAILED = 2, 3

NEVER = bytearray(1)
"""Nothing is urgent."""

# What a segment becomes: 17 records of 16 KiB, each with 22 bytes more, and a header's record.
ROOM_BYTES = (256 << 10) + (8 << 10)


class Context:
    """The certificate of one identity, for both sides. TLS 1.3 only; each side asks for the other's
    certificate and takes any, because what it proves is looked at by whoever shook hands."""

    def __init__(self, certificate_pem: str, key_pem: str) -> None:
        key: _Any = load_pem_private_key(key_pem.encode(), None)
        context = SSL.Context(SSL.TLS_METHOD)
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
        context.use_certificate(load_pem_x509_certificate(certificate_pem.encode()))
        context.use_privatekey(key)
        context.set_verify(SSL.VERIFY_PEER, lambda *_: True)
        # Links live long: no session is ever resumed. A ticket that carries its session needs no
        # cache, and who came back with one would be refused for it.
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        context.set_options(SSL.OP_NO_TICKET)
        _lib.SSL_CTX_clear_mode(context._context, _lib.SSL_MODE_ENABLE_PARTIAL_WRITE)
        self._context = context

    def wrap(self, *, server_side: bool) -> Conversation:
        connection = SSL.Connection(self._context, None)
        if server_side:
            connection.set_accept_state()
        else:
            connection.set_connect_state()
        return Conversation(connection)


class Mutex:
    """The lock of a conversation that is also held by compiled code, which cannot take one of
    Python's."""

    def __init__(self, conversation: object) -> None:
        self._conversation = conversation

    def __enter__(self) -> None:
        _native.lock(self._conversation)

    def __exit__(self, *_: object) -> None:
        _native.unlock(self._conversation)


class Incoming:
    """Ciphertext from the wire, as an ssl.MemoryBIO."""

    def __init__(self, connection: _Any) -> None:
        self._owner = connection  # the memory is freed with it
        self._bio = connection._into_ssl

    def write(self, ciphertext: memoryview) -> int:
        count = _lib.BIO_write(self._bio, _ffi.from_buffer(ciphertext), len(ciphertext))
        if count != len(ciphertext):
            raise MemoryError(f"{len(ciphertext)} bytes of ciphertext")
        return int(count)

    def read(self) -> bytes:
        return _drained(self._bio, bytearray(ROOM_BYTES))


class Outgoing:
    """Ciphertext for the wire. What `read` returns is valid until its next call."""

    def __init__(self, connection: _Any) -> None:
        self._owner = connection
        self._bio = connection._from_ssl
        self._room = bytearray(ROOM_BYTES)
        self.room = memoryview(self._room)

    def read(self) -> bytes | memoryview:
        count = _read(self._bio, self._room)
        if count < len(self._room):
            return memoryview(self._room)[:count]
        return bytes(self._room) + _drained(self._bio, self._room)


class Conversation:
    """One TLS connection over two memories. Not for two threads at once; `mutex` is what they take
    turns with, and what `receive` and `send` take by themselves. None: nothing was compiled."""

    def __init__(self, connection: _Any) -> None:
        self._connection = connection
        self._ssl = connection._ssl
        self.incoming, self.outgoing = Incoming(connection), Outgoing(connection)
        self.mutex: Mutex | None = None
        self._compiled: _Any = None
        self._cause = ""  # why it is over for both directions
        if COMPILED:
            memories = (connection._into_ssl, connection._from_ssl)
            there = [_address(one) for one in (self._ssl, *memories)]
            self._compiled = _conversation(*there, *_FUNCTIONS)
            self.mutex = Mutex(self._compiled)

    def do_handshake(self) -> None:
        _lib.ERR_clear_error()
        self._told(self._connection.do_handshake)

    def getpeercert(self, binary_form: bool) -> bytes | None:
        # As it came, not parsed: what is wrong with it is for `proven_peer_id` to say.
        certificate = self._connection.get_peer_certificate()
        return None if certificate is None else _dumped(certificate)

    def cipher(self) -> tuple[str, str, int] | None:
        name = self._connection.get_cipher_name()
        if name is None:
            return None
        return name, "TLSv1.3", int(self._connection.get_cipher_bits())

    def read(self, view: memoryview) -> tuple[int, bool]:
        """All that is there, up to the length of the view, and whether more may come."""
        room = _ffi.from_buffer(view, require_writable=True)
        _lib.ERR_clear_error()  # this thread's; what others left there would be taken for ours
        got, why = _read_records(self._ssl, room, len(view))
        if why in (0, _lib.SSL_ERROR_WANT_READ):
            return got, True
        if why == _lib.SSL_ERROR_ZERO_RETURN:
            return got, False
        raise self._refusal(why)

    def write(self, view: memoryview) -> int:
        _lib.ERR_clear_error()
        count = int(_lib.SSL_write(self._ssl, _ffi.from_buffer(view), len(view)))
        if count <= 0:
            raise self._refusal(int(_lib.SSL_get_error(self._ssl, count)))
        return count

    def receive(
        self,
        wire: int,
        view: memoryview,
        room: memoryview,
        heard: bytearray,
        *,
        got: int = 0,
        segment: int = 0,
    ) -> tuple[int, int]:
        """Fill the view behind its first `got` bytes from the socket `wire`, however long that
        takes: (less than its length only at the end of the stream, and what stood where a segment
        was to follow: see `streams.Stream.read_segments`). `segment` 0: no bytes stand between.
        `room` is for ciphertext, `heard` counts it."""
        size = segment or max(1, len(view))
        got, mark, how, why = _native.receive_segments(
            self._compiled, wire, view, got, size, room, heard
        )
        if how == _FAILED:
            raise OSError(why, os.strerror(why))
        if how == _REFUSED:
            with self._refused():
                if why != _lib.SSL_ERROR_ZERO_RETURN:
                    raise self._refusal(why)
        return got, mark

    def send(
        self,
        wire: int,
        head: memoryview | bytes,
        body: memoryview,
        handed: bytearray,
        *,
        start: int = 0,
        segment: int = 0,
        urgent: bytearray = NEVER,
    ) -> int:
        """Hand `head` and the body from `start` on to the socket `wire`, however long that takes,
        by segments until one is `urgent`; returns where to go on. `segment` 0: in one."""
        room, size = self.outgoing.room, segment or max(1, len(body))
        start, how, why = _native.send_segments(
            self._compiled, wire, head, body, start, size, urgent, room, handed
        )
        if how == _FAILED:
            raise OSError(why, os.strerror(why))
        if how == _REFUSED:
            with self._refused():
                raise self._refusal(why)
        return start

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """A compiled call that was refused has left the mutex locked."""
        try:
            yield
        finally:
            _native.unlock(self._compiled)

    def _refusal(self, why: int) -> ssl.SSLError:
        """What OpenSSL says of it. It says so once, to the thread that it refuses first, and fails
        in both directions from then on: who comes later is told the same."""
        if self._cause:
            _lib.ERR_clear_error()
            return ssl.SSLError(ssl.SSL_ERROR_SSL, self._cause)
        try:
            self._told(lambda: self._connection._raise_ssl_error(self._ssl, -1))
            self._cause = f"error {why}"
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
            return error
        except ssl.SSLError as error:
            self._cause = str(error.strerror)
        return ssl.SSLError(ssl.SSL_ERROR_SSL, self._cause)

    def unwrap(self) -> None:
        """Both closing alerts, ours first."""
        _lib.ERR_clear_error()
        if not self._told(self._connection.shutdown):
            self._told(self._connection.shutdown)

    @staticmethod
    def _told(step: Callable[[], T]) -> T:
        """Do a step; what it raises becomes what the ssl module would raise."""
        try:
            return step()
        except SSL.WantReadError:
            raise ssl.SSLWantReadError from None
        except SSL.ZeroReturnError:
            raise ssl.SSLZeroReturnError from None
        except SSL.SysCallError as error:
            raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, str(error)) from None
        except SSL.Error as error:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, _words(error)) from None


def _read_records(connection: _Any, room: _Any, wanted: int) -> tuple[int, int]:
    """(bytes, why not more as SSL_get_error says, or 0)."""
    if COMPILED:
        here, there = _address(room), _address(connection)
        return _native.tls_read(_SSL_READ, _SSL_GET_ERROR, there, here, wanted)
    got = 0
    while got < wanted:
        count = _lib.SSL_read(connection, room + got, wanted - got)
        if count <= 0:
            return got, int(_lib.SSL_get_error(connection, count))
        got += int(count)
    return got, 0


def _address(pointer: _Any) -> int:
    return int(_ffi.cast("uintptr_t", pointer))


def _read(bio: _Any, room: bytearray) -> int:
    return max(0, int(_lib.BIO_read(bio, _ffi.from_buffer(room, require_writable=True), len(room))))


def _drained(bio: _Any, room: bytearray) -> bytes:
    found = b""
    while (count := _read(bio, room)) > 0:
        found += bytes(memoryview(room)[:count])
    return found


def _dumped(certificate: _Any) -> bytes:
    return bytes(_crypto.dump_certificate(_crypto.FILETYPE_ASN1, certificate))


def _words(error: Exception) -> str:
    """pyOpenSSL lists (library, function, reason) of everything in OpenSSL's queue."""
    listed = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return "; ".join(str(one[-1]) for one in listed) or "unknown error"
