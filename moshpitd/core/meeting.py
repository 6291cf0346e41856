"""Where and with whom the next attempt meets: our place on the grid, made known, and those that may
be under our key.

On a grid the next meeting is arranged as soon as the group of the last one is closed: from then on
everybody can compute where it stands next. Our record goes under the next key, those who are there
already are looked up and told of us, and whoever comes later finds us and tells us. So when the
trainer contributes again, the members of its line know each other, and one round trip makes the
group; matchmaking has cost the trainer nothing.

One rule: it prepares attempts and judges none; how one goes on is `matchmaking`, what follows from
its end is `work`.
"""

from __future__ import annotations

from collections.abc import Sequence

from moshpitd.core.candidates import sentence, spelled
from moshpitd.core.effects import Announce, LookUp, Send
from moshpitd.core.events import Found
from moshpitd.core.grid import is_flat
from moshpitd.core.matchmaking import Attempt
from moshpitd.core.messages import Hello, Record
from moshpitd.core.outcome import Reason
from moshpitd.core.presence import EAGER_S
from moshpitd.core.scale import Scale
from moshpitd.core.shards import draw
from moshpitd.core.state import State
from moshpitd.core.swarm import GOODBYES

MISSED = 2
"""Windows in a row that a peer may be waited for in vain; after that its Later holds no group up.
"""

APART = 2
"""Sweeps by which numbers of rounds differ where all go at their own pace: who is further off is
pulled to the median, or its record is of a time when it stood here before."""

PROMPT = 0.1
"""Of a window: whose first line takes longer to meet has found somebody who was not ready."""

SWEEPS, WAITED = 8, 3
"""Of so many sweeps, so many whose first line had to wait: then each goes at its own pace. Where
all begin together one in ten has to, where nobody does more than half."""

SPREAD = 0.2
"""Of that time, by which the look-ups of those that began together are spread."""


