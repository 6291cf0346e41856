"""What the demo shows while it runs, and the tables at its end.

One rule: on a terminal a table that moves, without one plain lines, and the same words in both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moshpitd.cli.demo_story import Story
from moshpitd.cli.demo_verdict import Check
from moshpitd.cli.output import size, table, text

LINE_EVERY_S = 5.0  # plain lines: a log of two minutes stays readable
STYLES = {"killed": "bold red", "restarting": "yellow", "training": "green", "done": "bold green"}


class Screen:
    """Invariant: `say` and `show` may be called at any time between enter and exit."""

    def __init__(self, console: Console, stories: Sequence[Story]) -> None:
        self._console, self._stories = console, stories
        self._began = time.monotonic()
        self.waiting = ""
        self._said_at = 0.0
        self._said: dict[int, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, words: str, style: str = "") -> None:
        """An event: a line that stays."""
        self._console.print(text(f"{self.seconds:6.1f} s  {words}", style))

    def doing(self, words: str) -> None:
        """What is being waited for now."""
        if words != self.waiting:
            self.waiting = words
            if self._live is None:
                self.say(words)
        self.show()

    def show(self) -> None:
        if self._live is not None:
            footer = Text(f"\n{self.seconds:6.1f} s  {self.waiting}", style="dim")
            self._live.update(Group(peers_table(self._stories), footer))
        elif self.seconds - self._said_at >= LINE_EVERY_S:
            self._said_at = self.seconds
            for index, story in enumerate(self._stories):
                words = f"peer {index}: {_sentence(story)}"
                if words != self._said.get(index) and story.rounds:
                    self._said[index] = words
                    self.say(words)

    def tail(self, log: Path, lines: Sequence[str]) -> None:
        """The end of a log that may tell why it failed."""
        self._console.print(text(f"--- {log}", "bold"))
        for line in lines:
            self._console.print(text(line), soft_wrap=True)


def peers_table(stories: Sequence[Story]) -> Table:
    columns = ("peer", "state", "step #", "version #", "rounds #", "outcomes", "group #")
    drawn = table("", (*columns, "loss #", "accuracy #", "sent #", "received #"), ())
    for index, story in enumerate(stories):
        drawn.add_row(
            text(index),
            text(story.state, STYLES.get(story.state, "")),
            text(f"{story.step}/{story.steps}"),
            text(story.version),
            text(story.rounds),
            text(_outcomes(story)),
            text(story.group),
            text(f"{story.loss:.3f}"),
            text(f"{story.accuracy:.3f}"),
            text(size(story.sent)),
            text(size(story.received)),
        )
    return drawn


def checks_table(checks: Sequence[Check]) -> Table:
    drawn = table("\nwhat it proved", ("check", "value", "bar", ""), ())
    for check in checks:
        verdict = text("pass", "green") if check.passed else text("FAIL", "bold red")
        drawn.add_row(text(check.name), text(check.value), text(check.bar), verdict)
    return drawn


def _sentence(story: Story) -> str:
    words = [
        f"{story.state:<10}",
        f"step {story.step:>4}/{story.steps}",
        f"version {story.version:>3}",
        f"rounds {story.rounds:>3}",
        f"group {story.group}",
        f"loss {story.loss:.3f}",
        f"accuracy {story.accuracy:.3f}",
    ]
    return ", ".join(words)


def _outcomes(story: Story) -> str:
    return ", ".join(f"{n} {word}" for word, n in story.outcomes.most_common())
