"""The play itself: daemons find each other, trainers learn together, one node dies and comes back.

One rule: it only starts, watches and kills; what is said about the swarm was told by the daemons
and the trainers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moshpitd.cli.demo_algorithms import KILLED_AT, Row
from moshpitd.cli.demo_processes import (
    LEAVE_S,
    Children,
    DemoFailed,
    Node,
    free_ports,
)
from moshpitd.cli.demo_screen import Screen
from moshpitd.cli.demo_story import JsonLines, Story
from moshpitd.cli.demo_verdict import Killed, Played

POLL_S = 0.2
DAEMON_START_S = 90.0  # importing hivemind and torch costs seconds of a core, nine times on two
DOWN_S = 3.0  # a reclaimed machine is gone for longer; the daemon's start adds to it
SILENCE_S = 150.0
"""Nobody tells anything for so long: it hangs. Above the trainers' wait for each other at the end
(120 s)."""
RUN = "digits"
LOCKSTEP = {"averaging.window_s": 2.0, "averaging.answer_timeout_s": 1.0}
"""For trainers that average in every step: on one machine whoever is not there within two seconds
is not coming, and all the others wait for that long."""
SEED_OF_A_NEWCOMER = 1000  # added to the index: other initial parameters than in the first life


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be played. `sides` is the grid: one side when all fit one group. Without a `row`
    it is Moshpit SGD with its yardsticks."""

    peers: int
    kill: int
    max_group: int
    sides: tuple[int, ...]
    steps: int
    every: int
    pace_s: float
    row: Row | None = None


