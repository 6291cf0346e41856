"""One table between our errors and gRPC's, read both ways. One rule: nobody else looks at a grpc
status.

A `TrainerError` travels as its status code, its sentence as the details and its short reason in the
trailing metadata `moshpit-reason`. A status without that key was not sent by our servicer but by
gRPC itself (no socket, connection lost, deadline) or by a bug in it: to a trainer all of these mean
the same, the daemon is not there for it now.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from moshpitd.errors import DaemonUnavailable, MoshpitError, TrainerError

REASON_KEY = "moshpit-reason"
MAX_DETAILS = 4096
"""Characters of a sentence on the wire: gRPC drops a call whose metadata exceeds 8 KiB, and
percent- encoding can triple a character, but the interesting part of an error is at its
beginning."""

# reason -> status. A reason has one code wherever it is raised; `refusal` looks it up.
CODES = {
    # the request itself is wrong: repeating it is pointless
    "api_differs": "FAILED_PRECONDITION",
    "bad_run": "INVALID_ARGUMENT",
    "bad_tensor": "INVALID_ARGUMENT",
    "dtype_refused": "INVALID_ARGUMENT",
    "codec_refused": "INVALID_ARGUMENT",
    "topology_refused": "INVALID_ARGUMENT",
    "mass_out_of_range": "INVALID_ARGUMENT",
    "shape_refused": "INVALID_ARGUMENT",
    "no_tensors": "INVALID_ARGUMENT",
    "weight_out_of_range": "INVALID_ARGUMENT",
    "rounds_out_of_range": "INVALID_ARGUMENT",
    "participants_out_of_range": "INVALID_ARGUMENT",
    "timeout_out_of_range": "INVALID_ARGUMENT",
    "unknown_on_partial": "INVALID_ARGUMENT",
    "state_too_large": "INVALID_ARGUMENT",
    "not_finite": "INVALID_ARGUMENT",
    # right request, wrong world
    "schema_differs": "FAILED_PRECONDITION",
    "codec_differs": "FAILED_PRECONDITION",
    "no_topology": "FAILED_PRECONDITION",
    "schema_changed": "FAILED_PRECONDITION",
    "run_differs": "FAILED_PRECONDITION",
    "no_feedback": "FAILED_PRECONDITION",
    "bucket_unreachable": "FAILED_PRECONDITION",
    "buffers_dir": "FAILED_PRECONDITION",
    "bucket_modified": "ABORTED",
    "bucket_busy": "ABORTED",
    "partial": "ABORTED",
    "store_refused": "INVALID_ARGUMENT",
    "store_differs": "FAILED_PRECONDITION",
    "store_timeout": "DEADLINE_EXCEEDED",
    "unknown_trainer": "NOT_FOUND",
    "no_room": "RESOURCE_EXHAUSTED",
    "too_many_trainers": "RESOURCE_EXHAUSTED",
    "too_many_runs": "RESOURCE_EXHAUSTED",
    # the daemon is on its way out; the trainer goes on locally
    "draining": "UNAVAILABLE",
}


class DaemonDraining(DaemonUnavailable):
    """The daemon is leaving: no more rounds, but the attachment holds until it has handed over our
    state."""


@dataclass(frozen=True, slots=True)
class WireStatus:
    """What a servicer aborts with: `context.abort(code, details, trailing_metadata)`."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...]


def refusal(reason: str, message: str) -> TrainerError:
    """The error for a reason of the table; its code cannot be got wrong."""
    return TrainerError(message, code=CODES[reason], reason=reason)


def not_finite(tensor: str) -> TrainerError:
    """The refusal of a bucket for the first bad tensor in it."""
    return refusal(
        "not_finite", f"tensor {tensor!r} holds a NaN or an infinity, expected finite values"
    )


def to_status(error: TrainerError) -> WireStatus:
    """How `error` leaves the daemon. A reason outside ASCII would be refused by gRPC as
    metadata."""
    reason = error.reason.encode("ascii", "replace").decode("ascii")
    name = CODES.get(error.reason, error.code)
    code = getattr(grpc.StatusCode, name, grpc.StatusCode.INVALID_ARGUMENT)
    return WireStatus(code, error.message[:MAX_DETAILS], ((REASON_KEY, reason),))


def from_call(call: grpc.RpcError, *, socket: str = "") -> MoshpitError:
    """What a failed call means: `TrainerError` if our servicer refused it, else
    `DaemonUnavailable`."""
    code = call.code() if isinstance(call, grpc.Call) else None
    name = "UNKNOWN" if code is None else str(code.name)
    details = (call.details() if isinstance(call, grpc.Call) else str(call)) or name
    reason = _reason(call)
    if reason is not None and code is not grpc.StatusCode.UNAVAILABLE:
        return TrainerError(details, code=name, reason=reason)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        # Another program, or a daemon of another age, listens there. Waiting will not cure it.
        return TrainerError(f"{socket}: {details}", code=name, reason="api_differs")
    where = f"daemon at {socket}" if socket else "daemon"
    if reason == "draining":
        return DaemonDraining(f"{where}: {details}")
    return DaemonUnavailable(f"{where}: {name}: {details}")


def _reason(call: grpc.RpcError) -> str | None:
    pairs = call.trailing_metadata() if isinstance(call, grpc.Call) else None
    for key, value in pairs or ():
        if key == REASON_KEY:
            return str(value)
    return None
