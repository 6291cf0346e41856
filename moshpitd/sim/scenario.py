"""Worlds that are written down: the tables of configs/sim/*.toml as Options. One rule: a key that
nobody knows, or a value of another kind, is refused with its name and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from moshpitd.core.params import Params
from moshpitd.errors import ConfigError
from moshpitd.sim.faults import Options, Resize, draw

Record = TypeVar("Record", Options, Params, Resize)

HERE = ("drawn", "params", "resizes")
"""Keys with a meaning of their own; all others are fields of Options."""


def scenario(table: Mapping[str, Any], *, seed: int) -> Options:
    """The world of that table and seed. With `drawn = true` the table changes what the seed draws,
    else what Options are by default."""
    peers, group = table.get("peers", 0), table.get("params", {}).get("max_group")
    options = Options(seed=seed)
    if _checked("drawn", table.get("drawn", False), bool):
        faults_s = float(table.get("faults_s", 60.0))
        options = draw(seed, peers=peers, max_group=group, faults_s=faults_s)
    plain = {key: value for key, value in table.items() if key not in HERE}
    options = _with(options, plain, "")
    params = _with(options.params, table.get("params", {}), "params.")
    params.check()
    resizes = tuple(
        _with(Resize(at_s=0.0, peers=1), entry, f"resizes[{number}].")
        for number, entry in enumerate(table.get("resizes", []))
    )
    options = replace(options, params=params, resizes=resizes)
    _check(options)
    return options


def _with(record: Record, table: Mapping[str, Any], prefix: str) -> Record:
    """The record with these fields changed."""
    known = [one.name for one in fields(record)]
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known or key == "seed":
            close = ", ".join(sorted(name for name in known if name[:3] == key[:3])) or "no such"
            raise ConfigError("unknown", key=prefix + key, expected=f"a field ({close})")
        now = getattr(record, key)
        if isinstance(now, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(now, tuple) and isinstance(value, list):
            value = tuple(value)
        changes[key] = _checked(prefix + key, value, type(now))
    return replace(record, **changes)


def _checked(key: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ConfigError(f"{value!r} is a {type(value).__name__}", key=key, expected=kind.__name__)
    return value


def _check(options: Options) -> None:
    """What no world can be run with."""
    for key, low, high in (
        ("peers", 1, 1_000_000),
        ("trainers", 1, options.params.max_trainers),
        ("parts", 1, options.params.max_parts),
        ("elements", 1, 1 << 20),
        ("rounds", 0, 8),
        ("goal", 0, 1_000),
        ("lone_calls", 0, 1_000),
        ("faults_s", 0.0, 1e9),
        ("rate_mbps", 1e-3, 1e9),
        ("clock_rate", 0.0, 0.5),
    ):
        if not low <= getattr(options, key) <= high:
            raise ConfigError(
                f"{getattr(options, key)} is out of range", key=key, expected=f"{low}..{high}"
            )
    last = 0.0
    for number, resize in enumerate(options.resizes):
        if resize.peers < 1 or resize.over_s <= 0.0 or resize.at_s < last:
            raise ConfigError(
                f"{resize} cannot be", key=f"resizes[{number}]",
                expected="peers of at least 1, over_s above 0, in order of at_s",
            )  # fmt: skip
        last = resize.at_s + resize.over_s
