"""The error tree. One rule: this file imports nothing of ours, so that every room may raise from
it.

Whose fault it is decides the class: ours (`InternalError`, `LocalProtocolError`), the operator's
(`ConfigError`), a remote peer's (`RemoteProtocolError`), the network's (`TransportError`), the
trainer's (`TrainerError`). Only `InternalError` may end the daemon.
"""

from __future__ import annotations


class MoshpitError(Exception):
    """Every error this package raises on purpose."""


class ConfigError(MoshpitError):
    """A setting, a file or an address the operator gave does not work. Ends the command with exit
    code 2."""

    def __init__(self, message: str, *, file: str = "", key: str = "", expected: str = "") -> None:
        self.message, self.file, self.key, self.expected = message, file, key, expected
        where = ": ".join(word for word in (file, key) if word)
        tail = f" (expected {expected})" if expected else ""
        super().__init__(f"{where}: {message}{tail}" if where else f"{message}{tail}")


class InternalError(MoshpitError):
    """An invariant of ours is broken: log it, exit 70, let the supervisor restart the daemon."""


class ProtocolError(MoshpitError):
    """The protocol between peers was not followed."""


class LocalProtocolError(ProtocolError):
    """We were asked to do something that the protocol does not allow; a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol does not allow. Counted, never fatal."""

    def __init__(self, reason: str, *, peer: str = "") -> None:
        self.reason, self.peer = reason, peer
        super().__init__(f"{peer or 'unknown peer'}: {reason}")


class TransportError(MoshpitError):
    """The network did not carry it."""


class Unreachable(TransportError):
    """Nobody answers at that address or under that PeerID."""


class LinkBroken(TransportError):
    """A link ended before what was on it was complete."""


class Oversized(TransportError):
    """A message is larger than its carrier allows."""


class TrainerError(MoshpitError):
    """The trainer asked for something impossible.

    `code` is the name of a gRPC status (`INVALID_ARGUMENT`, `FAILED_PRECONDITION` ...), `reason` a
    short machine-readable word (`schema_differs`, `not_finite`, `bucket_busy` ...).
    """

    def __init__(self, message: str, *, code: str = "INVALID_ARGUMENT", reason: str = "") -> None:
        self.message, self.code, self.reason = message, code, reason
        super().__init__(message)


class DaemonUnavailable(MoshpitError):
    """Client side only: the daemon does not answer; the trainer goes on locally and re-attaches."""
