"""How fast codecs are: encode, decode, and decode + add, in GB/s of float32 on one thread.

One rule: two figures, because either alone misleads. "slices" works on one slice of 512 KiB again
and again, so that it measures the arithmetic; the bars are about that. "memory" goes through 64 MiB
of values and of sums, part by part, as a round does; it cannot be faster than the memory is, which
on a shared machine depends on the neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moshpitd.tensors.codecs import CODECS, Codec
from moshpitd.tensors.slices import SLICE_BYTES

# How many values a call has, and how many such a pass goes through.
PLACES = {"slices": (SLICE_BYTES // 4, 1), "memory": ((1 << 20) // 4, 64)}
PASS_VALUES = 1 << 24  # about 10 ms a pass
# What the data path needs of the codecs that carry parameters, so that the wire is the limit.
BARS = {"int8": {"encode": 2.0, "decode_add": 8.0}, "float16": {"encode": 6.0, "decode_add": 8.0}}
VERBS = ("encode", "decode", "decode_add")
FORMULAS = {
    "float32": "4 * d",
    "float16": "2 * d + 4 * up(d / 131072)",
    "bfloat16": "2 * d + 4 * up(d / 131072)",
    "int8": "d + 4 * up(d / 1024)",
    "int4": "up(d / 2) + 4 * up(d / 64)",
    "minmax-uint8": "d + 8 * up(d / 1024)",
    "bagua-minmax-uint8": "d + 32",
    "qsgd": "d + 4 * up(d / 512)",
    "nuqsgd": "up(d / 2) + 4 * up(d / 8192)",
    "natural": "d + up(d / 8)",
    "top-k": "8 * up(d / 100)",
    "rand-k": "8 + 4 * up(d / 100)",
    "sign-l1": "4 + up(d / 8)",
    "sign-rms": "4 + up(d / 8)",
}
"""Payload bytes for d values, `up` rounding up; a test compares with every codec."""


class Bench:
    """One codec over `count` parts. Invariant: every pass is over as many values."""

    def __init__(self, codec: Codec, numel: int, count: int) -> None:
        source = torch.Generator().manual_seed(0)
        self._codec = codec
        self._parts = torch.randn(count, numel, generator=source).unbind()
        size = codec.payload_bytes(numel, "float32")
        self._payloads = torch.empty(count, size, dtype=torch.uint8).unbind()
        self._sums = torch.zeros(count, numel).unbind()
        self._decoded = torch.empty(numel)
        self._turns = [i % count for i in range(PASS_VALUES // numel)]
        self.bits_per_value = 8 * size / numel

    def encode(self) -> None:
        for i in self._turns:
            self._codec.encode(self._parts[i], self._payloads[i], seed=i)

    def decode(self) -> None:
        for i in self._turns:
            self._codec.decode(self._payloads[i], self._decoded)

    def decode_add(self) -> None:
        for i in self._turns:
            self._codec.decode(self._payloads[i], self._decoded)
            self._sums[i].add_(self._decoded)


def rate(act: Callable[[], None], passes: int) -> dict[str, float]:
    """GB/s of float32: median, slowest and fastest pass, after one that warms up."""
    act()
    found = []
    for _ in range(passes):
        began = time.perf_counter()
        act()
        found.append(PASS_VALUES * 4 / (time.perf_counter() - began) / 1e9)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def measure(names: Sequence[str], passes: int) -> list[dict[str, Any]]:
    results = []
    for name in names:
        entry: dict[str, Any] = {"codec": name, "formula": FORMULAS.get(name, "")}
        for place, (numel, count) in PLACES.items():
            bench = Bench(CODECS[name], numel, count)
            entry[place] = {f"{verb}_gbps": rate(getattr(bench, verb), passes) for verb in VERBS}
            entry["bits_per_value"] = bench.bits_per_value
        # The fastest pass counts: on a shared machine the others measure the neighbours.
        entry["bars"] = {
            verb: {"at_least": bar, "met": entry["slices"][f"{verb}_gbps"]["max"] >= bar}
            for verb, bar in BARS.get(name, {}).items()
        }
        results.append(entry)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--codec", choices=list(CODECS), action="append", help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.codec or list(CODECS)
    report = {"threads": 1, "load": os.getloadavg()[0], "results": measure(names, options.passes)}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