class Meeting:
    """Invariant: what an attempt is told of the others is what the swarm says of them."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.scale = Scale(state)
        self.key = ""  # under which our next meeting is arranged; "" while the run is one group
        self.at: tuple[int, tuple[int, ...]] = (-1, ())  # round and coordinates for which it is
        self.arranged_at = 0.0
        self.found_at: float | None = None  # when the directory last said who else is there
        self.told: dict[str, bool] = {}  # who was told that we come -> it stood in our round
        self.took = 0.0
        self.waited: list[bool] = []  # in the first line of each of the last sweeps

    # -- before the attempt

    def arrange(self, now: float, *, idle: bool = False) -> None:
        """Take our next place and make it known, if anything about it is new. `idle`: nobody has
        contributed yet."""
        state, place = self.state, self.state.place
        self.scale.prepare(now)
        record = state.presence.update(
            round=place.round, coordinates=place.coordinates, shape=place.shape
        )
        state.presence.on_grid = not is_flat(place.shape)
        if not state.presence.present:
            return
        if idle and self._unsettled(now):
            self.scale.look(now)
            return
        key = "" if is_flat(place.shape) else place.key()
        if key and (key, place.round, place.coordinates) != (self.key, *self.at):
            self.found_at, self.arranged_at = None, now
            self.told.clear()
            state.effects.append(Announce(key, record, state.params.ttl_s))
            if place.small(state.swarm, record.schema):
                for entry in state.swarm.live(record.schema):
                    state.effects.append(Send(entry.record.peer_id, Hello(record, answer=True)))
        self.key, self.at = key, (place.round, place.coordinates)
        self.scale.look(now)

    def began(self, now: float) -> None:
        """Our round has begun, or nobody came: arrange the next one, and see later whether we are
        in step with those outside our line. On a small grid everybody tells everybody anyway."""
        self.arrange(now)
        if self.key and not self._everybody_tells():
            told_s = self.state.params.refresh_s / 2
            self.state.presence.look_again(now + told_s * (1.0 + SPREAD * self.state.rng.random()))

    def _unsettled(self, now: float) -> bool:
        """A large run has just changed its shape, and may do so again: there is time until a
        trainer contributes."""
        place = self.state.place
        return place.many() and not is_flat(place.shape) and now < place.crowd.taken_at + EAGER_S

    def announced(self, key: str) -> None:
        """Only now: of two peers that store before they look up, at least one finds the other."""
        if key == self.key and self.found_at is None:
            self.state.effects.append(LookUp(key))

    def found(self, event: Found, now: float) -> None:
        """The directory has answered, for whatever key; the records have been heard."""
        self.scale.found(event, now)
        if event.key == self.key:
            if event.ok and self.found_at is None:
                self.took = now - self.arranged_at
            self.found_at = now
            self._tell(event.records)

    def _tell(self, records: Sequence[Record]) -> None:
        """Those who stand in our line learn that we come, and in a run of sweeps those too that
        stood there a little while ago and may wait there still."""
        heard, here, near = self.state.swarm.heard, [], []
        for record in records:
            entry = heard.get(record.peer_id)
            if entry is not None and entry.record.sequence > record.sequence:
                record = entry.record  # the directory keeps what it said under this key
            if record.peer_id in self.told:
                continue
            if self.is_here(record):
                here.append(record)
            elif self._may_be_here(record):
                near.append(record)
        hello = Hello(self.state.record, answer=True)
        most = 2 * self.state.params.max_group
        near.sort(key=lambda it: abs(it.round - self.state.place.round))
        for record in [*self._ours(here), *near][:most]:
            self.told[record.peer_id] = record.round == self.state.place.round
            self.state.effects.append(Send(record.peer_id, hello))

    def _may_be_here(self, record: Record) -> bool:
        """Sweeps begin whenever their trainers are ready, so those of one line are some sweeps
        apart by their numbers, though they wait there at the same time."""
        place = self.state.place
        apart = abs(record.round - place.round)
        near = apart <= APART * len(place.shape.sides)
        return self.state.sweeps and near and self.is_here(record, just_now=True)

    def greeted(self, sender: str, record: Record, now: float) -> None:
        """A Hello: one that stands in an earlier round than we learns that from our answer, and
        goes on to ours if its line has: what it missed is over."""
        place = self.state.place
        if not self.key or record.shape != place.shape:
            return
        if record.coordinates == place.coordinates and self._everybody_tells():
            self.arrange(now)  # one of us two moves, and there is time
        elif record.round < place.round:
            self.state.effects.append(Send(sender, Hello(self.state.record, answer=True)))
        elif record.round > place.round and self.told.get(sender) and self._line_has_gone():
            place.skip_to([record.round])
            self.arrange(now)

    def _line_has_gone(self) -> bool:
        """Of those whom the directory named in our round, is everybody in a later one?"""
        heard = self.state.swarm.heard
        entries = [heard[it] for it, ours in self.told.items() if ours and it in heard]
        return all(
            entry.lost is not None or entry.record.round > self.state.place.round
            for entry in entries
        )

    # -- the attempt

    def attempt(self, weight: float, *, reduces: bool, deadline_at: float, now: float) -> Attempt:
        """A new attempt under the key of the place where we stand now, started."""
        state = self.state
        self.arrange(now)
        state.attempts += 1
        key = state.place.key()
        flat = is_flat(state.place.shape)
        settle_s = state.params.settle_s
        if flat:
            looked_up = state.presence.fresh(now)
            settled_at = state.presence.found_at + max(settle_s, state.presence.look_up_took)
        else:
            looked_up = self.found_at is not None
            settled_at = (self.found_at or now) + max(settle_s, self.took)
        attempt = Attempt(
            params=state.params,
            me=state.record,
            key=key,
            number=state.attempts,
            weight=weight,
            newcomer=state.newcomer,
            reduces=reduces,
            norm=state.norm,
            nonce=state.rng.getrandbits(63),
            started=now,
            deadline_at=min(deadline_at, now + state.params.attempt_timeout_s),
            call_ends_at=deadline_at,
            expected=state.place.expected(),
            codec=state.codec,
            looked_up=looked_up,
            settle_until=settled_at,
        )
        state.note("attempt_started", key=key, round=state.place.round)
        self.add_candidates(attempt, now)
        for leader, (invited_key, until) in list(state.invites.items()):
            if until <= now:
                del state.invites[leader]
            elif invited_key == key and leader in attempt.candidates:
                attempt.waiting[leader] = until
        if flat and not attempt.looked_up:
            state.presence.look_up(now)
        elif looked_up and self._doubtful(attempt):
            # A Hello may have been lost: ask once more before we begin without somebody.
            attempt.looked_up = False
            state.effects.append(LookUp(key))
        if flat:
            attempt.candidates.gone = state.swarm.gone()
        attempt.unsettled = self.unsettled()
        attempt.lone_waits = not flat and not self._everybody_tells()
        attempt.own_pace = self.own_pace()
        attempt.start(now)
        state.collect(attempt.effects)
        return attempt

    def ended(self, attempt: Attempt, now: float, *, in_time: bool, first: bool) -> None:
        """Remember who was waited for in vain. `in_time`: it did not end with its call; `first` of
        that call: did we begin together with the others?"""
        state = self.state
        if first and state.sweeps:
            prompt_s = max(PROMPT * state.params.window_s, 3.0 * self.took)
            self.waited = [*self.waited[1 - SWEEPS :], now - attempt.started > prompt_s]
        for peer_id in attempt.candidates.waited_in_vain() if in_time else []:
            self.missed(peer_id, now)
        if attempt.expected and now >= attempt.window_end:
            for entry in state.place.unsettled(state.swarm, state.record.schema):
                entry.missed += 1
        self.unanswered(attempt.candidates.unanswered(), since=attempt.started)

    def own_pace(self) -> bool:
        """Does everybody sweep whenever its trainers are ready? Then who has moved on says nothing
        of the others of its line, and it pays to wait for those; where all begin together it would
        make us late for the next line too."""
        return self.state.sweeps and sum(self.waited) >= WAITED

    def missed(self, peer_id: str, now: float) -> None:
        """It was waited for, a whole window, in vain."""
        entry = self.state.swarm.heard.get(peer_id)
        if entry is not None and not self.state.offer.busy(peer_id, now):
            entry.missed += 1

    def unanswered(self, peers: Sequence[str], *, since: float) -> None:
        """They were asked after `since` and said nothing; gone until they are heard, or every round
        would wait for a machine that stands still. Whoever we heard meanwhile is not."""
        for peer_id in peers:
            entry = self.state.swarm.heard.get(peer_id)
            if entry is None or entry.direct_at > since:
                continue
            if self.state.swarm.lose(peer_id, Reason.NO_ANSWER):
                self.state.note("peer_lost", peer_id, Reason.NO_ANSWER)

    def moved_on(self, attempt: Attempt) -> bool:
        """Did nobody come because our line is in a later round by now? Then we go there too."""
        rounds = []
        for peer_id, candidate in attempt.candidates.items():
            entry = self.state.swarm.heard.get(peer_id)
            if (
                candidate.reason is Reason.MOVED
                and entry is not None
                and entry.record.shape == attempt.me.shape
                and entry.record.round > attempt.me.round
            ):
                rounds.append(entry.record.round)
        if rounds:
            self.state.place.skip_to(rounds)
        return bool(rounds)

    def _doubtful(self, attempt: Attempt) -> bool:
        """On a large grid: does somebody seem to be missing from our line?"""
        if is_flat(self.state.place.shape) or self._everybody_tells():
            return False
        return len(attempt.candidates) + 1 < max(2, attempt.expected)

    def sentence(self, attempt: Attempt) -> str:
        """Why nobody was found, about everybody that is known: "heard 3 peers, 2 refused: schema
        differs, 1 unreachable"."""
        words = attempt.candidates.words()
        for peer_id, entry in self.state.swarm.heard.items():
            if peer_id in attempt.candidates:
                continue
            if entry.record.schema != self.state.record.schema:
                words.append(f"refused: {spelled(Reason.SCHEMA)}")
            elif entry.lost is not None:
                words.append(spelled(entry.lost))
            elif self.state.place.meets(entry.record):
                words.append("not asked")
            else:
                words.append("elsewhere on the grid")
        return sentence(words)

    def add_candidates(self, attempt: Attempt, now: float) -> None:
        """Everybody known that may come to our key; on a small grid also those that are in another
        round now. One of another lineage is still worth asking: it may hold ours by now."""
        place, ours = self.state.place, self.state.record
        anytime = is_flat(place.shape) or self._everybody_tells()
        since = now - self.state.params.found_fresh_s
        here = [
            entry
            for entry in self.state.swarm.live(ours.schema)
            # In our round, or lately in one with our axis: where everybody goes at its own pace,
            # those of a line are seldom in one round.
            if (
                anytime
                or entry.record.round == place.round
                or (entry.heard_at >= since and place.in_step(entry.record))
            )
            and place.meets(entry.record)
        ]
        for record in self._ours([entry.record for entry in here]):
            if self.state.refuse(record, now) is not Reason.STRIKES:
                missed = self.state.swarm.heard[record.peer_id].missed
                # One that still takes the results of a round that is over for us comes later.
                busy = self.state.offer.busy(record.peer_id, now)
                attempt.add(record, now, waited_for=missed < MISSED and not busy)

    def pointed_at(self, attempt: Attempt, leader: str, now: float) -> None:
        """Somebody whom we asked under this key follows `leader`, so it is there. Its last record
        may say that it stands elsewhere, or it did not answer us when we last asked: two machines
        that stood still at overlapping times take each other for gone. One that said goodbye has
        come back only when it says so itself."""
        entry = self.state.swarm.heard.get(leader)
        if (
            entry is not None
            and entry.lost not in GOODBYES
            and leader not in attempt.candidates
            and entry.record.schema == self.state.record.schema
            and self.state.refuse(entry.record, now) is not Reason.STRIKES
        ):
            attempt.add(entry.record, now)

    def is_here(self, record: Record, *, just_now: bool = False) -> bool:
        """Does it stand under our key, on the grid in our round? What it says `just_now` counts
        whatever its number of the round is: the key says which axis is free. Of a flat run that has
        outgrown one group only the directory's answer can be split as everybody splits it."""
        place, schema = self.state.place, self.state.record.schema
        if record.peer_id == self.state.peer_id or record.schema != schema:
            return False
        if is_flat(place.shape):
            in_time = self.state.swarm.living(schema) < self.state.params.max_group
        else:
            in_time = record.round == place.round or (just_now and place.in_step(record))
        return in_time and place.meets(record)

    def unsettled(self) -> int:
        """Live peers that may yet turn up under our key. On a large grid whoever can has said so
        when the group before this meeting was closed."""
        if is_flat(self.state.place.shape):
            return 1
        if not self._everybody_tells():
            return 0
        late = self.state.place.unsettled(self.state.swarm, self.state.record.schema)
        return sum(1 for entry in late if entry.missed < MISSED)

    def _everybody_tells(self) -> bool:
        return self.state.place.small(self.state.swarm, self.state.record.schema)

    def _ours(self, records: Sequence[Record]) -> Sequence[Record]:
        """Of those under one key, the ones that we meet: more than a group holds are split by hash,
        into a power of two, so that peers that count a few more or less still agree."""
        pieces = 1
        while len(records) + 1 > pieces * self.state.params.max_group:
            pieces *= 2
        if pieces == 1:
            return records
        ours = self._piece(self.state.peer_id, pieces)
        return [record for record in records if self._piece(record.peer_id, pieces) == ours]

    def _piece(self, peer_id: str, pieces: int) -> int:
        return int(draw(peer_id, self.key, self.state.place.round) * pieces)
