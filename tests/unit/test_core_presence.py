"""How old an answer of the directory may be, and how long newcomers may take after it."""

from __future__ import annotations

from moshpitd.core.effects import LookUp
from moshpitd.core.params import Params
from moshpitd.core.presence import Presence
from tests.kit.hands import Hands

PARAMS = Params()


def settled() -> tuple[Presence, float]:
    """One that has looked up for some minutes, and when the last answer came."""
    presence, now = Presence(PARAMS, Hands(1).nodes["p00"].peer.record), 0.0
    presence.appear(now)
    presence.stored(now)
    for _ in range(600):
        presence.tick(now)
        if any(isinstance(effect, LookUp) for effect in presence.effects):
            presence.effects.clear()
            presence.found(now, ok=True)
        now += 0.5
    return presence, presence.found_at


def test_what_the_background_keeps_is_fresh_until_it_should_have_been_renewed() -> None:
    presence, found_at = settled()
    assert presence.fresh(found_at + PARAMS.refresh_s + 4 * PARAMS.answer_timeout_s)
    assert not presence.fresh(found_at + PARAMS.refresh_s + 4 * PARAMS.answer_timeout_s + 0.1)
    presence.hurry(found_at)  # things change: an answer must be young
    assert presence.fresh(found_at + PARAMS.found_fresh_s)
    assert not presence.fresh(found_at + PARAMS.found_fresh_s + 0.1)


def test_a_look_up_that_somebody_held_up_does_not_make_newcomers_slower() -> None:
    presence, now = settled()
    presence.look_up(now)
    presence.found(now + 0.05, ok=True)
    assert 0.04 < presence.look_up_took < 0.06
    presence.look_up(now)
    presence.found(now + 6.0, ok=True)
    assert presence.look_up_took == PARAMS.answer_timeout_s / 2
