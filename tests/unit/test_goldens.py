"""Every worked example has a test that runs it through what ships. One rule: a new file in
tests/golden without a line here is a failure, and so is a line whose test is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "unit"

PLAYED_BY: dict[str, tuple[str, str]] = {
    "allreduce_load_balance": ("test_core_balance.py", "allreduce_load_balance.json"),
    "asysg_con": ("test_optim_asysg.py", 'examples("asysg_con'),
    "asysg_incon": ("test_optim_asysg.py", 'examples("asysg_incon'),
    "bagua_qadam": ("test_optim_bagua.py", 'examples("bagua_qadam'),
    "bytegrad_allreduce": ("test_optim_bagua.py", 'examples("bytegrad'),
    "delayed_sgd_stability": ("test_optim_local.py", 'examples("delayed'),
    "diana": ("test_optim_feedback.py", 'examples("diana'),
    "dpsgd_ring4": ("test_optim_gossip.py", 'examples("dpsgd'),
    "ef_sgd": ("test_optim_feedback.py", 'examples("ef_sgd'),
    "local_vs_minibatch": ("test_optim_local.py", 'examples("local_vs'),
    "minmax_uint8": ("test_codec_promises.py", 'golden("minmax_uint8'),
    "moshpit_full_grid_3_2": ("test_core_grid.py", 'golden("moshpit_full_grid_3_2'),
    "moshpit_partial_grid_failures": ("test_core_mixing.py", 'golden("moshpit_partial_grid'),
    "onebit_adam_ds": ("test_optim_onebit.py", 'examples("onebit_adam'),
    "onebit_scale_contraction": ("test_codec_promises.py", 'golden("onebit_scale_contraction'),
    "quantizers": ("test_codec_promises.py", 'golden("quantizers'),
    "random_groups_contraction": ("test_core_mixing.py", 'golden("random_groups_contraction'),
    "sgp_pushsum": ("test_optim_gossip.py", 'examples("sgp'),
    "topologies": ("test_core_mixing.py", 'golden("topologies'),
}
"""Example -> test file, and the words that it reads the example with. Codecs, grids and mixing are
tested where they live, algorithms as torch optimizers."""


def test_every_worked_example_is_played() -> None:
    assert {path.stem for path in (ROOT / "golden").glob("*.json")} == set(PLAYED_BY)


@pytest.mark.parametrize(("example", "where"), PLAYED_BY.items())
def test_by_a_test_that_is_there(example: str, where: tuple[str, str]) -> None:
    file, words = where
    assert words in (UNIT / file).read_text(encoding="utf-8"), (example, where)
