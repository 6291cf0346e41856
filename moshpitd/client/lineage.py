"""What a trainer's parameters are: how many averages they contain, and which start they descend
from. One rule: it changes with a result that the model has taken in, and with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moshpitd.client.checks import check_version
from moshpitd.client.result import Result


@dataclass(frozen=True, slots=True)
class Lineage:
    """`founder` and `digest` (of the initial parameters) are empty while nobody has told us."""

    version: int = 0
    founder: str = ""
    digest: bytes = b""

    @classmethod
    def of_checkpoint(cls, state: Mapping[str, Any]) -> Lineage:
        """From what `as_dict` gave; TrainerError for a version that is none."""
        return cls(
            check_version(state.get("version", 0)),
            str(state.get("founder", "")),
            bytes.fromhex(state.get("founder_digest", "")),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain words and numbers, so that `torch.load(weights_only=True)` reads it."""
        return {
            "version": self.version,
            "founder": self.founder,
            "founder_digest": self.digest.hex(),
        }

    def after(self, result: Result) -> Lineage:
        """Of a model that has taken this result in."""
        # A sync that loaded nothing found the trainer current: that is an answer about it as well.
        current = result.status == "complete" and result.rounds == 0
        if not (result.applied or result.status == "alone" or current):
            return self
        named = result.founder != ""  # a daemon that knows of no lineage takes none away
        return Lineage(
            version=result.version,
            founder=result.founder if named else self.founder,
            digest=result.founder_digest if named else self.digest,
        )
