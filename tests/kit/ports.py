"""Free ports and the addresses of peers that do not live yet. One rule: loopback only."""

from __future__ import annotations

from moshpitd.cli.demo_processes import free_ports
from moshpitd.net.identity import Identity


def free_port() -> int:
    """A port that nobody listens on now, and that no outgoing connection will be given: it may be
    seconds until a daemon takes it."""
    return free_ports(1)[0]


def address_of(identity: Identity, port: int) -> str:
    """Where the holder of a key will be, as a bootstrap address."""
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