class Stage:
    """One performance. Invariant: whatever it starts is in `children`, and `end` ends it all."""

    def __init__(self, plan: Plan, folder: Path, sockets: Path, stories: list[Story]) -> None:
        self.plan, self.folder = plan, folder
        self.stories = stories
        self.children = Children(sockets)
        ports = free_ports(2 * plan.peers)
        self.nodes = [
            Node(
                index,
                folder / f"peer-{index}",
                sockets / f"{index}.sock",
                (ports[2 * index], ports[2 * index + 1]),
                story,
            )
            for index, story in enumerate(stories)
        ]
        self.killed = Killed(plan.peers - 1) if plan.kill else None
        self._yardsticks = Yardsticks(plan, folder, self.children)
        self._heard_at = time.monotonic()

    def play(self, screen: Screen) -> Played:
        """From nothing to everything that is known. Raises `DemoFailed`."""
        self._start_daemons(screen)
        for node in self.nodes:
            self._start_trainer(node)
        self._train(screen)
        status = self.nodes[0].status()
        grid = [list(run.grid) for run in status.runs if run.run == RUN] if status else []
        if self.plan.row is None:
            screen.doing("one trainer alone, one with all data, and a comparison of parameters")
            self._until(screen, self._yardsticks.advance)
        difference = self._compare(screen)
        screen.doing("the daemons leave")
        return Played(
            stories=self.stories,
            sides=self.plan.sides,
            grid=grid[0] if grid else [],
            alone=self._yardsticks.reached.get("alone"),
            central=self._yardsticks.reached.get("central"),
            difference=difference,
            killed=self.killed,
            exit_codes=self._leave(),
            row=self.plan.row,
        )

    def end(self) -> None:
        """End whatever is left, at once. Safe to call after anything."""
        for node in self.nodes:
            node.close()
        self.children.kill_all()

    # -- acts -------------------------------------------------------------------------------------

    def _start_daemons(self, screen: Screen) -> None:
        first, *others = self.nodes
        more = {} if self.plan.row is None else LOCKSTEP
        first.write_config(bootstrap=[], max_group=self.plan.max_group, more=more)
        first.start_daemon(self.children)
        screen.doing("starting the first daemon")
        self._until(screen, lambda: self._join_address(first) is not None, DAEMON_START_S)
        address = self._join_address(first)
        assert address is not None
        screen.say(f"the first daemon is up: {address}")
        for node in others:
            node.write_config(bootstrap=[address], max_group=self.plan.max_group, more=more)
            node.start_daemon(self.children)
        screen.doing(f"{len(others)} more daemons start and join through it")
        joined: dict[int, int] = {}  # peer -> peers in its routing table

        def all_joined() -> bool:
            for node in others:
                status = node.status() if node.index not in joined else None
                if status is not None and status.joined:
                    joined[node.index] = status.swarm_peers
                    screen.say(f"{node.name} has joined: {status.peer_id}")
            return len(joined) == len(others)

        self._until(screen, all_joined, DAEMON_START_S)
        screen.doing(f"{len(self.nodes)} trainers start, each with an init and a shard of its own")

    def _train(self, screen: Screen) -> None:
        self._until(screen, lambda: all(story.started for story in self.stories))
        screen.doing(f"{len(self.nodes)} trainers learn: {self._in_words()}")
        fate = self._fate(screen)
        while not all(story.state == "done" for story in self.stories):
            self._look()
            next(fate, None)
            if self.plan.row is None:
                self._yardsticks.advance()
            screen.show()
            time.sleep(POLL_S)
        screen.say("all trainers are through")

    def _fate(self, screen: Screen) -> Iterator[None]:
        """The last peer is killed after a third of the steps (a fifth, where all go in lockstep)
        and restarted with the same identity and other initial parameters. Yields whenever it has
        to wait."""
        killed = self.killed
        if killed is None:
            return
        node = self.nodes[killed.peer]
        one_in = 3 if self.plan.row is None else KILLED_AT
        while min(story.step for story in self.stories) * one_in < self.plan.steps:
            yield
        node.kill()
        killed.when_s = screen.seconds
        screen.say(f"{node.name}: node killed, daemon and trainer (SIGKILL)", "bold red")
        until = time.monotonic() + DOWN_S
        while time.monotonic() < until:
            yield
        node.start_daemon(self.children)
        node.story.state = "restarting"
        screen.say(f"{node.name}: its daemon starts again, with the same identity", "yellow")
        until = time.monotonic() + DAEMON_START_S
        while (status := node.status()) is None or not status.joined:
            if time.monotonic() > until:
                raise DemoFailed(f"{node.name} did not join again", node.logs)
            yield
        screen.say(f"{node.name}: joined as {status.peer_id}, a trainer starts", "yellow")
        self._start_trainer(node, newcomer=True)
        while not node.story.started:
            yield
        killed.back_s = screen.seconds
        took = "took the swarm's state" if node.story.took_snapshot else "took no state"
        screen.say(f"{node.name}: back, {took}, goes on at step {node.story.step}", "bold green")

    def _compare(self, screen: Screen) -> float:
        """Largest difference between the parameters that the trainers ended with."""
        dumps = [str(node.dump) for node in self.nodes]
        comparison = Computation(self.children, self.folder, "compare", ["--dumps", *dumps])
        self._until(screen, comparison.advance)
        return float(comparison.line["max_difference"])

    def _leave(self) -> list[int | None]:
        """Daemons drain and end; their exit codes, None for one that had to be forced."""
        daemons = [node.daemon for node in self.nodes if node.daemon is not None]
        for node in self.nodes:
            node.close()
        for daemon in daemons:
            daemon.ask_to_leave()
        until = time.monotonic() + LEAVE_S
        while any(daemon.code is None for daemon in daemons) and time.monotonic() < until:
            time.sleep(POLL_S)
        return [daemon.code for daemon in daemons]

    # -- below ------------------------------------------------------------------------------------

    def _start_trainer(self, node: Node, *, newcomer: bool = False) -> None:
        seed = node.index + (SEED_OF_A_NEWCOMER if newcomer else 0)
        if self.plan.row is None:
            node.start_trainer(self.children, self._options(), seed=seed)
            return
        others = [story.step for story in self.stories if story is not node.story]
        options = self._options_of(self.plan.row, begin_at=max(min(others), 1) if newcomer else 0)
        program = ("moshpitd.examples.digits_by_name",)
        node.start_trainer(self.children, options, seed=seed, program=program)

    def _options_of(self, row: Row, *, begin_at: int) -> list[str]:
        words = {
            "--algorithm": row.name,
            "--options": json.dumps(dict(row.options)),
            "--shards": row.shards,
            "--of": str(self.plan.peers),
            "--steps": str(self.plan.steps),
            "--pace": str(self.plan.pace_s),
            "--begin-at": str(begin_at),
        }
        flags = ["--full-batch"] if row.full_batch else []
        return ["--run", RUN, *(word for pair in words.items() for word in pair), *flags]

    def _in_words(self) -> str:
        row = self.plan.row
        if row is None:
            return f"a round every {self.plan.every} steps"
        return f"{row.name}, {row.shards} shards"

    def _options(self) -> list[str]:
        """What all trainers are told alike."""
        plan = self.plan
        numbers = {
            "--of": plan.peers,
            "--steps": plan.steps,
            "--every": plan.every,
            "--pace": plan.pace_s,
            "--final-participants": max(plan.sides),
        }
        words = [word for name, number in numbers.items() for word in (name, str(number))]
        return ["--run", RUN, *words]

    def _look(self) -> None:
        """Hear the trainers out, and notice what died."""
        for story in self.stories:
            if story.look():
                self._heard_at = time.monotonic()
        self.children.check()
        if time.monotonic() - self._heard_at > SILENCE_S:
            raise self._failed(f"no trainer has told anything for {SILENCE_S:.0f} s")

    def _until(
        self, screen: Screen, true: Callable[[], bool], timeout_s: float = SILENCE_S
    ) -> None:
        """Wait, while everything is watched."""
        until = time.monotonic() + timeout_s
        while not true():
            self._look()
            if time.monotonic() > until:
                raise self._failed(f"after {timeout_s:.0f} s still waiting: {screen.waiting}")
            screen.show()
            time.sleep(POLL_S)
        self._heard_at = time.monotonic()

    def _join_address(self, node: Node) -> str | None:
        status = node.status()
        return status.addresses[0] if status is not None and status.addresses else None

    def _failed(self, why: str) -> DemoFailed:
        return DemoFailed(why, tuple(log for node in self.nodes for log in node.logs))


