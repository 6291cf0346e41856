"""Who reduces a part when its reducer is dead, and when that one is dead too. One rule: a pure
function of the group, so that (part, epoch) names exactly one member for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moshpitd.core.balance import load_shares, succession
from moshpitd.core.messages import Group, Member


def bandwidths_of(members: Sequence[Member]) -> list[float]:
    """What counts for reducing: the slower direction, and nothing for who cannot be dialled."""
    return [min(m.up_mbps, m.down_mbps) if m.addresses else 0.0 for m in members]


class Succession:
    """The order of every part, worked out when it is first asked for."""

    def __init__(self, group: Group, reducers: Sequence[int]) -> None:
        self._group_id = group.group_id
        self._reducers = reducers
        self._bandwidths = bandwidths_of(group.members)
        self._shares = load_shares(self._bandwidths)
        self._orders: dict[int, tuple[int, ...]] = {}

    def reducer(self, part: int, epoch: int) -> int | None:
        """The member that reduces `part` in `epoch`; None when the order has no more."""
        if epoch == 0:
            return self._reducers[part]
        order = self._order(part)
        return order[epoch] if epoch < len(order) else None

    def following(
        self, part: int, epoch: int, able: Callable[[int], bool]
    ) -> tuple[int, int] | None:
        """(epoch, member) of the first after `epoch` that is able; None when nobody is left."""
        order = self._order(part)
        for later in range(epoch + 1, len(order)):
            if able(order[later]):
                return later, order[later]
        return None

    def _order(self, part: int) -> tuple[int, ...]:
        order = self._orders.get(part)
        if order is None:
            order = self._orders[part] = succession(
                self._group_id, part, self._bandwidths, self._shares, first=self._reducers[part]
            )
        return order
