"""What trainers say of themselves when they attach, and what others see of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moshpitd.core.swarm import first_difference
from moshpitd.daemon.trainers import Attachment, checked_action, schema_of, schema_text
from moshpitd.errors import TrainerError
from moshpitd.tensors.layout import Layout, TensorSpec

SPECS = (TensorSpec("w", (200,), "float32"),)
LAYOUT = Layout.from_specs(SPECS, part_bytes=512)


def test_runs_that_meet_in_other_ways_are_other_runs_and_say_so() -> None:
    average = Attachment(SPECS)
    manners = [
        average,
        replace(average, topology="ring"),
        replace(average, topology="torus"),
        replace(average, topology="ring", full=True),
        replace(average, topology="ring", pairs=True),
    ]
    schemas = [schema_of(LAYOUT, one) for one in manners]
    assert schemas[0] == LAYOUT.schema_digest
    assert len({len(schema) for schema in schemas}) == 1, "a record has room for no more"
    assert len(set(schemas)) == len(manners)
    texts = [schema_text(LAYOUT, one) for one in manners]
    assert first_difference(texts[0], texts[1]) == (
        "tensor 1: ours is parts of 512 bytes, "
        "theirs parts of 512 bytes in exchanges on topology ring"
    )
    assert len(set(texts)) == len(manners)
    assert schema_of(LAYOUT, replace(average, version=7, client="x")) == schemas[0]


def test_a_word_that_is_no_action_of_a_meeting_is_refused() -> None:
    """It was taken for `add`: the bucket was added to the parameters."""
    assert [checked_action(word) for word in ("start", "add", "meet")] == ["start", "add", "meet"]
    for word in ("", "Add", "subtract"):
        with pytest.raises(TrainerError, match="expected start, add or meet"):
            checked_action(word)
