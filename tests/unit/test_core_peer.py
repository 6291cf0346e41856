"""The doors of a Peer that lead to its parameter store: what a driver and other peers say arrives
there, and what the store decides comes out with everything else."""

from __future__ import annotations

import random

from moshpitd.core.effects import Effect, Send
from moshpitd.core.events import Attached, Event, Received, TrainerGone
from moshpitd.core.messages import Hello
from moshpitd.core.params import Params
from moshpitd.core.peer import Peer
from moshpitd.core.store_words import (
    STORE_MESSAGES,
    Ballot,
    DropStore,
    Rules,
    StoreAsk,
    StoreHave,
    StoreOpened,
    StorePullAsked,
    StoreTerms,
)


def peer_named(name: str) -> Peer:
    peer = Peer(Params(), name, random.Random(name), run="r")
    tell(peer, Attached("t", b"schema", "", (8, 8), b"digest"))
    return peer


def tell(peer: Peer, event: Event) -> list[Effect]:
    peer.handle(event, 0.0)
    return peer.take_effects()


def test_a_store_is_agreed_on_through_the_doors_of_two_peers() -> None:
    peers = {name: peer_named(name) for name in ("peer0", "peer1")}
    one, other = peers.values()
    tell(one, Received("peer1", Hello(other.record, answer=True)))
    tell(other, Received("peer0", Hello(one.record, answer=True)))

    opened = tell(one, StoreOpened("peer0/t", Rules(0.1)))
    assert not [effect for effect in opened if isinstance(effect, Send)], "nobody wants it yet"
    said, todo = [], [("peer0", e) for e in tell(one, StorePullAsked("1", "peer0/t"))]
    while todo:
        sender, effect = todo.pop(0)
        if isinstance(effect, Send) and isinstance(effect.message, STORE_MESSAGES):
            said.append((sender, type(effect.message)))
            answer = tell(peers[effect.to], Received(sender, effect.message))
            todo += [(effect.to, one) for one in answer]

    asked = [("peer0", StoreAsk), ("peer1", StoreHave)]
    assert said == [*asked, *asked, ("peer0", StoreTerms)]  # once to look, once to promise
    terms = other.storage.common.terms
    assert terms is not None
    assert terms == one.storage.common.terms
    assert (terms.ballot, terms.owners) == (Ballot(1, "peer0"), ("peer0", "peer1"))


def test_the_last_trainer_takes_its_store_with_it_and_one_without_a_store_has_none() -> None:
    for opens in (False, True):
        peer = peer_named("peer0")
        if opens:
            tell(peer, StoreOpened("peer0/t", Rules(0.1)))
        left = tell(peer, TrainerGone("t"))
        assert [one for one in left if isinstance(one, DropStore)] == [DropStore()] * opens
