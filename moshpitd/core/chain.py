"""Exchanges with neighbours that follow one another without matchmaking.

After an exchange in which every edge of ours counted, its members know who they are, what they hold
and which matrix comes next. So the next group needs no Join and no Begin: each derives it from the
last one, and when its trainer contributes it opens it and sends its message at once. Who is really
in that group shows edge by edge, as always (`neighbours`): an edge counts where both ends say so
under one group id, and equal ids are equal matrices. Who waits in vain keeps its share.

So nothing rests on all members going on. What makes one of them stop is any doubt: an edge that did
not count, a link or a member lost, somebody who asks to meet us, another shape, schema or lineage.
Then its next exchange begins with matchmaking.

One rule: at the end of an exchange a member either goes on to the group that follows, or says to
all its members that it is not in that one; and having said so it never opens it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from moshpitd.core.effects import Send
from moshpitd.core.events import Contributed
from moshpitd.core.grid import PEERS_KEY, is_flat
from moshpitd.core.group import group_id_of
from moshpitd.core.meeting import MISSED
from moshpitd.core.messages import Counts, Group, Invite, Join, Letter, Message, NotMember
from moshpitd.core.neighbours import Neighbours
from moshpitd.core.outcome import Outcome, Status
from moshpitd.core.state import State
from moshpitd.core.swarm import same_lineage

AT_ONCE_BYTES = 2 << 20
"""Largest message that is sent before its taker is known to be there: what comes early waits in the
taker's memory, 4 MiB per link, and beyond that the whole link waits. Twice this with `full`. What
is larger travels for longer than matchmaking takes, so it loses little."""

REMEMBERED = 64
"""Groups that somebody, or we, said no to. The word may be an exchange ahead of its group."""


class Chain:
    """Invariant: `next` is a group that we have not said no to, and of which nobody told us that it
    is not in it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.next: Group | None = None
        self._last = False  # the exchange that runs is the last one of its chain
        self._since = float("-inf")  # when the members were last found; others were not there then
        self._said_no: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    # -- from one exchange to the next

    def began(self, now: float) -> None:
        """An exchange with those that matchmaking found."""
        self._since, self._last, self.next = now, False, None

    def ended(self, last: Neighbours, outcome: Outcome, now: float) -> None:
        """An exchange is over: go on, or say that we do not."""
        stop, self._last = self._last, False
        if not self._may_follow(last.group):
            return  # and no other member does: all of them see that
        group = successor(last.group)
        refused = any((group.group_id, member.peer_id) in self._said_no for member in group.members)
        if refused or stop or outcome.status is not Status.COMPLETE or not self._fits(group, now):
            self._decline(group)
        else:
            self.next = group

    def take(self, calls: Sequence[Contributed], now: float) -> Group | None:
        """The group that this call begins with; None where it has to look for one."""
        if self.next is None:
            return None
        single = len(calls) == 1 and calls[0].mix is not None and calls[0].rounds == 1
        if not single or not self._fits(self.next, now):
            self.doubt()
            return None
        group, self.next = self.next, None
        return group

    def doubt(self) -> None:
        """Something has changed: the next exchange begins with matchmaking."""
        group, self.next = self.next, None
        if group is not None:
            self._decline(group)

    def stop(self) -> None:
        """The same in the middle of an exchange, which goes on to its end."""
        self._last = True

    # -- what others say

    def asked(self, sender: str, message: Invite | Join, current: Neighbours | None) -> None:
        """Somebody wants to meet us, and we are in an exchange or between two."""
        group = current.group if current is not None else self.next
        if group is None:
            return
        member = any(one.peer_id == sender for one in group.members)
        if is_stale(group, sender, message) or (member and current is not None):
            return  # a member that is not in it any more has said so
        if current is None:
            self.doubt()
        else:
            self.stop()

    def lost(self, peer_id: str) -> None:
        """A member, or the link to it, is gone."""
        if self.next is not None and self._is_next(self.next.group_id, peer_id):
            self.doubt()

    def heard(self, sender: str, message: Message) -> bool:
        """A word about a group that is not open here; True if that was all about it."""
        group_id = getattr(message, "group_id", b"")
        ours = self._is_next(group_id, sender)
        if isinstance(message, NotMember) and message.peer_id == sender:
            self._remember(group_id, sender)
            if ours:
                self.next = None
                self._remember(group_id, self.state.peer_id)
                # It has told everybody; those who have begun already wait for us too.
                for waits, early in self.state.early:
                    if isinstance(early, Letter) and early.group_id == group_id:
                        self._say_no(waits, group_id)
        elif ours and isinstance(message, Counts) and not message.counts:
            self.doubt()  # it has waited for us in vain
            return True
        elif isinstance(message, Letter) and (group_id, self.state.peer_id) in self._said_no:
            self._say_no(sender, group_id)
            return True
        return False

    # -- small steps

    def _is_next(self, group_id: bytes, peer_id: str) -> bool:
        """The group that is to follow here, and a member of it."""
        group = self.next
        return (
            group is not None
            and group.group_id == group_id
            and any(one.peer_id == peer_id for one in group.members)
        )

    def _may_follow(self, group: Group) -> bool:
        """By what all members know alike: on a grid lines change, and large messages go to nobody
        who may not be there."""
        flat = is_flat(group.shape) and group.key == PEERS_KEY
        return flat and sum(self.state.part_sizes) <= AT_ONCE_BYTES

    def _fits(self, group: Group, now: float) -> bool:
        """Are we still what the group says, are all others, and does nobody else belong to it?"""
        state, record = self.state, self.state.record
        if state.draining or not state.caught_up or not is_flat(state.place.shape):
            return False
        if group.schema != record.schema or group.codec != state.codec:
            return False
        if not same_lineage(group.lineage, record.lineage):
            return False
        members = {member.peer_id: True for member in group.members}
        for peer_id in members:
            entry = state.swarm.heard.get(peer_id)
            if peer_id != state.peer_id and (
                entry is None
                or entry.lost is not None
                or state.refuse(entry.record, now) is not None
            ):
                return False
        return not any(
            entry.record.peer_id not in members
            and entry.direct_at > self._since
            and entry.missed < MISSED
            and state.place.meets(entry.record)
            for entry in state.swarm.live(record.schema)
        )

    def _decline(self, group: Group) -> None:
        self._remember(group.group_id, self.state.peer_id)
        for member in group.members:
            if member.peer_id != self.state.peer_id:
                self._say_no(member.peer_id, group.group_id)

    def _say_no(self, to: str, group_id: bytes) -> None:
        self.state.effects.append(Send(to, NotMember(group_id, self.state.peer_id)))

    def _remember(self, group_id: bytes, who: str) -> None:
        self._said_no[group_id, who] = None
        while len(self._said_no) > REMEMBERED:
            self._said_no.popitem(last=False)


def successor(group: Group) -> Group:
    """The group that follows an exchange: the same members a round later."""
    after = replace(group, group_id=b"", nonce=group.nonce ^ 1, round=group.round + 1)
    return replace(after, group_id=group_id_of(after))


def is_stale(group: Group, sender: str, message: Invite | Join) -> bool:
    """Did a member say that before this chain of groups began, and is it only late?"""
    return isinstance(message, Join) and any(
        one.peer_id == sender and message.attempt <= one.attempt for one in group.members
    )
