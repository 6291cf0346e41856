"""Every bound, timeout and default of the protocol, in one frozen record. One rule: a number
without a unit, a reason and a bound does not get in."""

from __future__ import annotations

from dataclasses import dataclass, fields

from moshpitd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Params:
    """What one run agrees on. Durations are seconds, sizes bytes, counts plain.

    Invariant: timeouts nest strictly (`check`): an inner wait always ends before the outer one that
    depends on it, otherwise the outer one would blame a peer that was still within its rights.
    """

    max_group: int = 16
    """Largest group. Every member talks to every other: 16 is 120 links, and one round is exact up
    to 16 peers."""
    grid_sides: tuple[int, ...] = ()
    """Pinned grid, e.g. (32, 32); empty = derived from the number of peers heard."""
    window_s: float = 5.0
    """How long a leader waits for peers that are alive but not ready. Covers step-time spread of
    uneven machines."""
    answer_timeout_s: float = 2.0
    """A peer that has not answered a Join or Invite by then counts as unreachable: 10x a slow
    intercontinental round trip."""
    settle_s: float = 0.1
    """Least time a leader listens after its look-up: peers that announced during it cannot be in
    its answer."""
    attempt_timeout_s: float = 15.0
    """Hard end of matchmaking: a window, a lost leader, and a second window's worth of trying
    again."""
    local_window_s: float = 1.0
    """Trainers of one node that contribute within it of the first go to the swarm as one
    contribution."""
    silence_min_s: float = 1.2
    """Least time without a byte from a peer, although its link is pinged, before it counts as dead.
    A daemon on a loaded machine stalls for some 0.1 s; half the bar for a frozen peer in a round of
    1.2 s."""
    part_timeout_s: float = 10.0
    """A sender from which nothing arrived for so long is left out of the parts it has not finished.
    One whose link is heard may be sending, and is left out when it is too slow (`slow_ratio`), at
    the latest half as long again after its last part."""
    slow_ratio: float = 3.0
    """A member that needs so many times what most others need for the whole round to deliver its
    contribution (and longer than silence would be borne) is slow: told so twice in a row it offers
    fewer parts, and at `part_timeout_s` beyond the others it is left out of those that it has not
    delivered. Three: a link at a quarter of the others' rate is waited for, one at a tenth is not,
    because who reduces carries up to twice what who does not has to. 1e6 waits for everybody."""
    result_timeout_s: float = 25.0
    """A reducer that delivers nothing for so long is given up; it may itself be waiting for a
    silent sender."""
    parity_timeout_s: float = 2.0
    """Bound on waiting for the members' last messages; by then all results are here, only the
    comparison is late."""
    audit_fraction: float = 0.0
    """Share of the parts that a second member reduces too and compares (0..1). Off by default: it
    keeps a copy of every contribution and costs that share of another exchange; for swarms that
    cannot trust each other."""
    round_timeout_s: float = 600.0
    """Hard end of one exchange, whatever progress it makes: 100 GB at 1.4 Gb/s."""
    found_fresh_s: float = 10.0
    """A directory answer younger than this is not asked for again: one look-up costs 23 ms on
    loopback, seconds abroad."""
    heard_fresh_s: float = 600.0
    """A peer not heard of for so long is forgotten. Twice the directory's ttl, so one missed
    announcement is survived."""
    ttl_s: float = 300.0
    """Lifetime of a directory record (at least 240: clocks and DHT replication need slack);
    announced every third of it."""
    refresh_s: float = 15.0
    """How often the list of the run's peers is looked up while a trainer is attached."""
    snapshot_timeout_s: float = 30.0
    """A snapshot that makes no progress for so long is given up and the next donor asked."""
    snapshot_slots: int = 4
    """Newcomers served at once by one donor; more would starve its own rounds."""
    max_version_lag: int = 8
    """Further behind the median heard than this and a peer takes a snapshot; further ahead and the
    claim is refused."""
    max_weight: int = 1 << 32
    """Largest weight of one contribution: 4e9 samples since the last average is a mistake, not a
    trainer."""
    max_weight_ratio: float = 1e6
    """Largest weight relative to the group's median; one peer must not be able to overwrite
    everybody."""
    max_norm_ratio: float = 1e6
    """Largest norm of a contribution, part by part, relative to the median norm of the group's
    members; one peer must not be able to overwrite everybody. Swarms that know how alike their
    peers are (parameters: within 2) set it far lower."""
    max_candidates: int = 256
    """Peers remembered per run for meeting: 16 groups' worth, 64 KiB of records."""
    max_parts: int = 1 << 20
    """Parts of a bucket: 4 TiB at 4 MiB, which a large model has by default."""
    max_trainers: int = 64
    """Trainers of one run on one node."""
    max_state_bytes: int = 64 << 20
    """Opaque trainer state inside a snapshot (optimizer scalars, scheduler, step)."""
    max_strikes: float = 3.0
    """Strikes (halving every `strike_half_life_s`) after which a peer is not grouped with."""
    strike_half_life_s: float = 600.0
    """A mistake of ten minutes ago counts half: a repaired peer comes back within the hour."""

    def check(self) -> None:
        """Raise `ConfigError` for the first value out of range or the first pair of timeouts that
        does not nest."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_s", "_bytes", "_ratio")) and not 0 < value < 1e13:
                raise ConfigError(
                    f"{value} is out of range", key=field.name, expected="a positive number"
                )
        for key, low, high in (
            ("ttl_s", 240.0, 86_400.0),  # clocks and DHT replication need that much slack
            ("slow_ratio", 1.5, 1e6),  # below it the spread of like peers is lateness
            ("max_parts", 1, 1 << 24),
            ("audit_fraction", 0.0, 1.0),
            ("max_weight", 1, 1 << 53),  # beyond it a float64 no longer holds every integer
            ("max_strikes", 1.0, 1e6),
            ("max_group", 2, 64),
            ("snapshot_slots", 1, 64),
            ("max_version_lag", 1, 1 << 20),
            ("max_candidates", 2, 1 << 16),
            ("max_trainers", 1, 1 << 10),
        ):
            if not low <= getattr(self, key) <= high:
                raise ConfigError(
                    f"{getattr(self, key)} is out of range", key=key, expected=f"{low}..{high}"
                )
        if self.grid_sides and not all(1 <= side <= self.max_group for side in self.grid_sides):
            raise ConfigError(
                f"{self.grid_sides} has a side over max_group",
                key="grid_sides",
                expected=f"1..{self.max_group} each",
            )
        for inner, outer in (
            ("settle_s", "window_s"),
            ("answer_timeout_s", "window_s"),
            ("window_s", "attempt_timeout_s"),
            ("silence_min_s", "part_timeout_s"),
            ("part_timeout_s", "result_timeout_s"),
            ("result_timeout_s", "round_timeout_s"),
            ("parity_timeout_s", "round_timeout_s"),
            ("found_fresh_s", "ttl_s"),
            ("refresh_s", "ttl_s"),
        ):
            if not getattr(self, inner) < getattr(self, outer):
                raise ConfigError(
                    f"{getattr(self, inner)} does not nest inside {outer} = {getattr(self, outer)}",
                    key=inner,
                    expected=f"less than {outer}",
                )
