"""Where the socket is and how a channel to it behaves. One rule: a quiet connection is a healthy
one.

A trainer may compute for half an hour between two calls, so nothing here pings, counts pings or
closes what is idle; a dead daemon is noticed by its closed socket, at once, without any of that.
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import grpc.aio

from moshpitd.errors import ConfigError

MAX_MESSAGE_BYTES = (64 << 20) + (1 << 20)
"""The largest message is PutState: 64 MiB of trainer state (Params.max_state_bytes) and its frame.
gRPC's own default of 4 MiB would refuse it, and a schema of 40,000 tensors as well."""

MAX_SOCKET_BYTES = 107
"""sockaddr_un.sun_path of Linux without its final zero; the kernel's own message names neither."""

NEVER_MS = 2**31 - 1

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_connection_idle_ms", NEVER_MS),
    ("grpc.max_connection_age_ms", NEVER_MS),
    ("grpc.keepalive_time_ms", NEVER_MS),
    # A client that does ping (grpcurl, another language) is not punished with "too_many_pings".
    ("grpc.http2.max_ping_strikes", 0),
    # Without this two daemons could share one socket and take turns in answering.
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", NEVER_MS),
    ("grpc.client_idle_timeout_ms", NEVER_MS),
    # A restarted daemon is back within a second; gRPC's own back-off would grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels of one process otherwise share connections, and with them the back-off of a dead one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def default_socket() -> Path:
    """`$MOSHPITD_SOCKET`, else the user's runtime directory, else a directory of the user's own in
    /tmp."""
    named = os.environ.get("MOSHPITD_SOCKET")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "moshpitd" if runtime else Path(f"/tmp/moshpitd-{os.getuid()}")
    return folder / "moshpitd.sock"


def target(socket: str | os.PathLike[str]) -> str:
    """gRPC's name for a Unix socket. Raises ConfigError for a path that the kernel cannot bind."""
    path = os.path.abspath(os.fspath(socket))
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_BYTES:
        raise ConfigError(
            f"{path} has {length} bytes", key="socket", expected=f"at most {MAX_SOCKET_BYTES} bytes"
        )
    return f"unix:{path}"


def sync_channel(socket: str | os.PathLike[str]) -> grpc.Channel:
    """A blocking channel. Connects at the first call; never fails here because nobody listens."""
    return grpc.insecure_channel(target(socket), options=CHANNEL_OPTIONS)


def aio_channel(socket: str | os.PathLike[str]) -> grpc.aio.Channel:
    """The same for an event loop."""
    return grpc.aio.insecure_channel(target(socket), options=CHANNEL_OPTIONS)
