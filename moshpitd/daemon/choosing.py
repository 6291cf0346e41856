"""Raw or coded, link by link: how contributions travel where a run's codec is "auto". One rule:
never slower than raw.

A writer thread encodes a part and then sends it, so the seconds of both add up. Per byte of values:

    coded   1 / encode rate + (payload bytes / value bytes) / link rate
    raw     1 / copy rate   + 1 / link rate

All rates are measured where the work is done, beside everything else that the machine does. What a
link takes is timed around the calls that send, not around a round: else a slow codec would make its
own link look slow, and defend itself. Results go to all members over links of any kind and are
encoded once; their codec is that of the group, and everybody knows it from Begin.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

AUTO = "auto"
AUTO_RESULTS = "float16"
"""The group's codec of a run that says "auto": the one that parameters may travel with and that
costs the least to encode (6 GB/s and more on one core)."""
RAW_NAME = "float32"

# Until it is measured: a copy out of memory that no cache holds (DESIGN 11 has 8.6 GB/s).
COPY_BYTES_PER_S = 5e9
# What coding has to gain before raw is left again, or noise would change it with every push. The
# other way round there is none: a codec that is slower goes at once.
MARGIN = 0.05
# Weight that what was seen before keeps at each part: the last fifty or so count.
MEMORY = 0.98
# Peers whose choice is kept: more than any group has.
PEERS_MAX = 256

UNMEASURED, PAYS, TOO_SLOW = "unmeasured", "coding_pays", "raw_is_faster"
REASONS = (UNMEASURED, PAYS, TOO_SLOW)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second: of the link as it takes payloads, of values that are encoded, and of values
    that are only copied. None: not measured yet."""

    link: float | None
    coded: float | None
    raw: float | None = None


class Choice(NamedTuple):
    """A codec's name, one of REASONS, and the sentence with the figures."""

    codec: str
    reason: str
    detail: str


def choose(codec: str, ratio: float, speeds: Speeds, before: str = "") -> Choice:
    """`ratio`: payload bytes per byte of values. `before` is the codec of the last choice."""
    if speeds.link is None or speeds.coded is None:
        missing = "the link's rate" if speeds.link is None else "the encoder's rate"
        return Choice(codec, UNMEASURED, f"{missing} is not measured yet")
    coded_s = 1 / speeds.coded + ratio / speeds.link
    raw_s = 1 / (speeds.raw or COPY_BYTES_PER_S) + 1 / speeds.link
    words = (
        f"link {speeds.link / 1e6:.0f} MB/s, encoding {speeds.coded / 1e6:.0f} MB/s: a GB of "
        f"values takes {coded_s * 1e9:.2f} s as {codec} and {raw_s * 1e9:.2f} s raw"
    )
    needed = 1 - MARGIN if before == RAW_NAME else 1.0
    if coded_s <= needed * raw_s:
        return Choice(codec, PAYS, words)
    return Choice(RAW_NAME, TOO_SLOW, words)


class Choices:
    """The choices of one run, by peer. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[str, tuple[float, float]] = {}  # codec -> (bytes of values, seconds)
        self._made: OrderedDict[str, Choice] = OrderedDict()

    def encoded(self, codec: str, nbytes: int, seconds: float) -> None:
        """So many bytes of values were encoded (or copied, under RAW_NAME)."""
        with self._lock:
            count, spent = self._spent.get(codec, (0.0, 0.0))
            self._spent[codec] = (count * MEMORY + nbytes, spent * MEMORY + seconds)

    def make(self, peer_id: str, codec: str, ratio: float, *, link: float | None) -> Choice:
        """How the next push to this peer travels; `link` in bytes per second."""
        with self._lock:
            before = self._made.pop(peer_id, None)
            speeds = Speeds(link, self._rate(codec), self._rate(RAW_NAME))
            made = choose(codec, ratio, speeds, before.codec if before is not None else "")
            self._made[peer_id] = made
            while len(self._made) > PEERS_MAX:
                self._made.popitem(last=False)
            return made

    def made(self) -> dict[str, Choice]:
        """The last choice by peer."""
        with self._lock:
            return dict(self._made)

    def _rate(self, codec: str) -> float | None:
        count, spent = self._spent.get(codec, (0.0, 0.0))
        return count / spent if spent > 0 else None


def group_codec(codec: str) -> str:
    """What a group is told that its values travel with."""
    return AUTO_RESULTS if codec == AUTO else codec
