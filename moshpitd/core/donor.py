"""The giving side of a snapshot: who gets our state, how many at once, and what we say its digest
is.

One rule: what is offered is the last finished result and nothing newer, under the digest that its
bytes have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moshpitd.core.effects import Digest, Effect, Note, PushSnapshot, Send
from moshpitd.core.messages import (
    DigestQuery,
    DigestReply,
    Lineage,
    SnapshotOffer,
    SnapshotRefused,
    SnapshotRequest,
)
from moshpitd.core.outcome import Reason
from moshpitd.core.params import Params

DIGESTS_KEPT = 4
"""Versions whose digest is remembered: a witness may be asked about a version it has just left."""


@dataclass(slots=True)
class Donor:
    """Invariant: `version` is that of the donor copy outside, None while there is none."""

    params: Params
    part_count: int = 0
    version: int | None = None
    state_bytes: int = 0
    witnesses: tuple[str, ...] = ()
    digests: dict[int, bytes] = field(default_factory=dict)
    serving: dict[bytes, tuple[str, float]] = field(
        default_factory=dict
    )  # nonce -> (newcomer, until)
    asked: list[tuple[str, SnapshotRequest]] = field(default_factory=list)  # wait for a digest
    queries: list[tuple[str, DigestQuery]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    def holds(self, version: int, witnesses: tuple[str, ...], digest: bytes = b"") -> None:
        """The donor copy is of `version`."""
        self.version, self.witnesses = version, witnesses
        if digest:
            self._remember(version, digest)

    def request(
        self,
        sender: str,
        message: SnapshotRequest,
        *,
        lineage: Lineage,
        refuse: Reason | None,
        now: float,
    ) -> None:
        self.serving = {nonce: it for nonce, it in self.serving.items() if it[1] > now}
        if message.nonce in self.serving or any(
            one.nonce == message.nonce for _, one in self.asked
        ):
            return  # the same question twice
        if refuse is None and self.version is None:
            refuse = Reason.NO_SNAPSHOT
        if refuse is None and len(self.serving) + len(self.asked) >= self.params.snapshot_slots:
            refuse = Reason.BUSY
        if refuse is not None:
            self.effects.append(Send(sender, SnapshotRefused(message.nonce, refuse)))
            return
        assert self.version is not None
        digest = self.digests.get(self.version)
        if digest is None:
            self.asked.append((sender, message))
            self.effects.append(Digest(self.version))
            return
        self._serve(sender, message, digest, lineage, now)

    def query(self, sender: str, message: DigestQuery) -> None:
        digest = self.digests.get(message.version)
        if (
            digest is None
            and message.version == self.version
            and len(self.queries) < self.params.max_group
        ):
            self.queries.append((sender, message))
            self.effects.append(Digest(message.version))
            return
        self.effects.append(
            Send(sender, DigestReply(message.nonce, message.version, digest or b""))
        )

    def digested(self, version: int, digest: bytes, lineage: Lineage, now: float) -> None:
        if digest:
            self._remember(version, digest)
        queries, self.queries = self.queries, []
        for sender, query in queries:
            known = self.digests.get(query.version, b"")
            self.effects.append(Send(sender, DigestReply(query.nonce, query.version, known)))
        asked, self.asked = self.asked, []
        for sender, request in asked:
            if self.version is None or self.version not in self.digests:
                self.effects.append(Send(sender, SnapshotRefused(request.nonce, Reason.SUPERSEDED)))
            else:
                self._serve(sender, request, self.digests[self.version], lineage, now)

    def sent(self, nonce: bytes) -> None:
        served = self.serving.pop(nonce, None)
        if served is not None:
            self.effects.append(Note("snapshot_served", served[0]))

    def failed(self, nonce: bytes) -> None:
        self.serving.pop(nonce, None)

    def _serve(
        self, sender: str, message: SnapshotRequest, digest: bytes, lineage: Lineage, now: float
    ) -> None:
        assert self.version is not None
        self.serving[message.nonce] = (sender, now + self.params.round_timeout_s)
        offer = SnapshotOffer(
            nonce=message.nonce,
            version=self.version,
            lineage=lineage,
            digest=digest,
            parts=self.part_count,
            state_bytes=self.state_bytes,
            witnesses=self.witnesses,
        )
        self.effects.append(Send(sender, offer))
        self.effects.append(PushSnapshot(message.nonce, sender, message.record.addresses))

    def _remember(self, version: int, digest: bytes) -> None:
        self.digests.pop(version, None)
        self.digests[version] = digest
        while len(self.digests) > DIGESTS_KEPT:
            del self.digests[next(iter(self.digests))]
