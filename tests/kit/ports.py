"""Free ports and the addresses of peers that do not live yet. One rule: loopback only."""

from __future__ import annotations

import socket

from moshpitd.net.identity import Identity


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def address_of(identity: Identity, port: int) -> str:
    """Where the holder of a key will be, as a bootstrap address."""
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
