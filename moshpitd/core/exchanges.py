"""What a group that has begun does: an average of all, or each member with its neighbours. One
rule: the trainers' calls decide, and nothing else here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from moshpitd.core.allreduce import Round
from moshpitd.core.events import Contributed
from moshpitd.core.messages import Counts, Group, Message, Missing, Resend, TakeOver
from moshpitd.core.neighbours import Neighbours
from moshpitd.core.state import State

Exchange = Round | Neighbours


def exchange_of(
    state: State,
    group: Group,
    *,
    calls: Sequence[Contributed],
    late: Sequence[Contributed],
    deadline_at: float,
    now: float,
    follows: bool = False,
) -> Exchange:
    """`follows`: the last exchange, without matchmaking."""
    deadline_at = min(deadline_at, now + state.params.round_timeout_s)
    mixing = next((call for call in calls if call.mix is not None), None)
    if mixing is not None and mixing.mix is not None:  # the only one: the local API sees to that
        return Neighbours(
            params=state.params,
            group=group,
            me=state.peer_id,
            part_sizes=state.part_sizes,
            trainer=mixing.trainer,
            mix=mixing.mix,
            own=state.own,
            started=now,
            deadline_at=deadline_at,
            quiet=state.quiet,
            follows=follows,
        )
    return Round(
        params=state.params,
        group=group,
        me=state.peer_id,
        part_sizes=state.part_sizes,
        trainers=tuple((call.trainer, call.weight) for call in calls),
        late=tuple(call.trainer for call in late),
        started=now,
        deadline_at=deadline_at,
        quiet=state.quiet,
        offer=state.offer,
        rng=state.rng,
    )


QUESTIONS = (Missing, TakeOver, Resend, Counts)


def is_question(message: Message) -> TypeGuard[Missing | TakeOver | Resend | Counts]:
    """Of a round, and somebody waits for an answer: not who says that an edge does not count."""
    return isinstance(message, QUESTIONS) and bool(getattr(message, "counts", True))
