"""Who reduces a part when its reducer is dead, and when that one is dead too. One rule: a pure
function of the group, so that (part, epoch) names exactly one member for everybody."""

from __future__ import annotations

from collections.abc import Sequence

from moshpitd.core.balance import load_shares, succession
from moshpitd.core.messages import Group, Member


def bandwidths_of(members: Sequence[Member]) -> list[float]:
    """What counts for reducing: the slower direction, and nothing for who cannot be dialled."""
    return [min(m.up_mbps, m.down_mbps) if m.addresses else 0.0 for m in members]


class Succession:
    """The order of every part, worked out when it is first asked for. It goes round: a reducer that
    was only slow, or was suspected by one member alone, may have its turn again."""

    def __init__(self, group: Group, reducers: Sequence[int]) -> None:
        self._group = group
        self._reducers = reducers
        self._bandwidths: list[float] = []  # worked out when somebody dies
        self._shares: tuple[float, ...] = ()
        self._orders: dict[int, tuple[int, ...]] = {}

    def reducer(self, part: int, epoch: int) -> int:
        """The member that reduces `part` in `epoch`."""
        if epoch == 0:
            return self._reducers[part]
        order = self._order(part)
        return order[epoch % len(order)]

    def following(self, part: int, epoch: int, able: Sequence[int]) -> tuple[int, int] | None:
        """(epoch, member) of the first after `epoch` that is able; None when nobody is."""
        order = self._order(part)
        for later in range(epoch + 1, epoch + 1 + len(order)):
            member = order[later % len(order)]
            if member in able:
                return later, member
        return None

    def _order(self, part: int) -> tuple[int, ...]:
        order = self._orders.get(part)
        if order is None:
            if not self._shares:
                self._bandwidths = bandwidths_of(self._group.members)
                self._shares = load_shares(self._bandwidths)
            order = self._orders[part] = succession(
                self._group.group_id,
                part,
                self._bandwidths,
                self._shares,
                first=self._reducers[part],
            )
        return order
