"""An operator's own topology: who mixes with whom, by PeerID. One rule: the matrix is fixed for all
peers it names; a round mixes those that are present, and what one would give to the absent it
keeps.

So the mixing of a round is that of the file `without` who is not there: on undirected graphs doubly
stochastic whoever comes and goes, on directed ones column-stochastic, for push-sum. The file is
read by `daemon.topology_file`; here are plain values, equal on all peers that were given one file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moshpitd.core.mixing import EdgeMixing
from moshpitd.core.topologies import OwnTopology

OWN = "own"
"""What trainers call it, beside the names of `topologies`."""
DIGEST_BYTES = 8  # told to people and mixed into a schema, whose own digest is what is compared


@dataclass(frozen=True, slots=True)
class PeerGraph:
    """A `MixingSchedule` over `names`, PeerIDs in the order of the file. Invariant: the topology
    has as many peers, and nobody is named twice."""

    names: tuple[str, ...]
    topology: OwnTopology

    @property
    def peers(self) -> int:
        return len(self.names)

    def sample(self, t: int, dead: Collection[int] = ()) -> EdgeMixing:
        return self.topology.sample(t, dead)

    @property
    def digest(self) -> str:
        """The same for all who mean the same matrix, in whatever order their files name peers."""
        edges = sorted(
            (self.names[edge.source], self.names[edge.target], edge.weight)
            for edge in self.sample(0).edges
        )
        text = f"{sorted(self.names)} {edges}"
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()

    @property
    def most_neighbours(self) -> int:
        """How many messages any of them may have to take in one round."""
        taken = [0] * self.peers
        for edge in self.sample(0).edges:
            taken[edge.target] += 1
        return max(taken)

    def rows(self, members: Sequence[str]) -> list[dict[int, float]]:
        """The matrix among `members`, by their index; who is not in the file keeps its value."""
        place = {name: index for index, name in enumerate(members)}
        at = [place.get(name) for name in self.names]
        absent = [peer for peer, index in enumerate(at) if index is None]
        rows: list[dict[int, float]] = [{index: 1.0} for index in range(len(members))]
        for target, row in zip(at, self.sample(0, absent).rows(), strict=True):
            if target is not None:
                found = ((at[source], share) for source, share in row.items())
                rows[target] = {source: share for source, share in found if source is not None}
        return rows

    def partners(self, me: str, present: Collection[str]) -> list[str]:
        """Whom we may meet as the active one of two: neighbours that are there, at an even distance
        from the first peer while ours is odd.

        Every edge by which a peer was first reached joins an odd and an even distance, so
        parameters get from anybody to anybody, which ranks in a list would not promise on a star.
        """
        distance = self._distances()
        if me not in self.names or distance[self.names.index(me)] % 2 == 0:
            return []
        ours = self.names.index(me)
        found = {
            self.names[edge.target]
            for edge in self.sample(0).edges
            if edge.source == ours and distance[edge.target] % 2 == 0
        }
        return sorted(found.intersection(present))

    def _distances(self) -> list[int]:
        ways: list[set[int]] = [set() for _ in self.names]
        for source, target, _ in self.sample(0).edges:
            ways[source].add(target)
            ways[target].add(source)
        found = [-1] * self.peers
        found[0], front = 0, [0]
        for peer in front:  # grows: breadth first
            for other in sorted(ways[peer]):
                if found[other] < 0:
                    found[other] = found[peer] + 1
                    front.append(other)
        return found
