"""Raw or coded: the choice as a table, and what it is made from."""

from __future__ import annotations

import pytest

from moshpitd.daemon.choosing import (
    COPY_BYTES_PER_S,
    MARGIN,
    PAYS,
    PEERS_MAX,
    RAW_NAME,
    TOO_SLOW,
    UNMEASURED,
    Choices,
    Speeds,
    choose,
    group_codec,
)

MB, GB = 1e6, 1e9


@pytest.mark.parametrize(
    ("ratio", "speeds", "before", "codec", "reason"),
    [
        # Nothing is known: the smaller payload, because a slow line costs more than a slow encoder.
        (0.5, Speeds(None, None), "", "c", UNMEASURED),
        (0.5, Speeds(None, 1 * GB), RAW_NAME, "c", UNMEASURED),
        (0.5, Speeds(1 * GB, None), RAW_NAME, "c", UNMEASURED),
        # 100 Mbit/s: a line that any encoder outruns.
        (0.5, Speeds(12.5 * MB, 0.3 * GB), "", "c", PAYS),
        (0.25, Speeds(12.5 * MB, 0.05 * GB), "", "c", PAYS),
        # 10 Gbit/s and float16 at 6 GB/s pays, at 0.5 GB/s it does not.
        (0.5, Speeds(1.25 * GB, 6 * GB), "", "c", PAYS),
        (0.5, Speeds(1.25 * GB, 0.5 * GB), "", RAW_NAME, TOO_SLOW),
        # A codec that saves nothing cannot win; one that is as fast as raw is not slower.
        (1.0, Speeds(1 * GB, 4 * GB), "", RAW_NAME, TOO_SLOW),
        (1.0, Speeds(1 * GB, COPY_BYTES_PER_S), "", "c", PAYS),
        # The copy was measured, and this machine's memory is slow.
        (0.5, Speeds(1 * GB, 0.8 * GB), "", RAW_NAME, TOO_SLOW),
        (0.5, Speeds(1 * GB, 0.8 * GB, 1 * GB), "", "c", PAYS),
    ],
)
def test_the_choice(ratio: float, speeds: Speeds, before: str, codec: str, reason: str) -> None:
    made = choose("c", ratio, speeds, before)
    assert (made.codec, made.reason) == (codec, reason)
    assert made.detail


def test_raw_is_left_for_a_gain_and_entered_for_any() -> None:
    # raw takes 1 / 5e9 + 1 / 1e9 = 1.2 ns per byte; so much is left for encoding in as many.
    even = 1 / (1.2e-9 - 0.5e-9)
    slower = Speeds(1e9, even * 0.99)
    assert choose("c", 0.5, slower, "c").codec == RAW_NAME
    faster = Speeds(1e9, even * 1.01)
    assert choose("c", 0.5, faster, "c").codec == choose("c", 0.5, faster, "").codec == "c"
    assert choose("c", 0.5, faster, RAW_NAME).codec == RAW_NAME
    enough = Speeds(1e9, 1 / ((1 - MARGIN) * 1.2e-9 - 0.5e-9) * 1.01)
    assert choose("c", 0.5, enough, RAW_NAME).codec == "c"


def test_the_sentence_has_the_figures() -> None:
    made = choose("float16", 0.5, Speeds(12.5 * MB, 1 * GB))
    assert made.detail == (
        "link 12 MB/s, encoding 1000 MB/s: a GB of values takes 41.00 s as float16 and 80.20 s raw"
    )


def test_rates_follow_what_was_seen_last() -> None:
    choices = Choices()
    choices.encoded("c", 1000, 1.0)
    assert choices.make("p", "c", 0.5, link=100.0).codec == "c"
    for _ in range(600):  # the encoder became a thousand times slower
        choices.encoded("c", 1, 1.0)
    assert choices.make("p", "c", 0.5, link=100.0).codec == RAW_NAME
    assert choices.made()["p"].reason == TOO_SLOW
    for _ in range(600):  # and raw copies are what is slow now
        choices.encoded(RAW_NAME, 1, 10.0)
    assert choices.make("p", "c", 0.5, link=100.0).codec == "c"


def test_peers_are_kept_up_to_a_bound_the_latest_last() -> None:
    choices = Choices()
    for number in range(PEERS_MAX + 2):
        choices.make(f"p{number}", "c", 0.5, link=None)
    assert len(choices.made()) == PEERS_MAX
    assert list(choices.made())[-1] == f"p{PEERS_MAX + 1}"
    assert "p0" not in choices.made()


def test_a_group_is_told_a_codec_that_everybody_knows() -> None:
    assert group_codec("auto") == "float16"
    assert group_codec("int8") == "int8"
