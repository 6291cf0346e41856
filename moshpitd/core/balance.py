"""Who reduces which part. One rule: a pure function of what Begin says, so that every member
computes the same answer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence


def load_shares(bandwidths: Sequence[float]) -> tuple[float, ...]:
    """Fraction of the vector that each member reduces so that the slowest link finishes first.

    Minimises max_i (1 + (n-2) w_i) / b_i over members with b_i > 0 by water filling: over the k
    fastest xi = (n - 2 + k) / sum b, w_i = (xi b_i - 1) / (n - 2), for the largest k with all w_i
    >= 0 (the smallest consistent k is wrong, because k = 1 always passes). With n = 2 every split
    is optimal: in proportion to b. A member with b = 0 sends and reduces nothing. All zeros (nobody
    can reduce) gives all zeros. Source: butterfly all-reduce with load balancing (Moshpit SGD,
    arXiv 2103.03239; hivemind solves it as an LP).
    """
    n = len(bandwidths)
    # Rates so small or so large that nobody can have them would make the sums overflow or vanish.
    rated = [rate if 1e-9 <= rate <= 1e12 else 0.0 for rate in bandwidths]
    order = sorted((i for i in range(n) if rated[i] > 0), key=lambda i: (-rated[i], i))
    shares = [0.0] * n
    if not order:
        return tuple(shares)
    if n <= 2:
        total = sum(rated)
        return tuple(rate / total for rate in rated)
    for k in range(len(order), 0, -1):
        fastest = order[:k]
        level = (n - 2 + k) / sum([rated[i] for i in fastest], 0.0)
        if level * rated[fastest[-1]] >= 1.0 - 1e-12:
            for i in fastest:
                shares[i] = max(0.0, (level * rated[i] - 1.0) / (n - 2))
            break
    total = sum(shares)
    return tuple(share / total for share in shares)


def assign_reducers(part_sizes: Sequence[int], bandwidths: Sequence[float]) -> tuple[int, ...]:
    """Reducer (member index) of every part, or () when nobody can reduce.

    Each part goes to the member whose reduced bytes are furthest below its share, which is the
    largest-quotient split in bytes; interleaving (rather than one range each) keeps all links busy
    from the first part to the last.
    """
    shares = load_shares(bandwidths)
    if not any(shares):
        return ()
    loads = [0] * len(shares)
    able = [i for i, share in enumerate(shares) if share > 0]
    reducers = []
    for size in part_sizes:
        cost = max(1, size)  # an empty part still needs a reducer
        best = min(able, key=lambda i: ((loads[i] + cost) / shares[i], i))
        loads[best] += cost
        reducers.append(best)
    return tuple(reducers)


def succession(
    group_id: bytes, part: int, bandwidths: Sequence[float], shares: Sequence[float], *, first: int
) -> tuple[int, ...]:
    """Who reduces the part in epoch 0, 1, 2 ...: an order of all members that all of them know.

    `first` is its reducer by assignment. Then come those with a share, by weighted rendezvous
    hashing, so that the parts of a dead reducer spread over the survivors in proportion (whoever is
    skipped because it is dead too leaves its parts to the rest in proportion again). Last those
    that reduce nothing by choice: when all others are dead a slow or undialable member is still
    right for its own values.
    """
    ranked = []
    for member, share in enumerate(shares):
        if member == first:
            continue
        if not share > 0:
            ranked.append((1, -bandwidths[member], member))
            continue
        drawn = hashlib.blake2b(
            group_id + part.to_bytes(4, "big") + member.to_bytes(2, "big"), digest_size=8
        ).digest()
        uniform = (int.from_bytes(drawn, "big") + 1) / 2.0**64  # in (0, 1]
        ranked.append((0, -math.log(uniform) / share, member))
    return (first, *(member for _, _, member in sorted(ranked)))
