"""The operator's topology file (`averaging.topology_file`), as a `core.graph.PeerGraph`.

    edges = [["berlin", "paris"], ["paris", "oslo"]]     # or [..., 0.25]: the share that crosses it
    # directed = true                                    # edges are [from, to], for push-sum
    [peers]
    berlin = "12D3KooW..."                               # PeerIDs, from `moshpitd status`
    paris = "12D3KooW..."
    oslo = "12D3KooW..."

Without shares they are those of Metropolis and Hastings, which every connected graph has. In the
place of `edges` there may be a `matrix`, a row per peer in the order of `[peers]`: what it takes of
each. One rule: a file that cannot mix is refused here, by file and key, with what was expected.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moshpitd.core.graph import PeerGraph
from moshpitd.core.topologies import OwnTopology
from moshpitd.daemon.addresses import is_peer_id
from moshpitd.errors import ConfigError

SUM = 1e-6
"""What a row or column of a matrix may be off by: people write thirds with seven digits."""
KEYS = ("peers", "edges", "matrix", "directed")
Shares = dict[tuple[int, int], float]


def read_topology(path: Path, *, max_peers: int) -> PeerGraph:
    """Raises `ConfigError`. `max_peers`: of a group, because an exchange is inside one."""
    try:
        found = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise ConfigError(reason, file=str(path), expected="a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(error), file=str(path), expected="TOML") from None
    try:
        return _graph(found, max_peers)
    except ConfigError as error:
        raise ConfigError(
            error.message, file=str(path), key=error.key, expected=error.expected
        ) from None


def _graph(found: Mapping[str, Any], max_peers: int) -> PeerGraph:
    for key in found:
        if key not in KEYS:
            raise ConfigError("is no key of a topology", key=key, expected=", ".join(KEYS))
    names = _peers(found.get("peers"), max_peers)
    directed = found.get("directed", False)
    if not isinstance(directed, bool):
        raise ConfigError(f"{directed!r:.80} is refused", key="directed", expected="true or false")
    if ("edges" in found) == ("matrix" in found):
        both = "both are here" if "edges" in found else "neither is here"
        raise ConfigError(both, key="edges, matrix", expected="one of the two")
    words = list(names)
    if "matrix" in found:
        shares, weighted = _matrix(found["matrix"], words, directed=directed), True
        if len(words) == 1:
            weighted = False
    else:
        shares, weighted = _edges(found["edges"], words, directed=directed)
    key = "matrix" if "matrix" in found else "edges"
    try:
        topology = OwnTopology(
            len(words), tuple(shares), directed, tuple(shares.values()) if weighted else ()
        )
    except ConfigError as error:
        raise ConfigError(
            _with_names(error.message, words), key=key, expected=error.expected
        ) from None
    return PeerGraph(tuple(names.values()), topology)


def _peers(given: object, max_peers: int) -> dict[str, str]:
    if not isinstance(given, dict) or not given:
        raise ConfigError("names nobody", key="peers", expected='a table of name = "PeerID"')
    if len(given) > max_peers:
        raise ConfigError(
            f"{len(given)} peers",
            key="peers",
            expected=f"at most averaging.max_group = {max_peers}: an exchange is inside one group",
        )
    seen: dict[str, str] = {}
    for name, peer_id in given.items():
        if not isinstance(peer_id, str) or not is_peer_id(peer_id):
            raise ConfigError(
                f"{peer_id!r:.80} is no PeerID", key=f"peers.{name}", expected="12D3KooW..."
            )
        if peer_id in seen:
            raise ConfigError(
                f"is the PeerID of {seen[peer_id]} too", key=f"peers.{name}", expected="another"
            )
        seen[peer_id] = name
    return dict(given)


def _edges(given: object, words: list[str], *, directed: bool) -> tuple[Shares, bool]:
    if not isinstance(given, list):
        raise ConfigError(f"{given!r:.80} is refused", key="edges", expected="a list of pairs")
    shares: Shares = {}
    weighted = 0
    for index, edge in enumerate(given):
        key = f"edges[{index}]"
        if not isinstance(edge, list) or len(edge) not in (2, 3):
            raise ConfigError(
                f"{edge!r:.80} is refused", key=key, expected='["peer", "peer"], or with a share'
            )
        for word in edge[:2]:
            if word not in words:
                raise ConfigError(
                    f"{word!r:.80} is unknown",
                    key=key,
                    expected=f"a name of [peers]: {_some(words)}",
                )
        one, other = words.index(edge[0]), words.index(edge[1])
        pair = (one, other) if directed else (min(one, other), max(one, other))
        if one == other or pair in shares:
            raise ConfigError(
                f"{edge!r:.80} is here before, or joins a peer to itself", key=key,
                expected="each pair of peers once; what a peer keeps is what is left",
            )  # fmt: skip
        shares[pair] = _share(edge[2], key) if len(edge) == 3 else 0.0
        weighted += len(edge) == 3
    if weighted not in (0, len(given)):
        raise ConfigError(
            f"{weighted} of {len(given)} have a share", key="edges", expected="all of them, or none"
        )
    return shares, weighted > 0


def _matrix(given: object, words: list[str], *, directed: bool) -> Shares:
    size = len(words)
    whole = (
        isinstance(given, list)
        and len(given) == size
        and all(isinstance(row, list) and len(row) == size for row in given)
    )
    if not whole or not isinstance(given, list):
        raise ConfigError(
            "has another shape", key="matrix", expected=f"{size} rows of {size}, one per peer"
        )
    matrix = [
        [_number(value, f"matrix[{i}][{j}]") for j, value in enumerate(row)]
        for i, row in enumerate(given)
    ]
    for index, word in enumerate(words):
        column = math.fsum(row[index] for row in matrix)
        row = math.fsum(matrix[index])
        for what, total in (("column", column), ("row", row)):
            if abs(total - 1.0) > SUM and not (directed and what == "row"):
                raise ConfigError(
                    f"the {what} of {word} sums to {total:.6g}", key="matrix",
                    expected="columns that sum to 1" if directed
                    else "a doubly stochastic matrix: rows and columns that sum to 1",
                )  # fmt: skip
    shares: Shares = {}
    for target in range(size):
        for source in range(size):
            value = matrix[target][source]
            if not directed and abs(value - matrix[source][target]) > SUM:
                raise ConfigError(
                    f"{words[target]} takes {value:g} of {words[source]}, which takes "
                    f"{matrix[source][target]:g} of it", key="matrix",
                    expected="the same both ways, or it is not doubly stochastic once a peer is "
                    "away; or directed = true, for push-sum",
                )  # fmt: skip
            if value and source != target and (directed or source < target):
                shares[source, target] = value
    return shares


def _share(value: object, key: str) -> float:
    number = _number(value, key)
    if not 0.0 < number <= 1.0:
        raise ConfigError(f"the share {number:g}", key=key, expected="above 0, and at most 1")
    return number


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{value!r:.80} is refused", key=key, expected="a number")
    if value < 0:
        raise ConfigError(f"{value:g} is negative", key=key, expected="a share of 0 or more")
    return float(value)


def _with_names(message: str, words: list[str]) -> str:
    """`core` knows peers by number: behind `peer`, `to` and `from`, and in `edge A B`."""
    found, counting = [], 0
    for word in message.split():
        if counting and word.isdigit():
            found.append(words[int(word)])
            counting -= 1
            continue
        counting = {"edge": 2, "peer": 1, "to": 1, "from": 1}.get(word, 0)
        found.append(word)
    return " ".join(found)


def _some(words: list[str]) -> str:
    return ", ".join(words[:8]) + (" ..." if len(words) > 8 else "")