class Computation:
    """One process that computes one thing and tells it in one line."""

    def __init__(
        self, children: Children, folder: Path, what: str, options: list[str], *, nice: bool = False
    ) -> None:
        out = folder / f"{what}.jsonl"
        arguments = ["-m", "moshpitd.examples.digits", what, "--json", str(out), *options]
        self._child = children.start(what, arguments, folder / f"{what}.log", nice=nice)
        self._lines = JsonLines(out)
        self.line: dict[str, Any] = {}

    def advance(self) -> bool:
        """True when it is done."""
        if self.line or self._child.code is None:
            return bool(self.line)
        lines = self._lines.new()
        if not lines:
            raise DemoFailed(f"{self._child.name} told nothing", (self._child.log,))
        self.line = lines[-1]
        return True


class Yardsticks:
    """What one trainer reaches on its own shard, and one with all data: one after the other, with
    what the swarm leaves over of the processors."""

    def __init__(self, plan: Plan, folder: Path, children: Children) -> None:
        self._folder, self._children = folder, children
        self._options = ["--of", str(plan.peers), "--steps", str(plan.steps)]
        self._running: Computation | None = None
        self.reached: dict[str, float] = {}

    def advance(self) -> bool:
        """True when both are known."""
        left = [what for what in ("alone", "central") if what not in self.reached]
        if not left:
            return True
        if self._running is None:
            self._running = Computation(
                self._children, self._folder, left[0], self._options, nice=True
            )
        elif self._running.advance():
            self.reached[left[0]] = float(self._running.line["accuracy"])
            self._running = None
        return False
