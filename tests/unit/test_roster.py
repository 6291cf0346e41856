"""Which runs a node keeps: by the clock, at the limit, and in which order, on runs that do nothing.

The same Protocol is what real runs have: integration/test_idle_runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from moshpitd.daemon.roster import NAMED, Roster
from moshpitd.errors import TrainerError

IDLE_S = 100.0


@dataclass(eq=False)
class Bare:
    """A run by its answers. `idle_since` None: it has a trainer."""

    name: str
    idle_since: float | None = None
    used: bool = False
    last_copy: bool = False

    def in_use(self, now: float) -> bool:
        return self.used

    def is_last_copy(self, now: float) -> bool:
        return self.last_copy


class House:
    """A roster of bare runs, its clock, and what it did. `gate`: runs end when it opens."""

    def __init__(self, *, idle_s: float = IDLE_S, most: int = 3) -> None:
        self.now = 1000.0
        self.runs: dict[str, Bare] = {}
        self.told: list[str] = []
        self.faults: list[BaseException] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.roster = Roster(
            self.runs,
            idle_s=idle_s,
            clock=lambda: self.now,
            end=self._end,
            failed=self.faults.append,
            most=most,
        )

    async def _end(self, run: Bare, why: str) -> None:
        self.told.append(f"ends {run.name}: {why}")
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        self.told.append(f"ended {run.name}")

    def asks(self, name: str) -> Coroutine[Any, Any, Bare]:
        """As the API does: the run, and at once a trainer on its way in."""

        def make() -> Bare:
            self.told.append(f"made {name}")
            return Bare(name, self.now)

        async def attach() -> Bare:
            run = await self.roster.run(name, make)
            run.idle_since = None
            return run

        return attach()

    async def fill(self, **since: float | None) -> list[Bare]:
        """Runs of these names, without a trainer since then."""
        made = [await self.asks(name) for name in since]
        for run, at in zip(made, since.values(), strict=True):
            run.idle_since = at
        self.told.clear()
        return made

    async def refused(self, name: str) -> str:
        with pytest.raises(TrainerError) as caught:
            await self.asks(name)
        assert caught.value.reason == "too_many_runs"
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        return str(caught.value)


async def turns() -> None:
    """Everything that waits for nothing else has run then."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_run_is_let_go_when_it_has_been_without_trainers_for_so_long_and_not_before() -> (
    None
):
    house = House()
    idle, trained = await house.fill(a=1000.0, b=None)
    house.now = 1000.0 + IDLE_S - 0.001
    house.roster.look()
    await turns()
    assert house.runs == {"a": idle, "b": trained}
    house.now = 1000.0 + IDLE_S
    house.roster.look()
    await house.roster.settled()
    assert house.runs == {"b": trained}
    assert house.told == ["ends a: idle", "ended a"]


async def test_what_the_others_need_is_kept_for_as_long_as_they_do() -> None:
    house = House()
    (run,) = await house.fill(a=0.0)
    run.used = True
    house.roster.look()
    assert house.runs == {"a": run}
    assert house.roster.idle(run) == (1000.0, 0.0)  # it is due, and status says so
    run.used = False
    house.roster.look()
    assert house.runs == {}


async def test_the_last_copy_goes_by_the_clock_too() -> None:
    house = House()
    (run,) = await house.fill(a=0.0)
    run.last_copy = True
    house.roster.look()
    assert house.runs == {}


async def test_how_long_a_run_is_idle_and_when_it_goes() -> None:
    house = House()
    idle, trained = await house.fill(a=990.0, b=None)
    assert house.roster.idle(idle) == (10.0, 90.0)
    assert house.roster.idle(trained) == (0.0, 0.0)
    never = House(idle_s=0.0)
    (kept,) = await never.fill(a=990.0)
    assert never.roster.idle(kept) == (10.0, -1.0)
    never.now = 1e9
    never.roster.look()
    assert never.runs == {"a": kept}


async def test_the_longest_idle_makes_room_and_is_gone_before_the_new_one_is_made() -> None:
    house = House()
    await house.fill(a=900.0, b=None, c=800.0)
    house.gate.clear()
    asking = asyncio.create_task(house.asks("d"))
    await turns()
    assert list(house.runs) == ["a", "b"]
    house.gate.set()
    await asking
    assert list(house.runs) == ["a", "b", "d"]
    assert house.told == ["ends c: limit", "ended c", "made d"]


async def test_a_run_that_was_longer_idle_stays_while_it_is_needed() -> None:
    house = House()
    busy, last, _ = await house.fill(a=100.0, b=200.0, c=300.0)
    busy.used = last.last_copy = True
    await house.asks("d")
    assert list(house.runs) == ["a", "b", "d"]


