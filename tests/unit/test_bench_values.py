"""What a bench averages: a wrong value, a wrong place and a wrong weight are all seen."""

from __future__ import annotations

import math

import pytest
import torch

from moshpitd.tensors.codecs import CODECS
from moshpitd.testing.bench.codecs import FORMULAS
from moshpitd.testing.bench.values import (
    Truth,
    block,
    candidates,
    fill,
    fingerprint,
    flat_tensor,
    look_inside,
)

NUMEL, PART = 1_500_000, 1 << 16  # more than a block; parts that begin anywhere in it
WEIGHTS = (3, 5, 7)


def averaged(codec: str = "float32", *, inside: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
    flat = torch.empty(NUMEL)
    fill(flat, Truth.of_round(1, WEIGHTS, codec=codec, numel=NUMEL).mean(inside))
    return flat


def truth(codec: str = "float32") -> Truth:
    return Truth.of_round(1, WEIGHTS, codec=codec, numel=NUMEL)


def test_the_mean_of_all_is_found_in_every_part() -> None:
    found = look_inside(averaged(), truth())
    assert found.counts() == {"0,1,2": found.parts}
    assert found.parts == math.ceil(NUMEL / PART)
    assert found.worst <= 1.0
    assert found.unexplained == []


def test_parts_with_fewer_inside_are_told_apart() -> None:
    flat = averaged()
    flat[PART : 2 * PART] = averaged(inside=(0, 2))[PART : 2 * PART]
    flat[2 * PART : 3 * PART] = averaged(inside=(1,))[2 * PART : 3 * PART]
    found = look_inside(flat, truth(), doubtful=[1])
    assert found.members[1:3] == [(0, 2), (1,)]
    assert found.counts()["0,1,2"] == found.parts - 2


@pytest.mark.parametrize("at", [0, PART, NUMEL - 1])
@pytest.mark.parametrize("wrong", [0.01, math.nan, math.inf])
def test_one_wrong_value_is_found(at: int, wrong: float) -> None:
    flat = averaged()
    flat[at] += wrong
    found = look_inside(flat, truth())
    assert found.unexplained == [at // PART]


def test_a_part_that_landed_elsewhere_is_found() -> None:
    flat = averaged()
    flat[:PART] = averaged()[PART : 2 * PART]
    assert look_inside(flat, truth()).unexplained == [0]


def test_other_weights_are_no_mean() -> None:
    equal = Truth.of_round(1, (1, 1, 1), codec="float32", numel=NUMEL)
    flat = torch.empty(NUMEL)
    fill(flat, equal.mean((0, 1, 2)))
    assert len(look_inside(flat, truth()).unexplained) == math.ceil(NUMEL / PART)


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8"])
def test_a_codec_may_be_off_by_its_bound_and_not_by_twice_as_much(codec: str) -> None:
    bound = truth(codec).bound
    flat = averaged(codec)
    flat[5] += 0.9 * bound
    assert look_inside(flat, truth(codec)).unexplained == []
    flat[5] += 1.1 * bound
    assert look_inside(flat, truth(codec)).unexplained == [0]


def test_who_may_be_inside() -> None:
    assert candidates(3, [2])[:2] == [(0, 1, 2), (0, 1)]
    assert len(candidates(3, [2])) == 7
    large = candidates(12, [4, 5])
    assert len(large) == 4
    assert large[0] == tuple(range(12))


@pytest.mark.parametrize("numel", [1, 15, 256, 1000, 100_003])
def test_the_pieces_lie_in_a_bucket_as_in_the_flat_tensor(numel: int) -> None:
    flat, pieces = flat_tensor(numel)
    assert sum(piece.numel() for piece in pieces) == numel
    assert (
        len(pieces) <= 8
    )  # their names are single digits, so that their order by name is this one
    assert all(piece.numel() % 16 == 0 for piece in pieces[:-1])
    fill(flat, block(0, 1, of=numel))
    assert torch.equal(torch.cat(pieces), flat)
    assert fingerprint(flat) != fingerprint(flat + 1)


def test_rounds_and_peers_have_values_of_their_own() -> None:
    blocks = [block(peer, number, of=64) for peer in range(3) for number in range(3)]
    assert len({tuple(one.tolist()) for one in blocks}) == 9
    assert torch.equal(block(1, 2, of=64), block(1, 2, of=64))


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("d", [1, 63, 64, 65, 1023, 1025, 131_073, 1 << 18])
def test_every_codec_has_its_formula(name: str, d: int) -> None:
    told = eval(FORMULAS[name], {"d": d, "up": math.ceil})
    assert told == CODECS[name].payload_bytes(d, "float32")
