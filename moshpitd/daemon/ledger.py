"""What this member promised and holds, part by part, in one round. One rule: epochs never fall.

(part, epoch) names exactly one reducer (`core.succession`). Whoever takes a part over asks for a
promise first, which arrives here as a bar: from then on nothing of a lower epoch touches the part.
What is in place gives way to a higher epoch only, or to what the core itself asked another member
to hand over (`expect`), and that may not be of a lower epoch either: a promise was made about it.

Nothing here locks: calls about one part come under that part's lock. `expect` comes from the
daemon's loop and touches one set, which is safe by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView

from moshpitd.core.messages import Held
from moshpitd.core.succession import Succession

AHEAD = "ahead"  # of our bar: the frame waits until the core says Bar


class Ledger:
    """Invariant: a part's bar and the epoch of what is in place only rise."""

    def __init__(self, succession: Succession, index: int) -> None:
        self._succession = succession
        self._index = index
        self._bars: dict[int, int] = {}
        self._held: dict[int, Held] = {}
        self._shut: dict[int, int] = {}  # part -> highest epoch in which we closed it as reducer
        # part -> contributions looked at; there is one epoch of a part in which we reduce it
        self._looked: dict[int, int] = {}
        self._results: set[tuple[int, int, int]] = set()  # (sender, part, epoch) looked at
        self._expected: set[tuple[int, int, int]] = set()  # the same, asked for by our core

    # -- what is asked

    def bar(self, part: int) -> int:
        return self._bars.get(part, 0)

    def held(self, part: int) -> Held | None:
        """What is in place."""
        return self._held.get(part)

    def reducer(self, part: int, epoch: int) -> int:
        """Who reduces a part in this epoch."""
        return self._succession.reducer(part, epoch)

    def is_open(self, part: int, epoch: int) -> bool:
        """Whether a contribution in this epoch may still get into an average of ours."""
        held = self._held.get(part)
        return (
            epoch == self.bar(part)
            and self._shut.get(part, -1) < epoch
            and (held is None or held.epoch < epoch)
        )

    def may_place(self, part: int, epoch: int, *, expected: bool = False) -> bool:
        """Whether a result of this epoch may go into the bucket now."""
        held = self._held.get(part)
        if epoch < self.bar(part):
            return False
        return held is None or held.epoch < epoch or (expected and held.epoch == epoch)

    # -- frames: None lets one pass to the decoder, a word says why not

    def contribution(self, part: int, epoch: int, sender: int) -> str | None:
        """A contribution is here; it is looked at once, whatever is found in it."""
        if self._succession.reducer(part, epoch) != self._index or sender == self._index:
            return "wrong_reducer"
        bar = self.bar(part)
        if epoch > bar:
            # Not raised by a stranger's word: one lying member could else bar all of our parts.
            return AHEAD
        if epoch < bar:
            return "below_bar"
        if not self.is_open(part, epoch):
            return "part_closed"
        mask = self._looked.get(part, 0)
        if mask >> sender & 1:
            return "repeated"
        self._looked[part] = mask | 1 << sender
        return None

    def result(self, part: int, epoch: int, sender: int) -> tuple[str | None, bool]:
        """A result is here: (why it is dropped, whether our core asked its sender for it)."""
        key = (sender, part, epoch)
        expected = key in self._expected
        if not expected and (
            self._succession.reducer(part, epoch) != sender or sender == self._index
        ):
            return "wrong_reducer", False
        if epoch < self.bar(part):
            return "below_bar", expected
        if not self.may_place(part, epoch, expected=expected):
            return "part_closed", expected
        if expected:
            self._expected.discard(key)  # whatever is found in it: asked once, answered once
        elif key in self._results:
            return "repeated", False
        self._results.add(key)
        return None, expected

    # -- what happens

    def expect(self, sender: int, parts: Iterable[int], epoch: int) -> None:
        """Our core asked this member to hand these parts over."""
        self._expected.update((sender, part, epoch) for part in parts)

    def raise_bar(self, part: int, epoch: int) -> bool:
        """False: it is higher already."""
        if epoch < self.bar(part):
            return False
        if epoch:
            self._bars[part] = epoch
        return True

    def shut(self, part: int, epoch: int) -> bool:
        """We close a part as its reducer in this epoch; False: that may not happen (any more)."""
        held = self._held.get(part)
        if self._shut.get(part, -1) >= epoch or (held is not None and held.epoch >= epoch):
            return False
        if not self.raise_bar(part, epoch):
            return False
        self._shut[part] = epoch
        return True

    def place(self, held: Held) -> None:
        """A result is in the bucket now."""
        self._held[held.part] = held

    def parts_held(self) -> KeysView[int]:
        return self._held.keys()
