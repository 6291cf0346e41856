"""TLS 1.3 between peers: sockets whose other end has proved its PeerID. Blocking, for threads.

One rule: nothing leaves this file but a socket together with the PeerID that the other end proved.
libp2p puts the proof into a self-signed certificate (its key, signed by the identity key); the
usual chain of authorities plays no part, so OpenSSL's own check is off and ours is never skipped.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass

from cryptography import x509
from libp2p.peer.id import ID
from libp2p.security.tls.certificate import verify_certificate_chain
from libp2p.security.tls.transport import TLSTransport

from moshpitd.errors import ConfigError, LinkBroken, RemoteProtocolError, Unreachable
from moshpitd.net import openssl
from moshpitd.net.identity import Identity, is_peer_id
from moshpitd.net.sockets import Silent
from moshpitd.net.streams import TlsStream

# Silence on a link is judged by the protocol's own deadlines; these only free a socket whose host
# is gone. Unacknowledged data ends a link after 20 s, an idle link after 10 + 3 * 5 s.
USER_TIMEOUT_MS = 20_000
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
# What the kernel may hold that it has not sent yet. A PING, or a result that others wait for, can
# overtake what waits here and nothing that waits there. Measured over a line of 25 Mbit/s: a round
# trip beside a transfer takes 0.09 s this way and 0.45 s as the kernel likes it; on loopback the
# processor time per byte is the same (1.0 to 1.2 ns with TLS, 0.7 to 0.8 without).
UNSENT_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Proven:
    """A handshaken stream and who is at its other end. `certificate` tells two holders of one key
    apart.
    """

    stream: TlsStream
    peer_id: str
    certificate: bytes


class Credentials:
    """Both TLS contexts of one identity. The certificate is made once, so its bytes name this very
    process.
    """

    def __init__(self, identity: Identity) -> None:
        transport = TLSTransport(identity.keypair)
        self.peer_id = identity.peer_id
        self.certificate: bytes = ssl.PEM_cert_to_DER_cert(transport._cert_pem)
        self.client_context = transport.create_ssl_context(server_side=False)
        self.server_context = transport.create_ssl_context(server_side=True)
        # Links live long and reconnect rarely: a session ticket is only a record the client must
        # skip.
        self.server_context.num_tickets = 0
        self._pems = (transport._cert_pem, transport._key_pem)
        self._faster = self._made_faster() if openssl.AVAILABLE else None

    def _made_faster(self) -> openssl.Context:
        return openssl.Context(*self._pems)

    def connect(self, address: str, *, expected: str | None, timeout_s: float) -> Proven:
        """Dial `address` (host:port) and prove both ends; `expected` None takes whoever is there.

        Raises Unreachable with the address and the cause: refused, timeout, wrong PeerID, no libp2p
        peer.
        """
        host, port = parse_address(address)
        try:
            raw = socket.create_connection((host, port), timeout=timeout_s)
        except TimeoutError:
            raise Unreachable(f"{address}: timeout after {timeout_s:g} s") from None
        except ConnectionRefusedError:
            raise Unreachable(f"{address}: refused") from None
        except OSError as error:
            raise Unreachable(f"{address}: {error.strerror or error}") from None
        try:
            proven = self._handshake(raw, server_side=False, timeout_s=timeout_s)
            if expected is not None and proven.peer_id != expected:
                raise RemoteProtocolError(f"wrong PeerID: {proven.peer_id}, expected {expected}")
        except RemoteProtocolError as error:
            raw.close()
            raise Unreachable(f"{address}: {error.reason}") from None
        return proven

    def accept(self, raw: socket.socket, *, timeout_s: float) -> Proven:
        """Handshake as the side that was dialled. Raises RemoteProtocolError; the socket is then
        closed.
        """
        return self._handshake(raw, server_side=True, timeout_s=timeout_s)

    def _handshake(self, raw: socket.socket, *, server_side: bool, timeout_s: float) -> Proven:
        try:
            tune(raw)
            usual = self.server_context if server_side else self.client_context
            context = self._faster or usual
            stream = TlsStream(raw, context, server_side=server_side)
            certificate = stream.handshake(timeout_s)
            if not certificate:
                raise RemoteProtocolError("the other side sent no certificate")
            return Proven(stream, proven_peer_id(certificate), certificate)
        except RemoteProtocolError:
            _close(raw)
            raise
        except Silent:
            _close(raw)
            raise RemoteProtocolError(f"no TLS handshake within {timeout_s:g} s") from None
        except (OSError, ValueError, LinkBroken) as error:
            _close(raw)
            raise RemoteProtocolError(f"no libp2p TLS handshake: {error}") from None


def proven_peer_id(certificate: bytes) -> str:
    """The PeerID that a DER certificate proves, or RemoteProtocolError. Any bytes are allowed."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        peer_id = str(ID.from_pubkey(verify_certificate_chain([parsed])).to_base58())
    # A stranger's certificate reaches parsers of three packages; whatever they raise, the verdict
    # is one.
    except Exception as error:
        raise RemoteProtocolError(f"the certificate proves no PeerID: {error}") from None
    if not is_peer_id(peer_id):
        raise RemoteProtocolError(f"the identity key of {peer_id[:80]} is not Ed25519")
    return peer_id


def probe(credentials: Credentials, address: str, *, timeout_s: float = 3.0) -> tuple[str, bytes]:
    """Who answers at a bulk link address: (PeerID, certificate). Raises Unreachable. Leaves no link
    behind.
    """
    proven = credentials.connect(address, expected=None, timeout_s=timeout_s)
    proven.stream.wire.close()
    return proven.peer_id, proven.certificate


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port". Raises Unreachable for anything else, port 0 included."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise Unreachable(
            f"{address[:80]!r} is no address; expected host:port with a port of 1 to 65535"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The text that parse_address reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket, or ConfigError naming the address and the cause. "::" takes IPv4
    too.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {format_address(host, port)}: {error.strerror or error}",
            key="links.listen",
            expected="an address of this host and a free port",
        ) from error


def tune(raw: socket.socket) -> None:
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.close()