async def test_who_attaches_while_the_run_is_let_go_gets_a_new_one() -> None:
    house = House()
    (old,) = await house.fill(a=0.0)
    house.gate.clear()
    house.roster.look()
    asking = [asyncio.create_task(house.asks("a")) for _ in range(2)]
    await turns()
    assert house.told == ["ends a: idle"], "it is not made while the old one is there"
    house.gate.set()
    one, other = await asyncio.gather(*asking)
    assert one is other
    assert one is not old
    assert house.told == ["ends a: idle", "ended a", "made a"]


async def test_a_trainer_that_is_faster_keeps_the_run() -> None:
    house = House()
    (run,) = await house.fill(a=0.0)
    assert await house.asks("a") is run
    house.roster.look()
    await turns()
    assert house.runs == {"a": run}
    assert house.told == []


async def test_a_trainer_that_gives_up_waiting_leaves_the_end_alone() -> None:
    house = House()
    await house.fill(a=0.0)
    house.gate.clear()
    house.roster.look()
    asking = asyncio.create_task(house.asks("a"))
    await turns()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    house.gate.set()
    await house.roster.settled()
    assert house.told == ["ends a: idle", "ended a"]


async def test_however_many_come_at_once_there_are_never_more_runs_than_that() -> None:
    house = House()
    await house.fill(a=1.0, b=2.0, c=3.0)
    house.gate.clear()
    asking = [asyncio.create_task(house.asks(name)) for name in ("d", "e", "f")]
    await turns()
    assert house.told == ["ends a: limit"]  # one goes at a time
    house.gate.set()
    await asyncio.gather(*asking)
    assert list(house.runs) == ["d", "e", "f"]
    here = most = 3
    for line in house.told:
        here += line.startswith("made") - line.startswith("ended")
        assert here <= most, house.told


async def test_seventy_runs_one_after_another() -> None:
    house = House(most=64)
    for number in range(70):
        run = await house.asks(f"run-{number}")
        house.now += 1.0
        run.idle_since = house.now
    assert list(house.runs) == [f"run-{number}" for number in range(6, 70)]


async def test_where_all_have_trainers_the_next_is_refused_and_told_what_to_do() -> None:
    house = House()
    await house.fill(a=None, b=None, c=None)
    assert await house.refused("d") == (
        "3 runs here, expected at most 3: a, b, c with trainers. "
        "To do: end the trainers of one of them, or use another daemon"
    )
    assert list(house.runs) == ["a", "b", "c"]


async def test_the_refusal_tells_what_is_kept_why_and_for_how_long() -> None:
    house = House()
    _, last, busy = await house.fill(a=None, b=950.0, c=0.0)
    last.last_copy = busy.used = True
    assert await house.refused("d") == (
        "3 runs here, expected at most 3: a with trainers; c without, but in use by other peers; "
        "b without, kept because no other peer is known to hold what was averaged there (the first "
        "goes in 50 s, runs.idle_s = 100). "
        "To do: end the trainers of one of them, wait, or use another daemon"
    )


async def test_an_operator_who_keeps_all_runs_is_told_which_setting_does() -> None:
    house = House(idle_s=0.0)
    await house.fill(a=1.0, b=2.0, c=3.0)
    assert await house.refused("d") == (
        "3 runs here, expected at most 3: a, b, c without, kept because runs.idle_s is 0. "
        "To do: set runs.idle_s, or use another daemon"
    )


async def test_a_refusal_is_short_however_many_runs_there_are() -> None:
    house = House(most=64)
    await house.fill(**{f"{number:02}{'x' * 62}": None for number in range(64)})
    words = await house.refused("d")
    assert f"and {64 - NAMED} more with trainers" in words
    assert len(words) < 1000


async def test_a_node_that_leaves_makes_no_run_and_lets_none_go() -> None:
    house = House()
    (run,) = await house.fill(a=0.0)
    house.roster.shut()
    house.roster.look()
    assert house.runs == {"a": run}
    assert await house.asks("a") is run  # which refuses by itself
    with pytest.raises(TrainerError) as caught:
        await house.asks("b")
    assert caught.value.reason == "draining"


async def test_a_node_that_leaves_while_a_run_goes_makes_it_no_more() -> None:
    house = House()
    await house.fill(a=0.0)
    house.gate.clear()
    house.roster.look()
    asking = asyncio.create_task(house.asks("a"))
    await turns()
    house.roster.shut()
    house.gate.set()
    with pytest.raises(TrainerError, match="leaving"):
        await asking


async def test_a_fault_at_the_end_of_a_run_is_told() -> None:
    house = House()
    await house.fill(a=0.0)
    house.fault = RuntimeError("half of it is left")
    house.roster.look()
    await house.roster.settled()
    assert house.faults == [house.fault]
