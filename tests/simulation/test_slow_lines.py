"""Lines on which a part takes its time: who waits for what in the simulator, and which worlds of
slow lines may be asked for complete rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moshpitd.core.grid import sides_for
from moshpitd.sim.faults import Options, draw
from moshpitd.sim.wire import Wire
from moshpitd.sim.world import World

PART_S = 1.0
ONE, TWO = b"one round", b"another round"


@pytest.fixture
def world() -> World:
    """Three nodes whose lines carry a part a second; no daemon of them says anything."""
    options = Options(
        peers=3, rate_mbps=8.0, rate_sigma=0.0, part_bytes=1_000_000, latency_s=0.001,
        latency_sigma=0.0, jitter_sigma=0.0, parts_overtake=True,
    )  # fmt: skip
    made = World(options)
    for node in made.nodes:
        node.peer = _Mute()
    return made


class _Mute:
    """A daemon whose data plane alone is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


def _sends(
    world: World, wire: Wire, of: int, key: bytes, landed: list[tuple[float, bytes]]
) -> None:
    node, other = world.nodes[of], world.nodes[2]

    def lands(there: object, its: bytes) -> None:
        assert there is other
        landed.append((round(world.now, 1), its))

    wire.send(node, other, (key, other.incarnation), lands)


def _run(world: World, until: float) -> None:
    """What is on the agenda until then, but the daemons' own start."""
    while (item := world._agenda.take(until=until)) is not None:
        world.now, _, call, args = item
        if getattr(call, "__self__", None).__class__ is Wire:
            call(*args)
    world.now = until


def test_what_close_takes_out_of_the_queue_holds_nothing_up(world: World) -> None:
    landed: list[tuple[float, bytes]] = []
    wire = Wire(world, world.links, world.options)
    for _ in range(5):
        _sends(world, wire, 0, ONE, landed)
    _run(world, 1.5)
    wire.close(world.nodes[0], ONE)
    _sends(world, wire, 0, TWO, landed)
    _run(world, 20.0)
    assert landed == [(PART_S, ONE), (1.5 + PART_S, TWO)]


def test_what_is_queued_for_another_round_is_still_waited_for(world: World) -> None:
    landed: list[tuple[float, bytes]] = []
    wire = Wire(world, world.links, world.options)
    _sends(world, wire, 0, ONE, landed)
    _sends(world, wire, 0, TWO, landed)
    wire.close(world.nodes[0], ONE)
    assert world.nodes[0].plane.up_free == 2 * PART_S
    wire.close(world.nodes[0], TWO)
    assert world.nodes[0].plane.up_free == world.now


@pytest.mark.parametrize("seed", range(0, 400, 4))
def test_a_drawn_world_has_time_for_what_it_is_asked(seed: int) -> None:
    """Each uplink, up to 3 sigma, carries a contribution before its peer would be silent, and not
    `slow_ratio` times as long as the median's; sweeps end within their calls."""
    options = draw(seed)
    params = options.params
    median_s = 8e-6 * options.parts * options.part_bytes / options.rate_mbps / options.up_ratio
    slowest = math.exp(3.0 * math.hypot(options.rate_sigma, options.up_sigma))
    assert median_s * slowest < params.part_timeout_s + 1e-9
    assert options.call_timeout_s >= 6.0 * median_s - 1e-9
    if median_s * slowest > params.silence_min_s:
        assert options.parts_overtake
        assert slowest < params.slow_ratio
    if options.rounds == 0:
        line_s = params.window_s + median_s * slowest + params.parity_timeout_s
        assert len(sides_for(options.peers, params.max_group)) * line_s < options.call_timeout_s
