"""Whether this node is in the swarm, in sentences.

One rule: `/readyz`, `status` and the log say the same words, because all three come from here.
"""

from __future__ import annotations

from collections.abc import Iterable

BOOTSTRAP_OK = "ok"


def readiness(
    *,
    joined: bool,
    drain: tuple[float, str] | None = None,
    bootstrap: Iterable[tuple[str, str]],
) -> tuple[bool, tuple[str, ...]]:
    """(ready, sentences). `bootstrap` is each configured address with its state: ok, refused,
    timeout, wrong PeerID, waiting. An address that does not answer is named when ready, too.
    `drain` is (seconds left, why) while the node leaves.
    """
    entries = list(bootstrap)
    silent = tuple(bootstrap_sentence(a, state) for a, state in entries if state != BOOTSTRAP_OK)
    if drain is not None:
        left_s, why = drain
        left = f"within {left_s:.0f} s ({why})"
        return False, (f"draining: this node finishes its rounds and leaves {left}", *silent)
    if joined:
        return True, silent
    if not entries:
        # The first peer of a swarm: there is nobody to wait for, and others need it to be ready.
        return True, ("no bootstrap address configured: waiting for others to join through us",)
    return False, silent or ("bootstrap peers answer, but none has taken us in yet",)


def bootstrap_sentence(address: str, state: str) -> str:
    """The one line per address that the operator reads everywhere."""
    cause = "not tried yet" if state in ("", "waiting") else f"{state}, trying again"
    return f"bootstrap {address}: {cause}"
