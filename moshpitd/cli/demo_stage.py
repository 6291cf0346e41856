"""The play itself: daemons find each other, trainers learn together, one node dies and comes back.

One rule: it only starts, watches and kills; what is said about the swarm was told by the daemons
and the trainers.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moshpitd.cli.demo_processes import (
    LEAVE_S,
    Child,
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
SEED_OF_A_NEWCOMER = 1000  # added to the index: other initial parameters than in the first life


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be played. `sides` is the grid: one side when all fit one group."""

    peers: int
    kill: int
    max_group: int
    sides: tuple[int, ...]
    steps: int
    every: int
    pace_s: float


class Stage:
    """One performance. Invariant: whatever it starts is in `children`, and `end` ends it all."""

    def __init__(self, plan: Plan, folder: Path, sockets: Path, stories: list[Story]) -> None:
        self.plan, self.folder = plan, folder
        self.stories = stories
        self.children = Children()
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
            node.start_trainer(self.children, self._options(), seed=node.index)
        self._train(screen)
        screen.doing("comparing the parameters, and learning alone and with all data")
        while not self._yardsticks.done:
            self._look()
            self._yardsticks.advance()
            screen.show()
            time.sleep(POLL_S)
        status = self.nodes[0].status()
        grid = [list(run.grid) for run in status.runs if run.run == RUN] if status else []
        difference = self._compare()
        screen.doing("the daemons leave")
        return Played(
            stories=self.stories,
            sides=self.plan.sides,
            grid=grid[0] if grid else [],
            alone=self._yardsticks.alone,
            central=self._yardsticks.central,
            difference=difference,
            killed=self.killed,
            exit_codes=self._leave(),
        )

    def end(self) -> None:
        """End whatever is left, at once. Safe to call after anything."""
        for node in self.nodes:
            node.close()
        for child in self.children.started:
            child.kill()

    # -- acts -------------------------------------------------------------------------------------

    def _start_daemons(self, screen: Screen) -> None:
        first, *others = self.nodes
        first.write_config(bootstrap=[], max_group=self.plan.max_group)
        first.start_daemon(self.children)
        screen.doing("starting the first daemon")
        self._wait(screen, lambda: self._join_address(first) is not None, DAEMON_START_S)
        address = self._join_address(first)
        assert address is not None
        screen.say(f"the first daemon is up: {address}")
        for node in others:
            node.write_config(bootstrap=[address], max_group=self.plan.max_group)
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

        self._wait(screen, all_joined, DAEMON_START_S)
        screen.doing(f"{len(self.nodes)} trainers start, each with an init and a shard of its own")

    def _train(self, screen: Screen) -> None:
        fate = Fate(self, screen) if self.killed is not None else None
        told = ""
        while not all(story.state == "done" for story in self.stories):
            self._look()
            if fate is not None:
                fate.advance()
            if all(story.started for story in self.stories) or (fate and fate.began):
                self._yardsticks.advance()
                told = told or self._say_trained(screen)
            screen.show()
            time.sleep(POLL_S)
        screen.say("all trainers are through")

    def _say_trained(self, screen: Screen) -> str:
        words = f"all {len(self.nodes)} trainers learn: a round every {self.plan.every} steps"
        screen.doing(words)
        return words

    def _compare(self) -> float:
        """Largest difference between the parameters that the trainers ended with."""
        out = self.folder / "compare.jsonl"
        dumps = [str(node.dump) for node in self.nodes]
        child = self.children.start(
            "the comparison",
            ["-m", "moshpitd.examples.digits", "compare", "--json", str(out), "--dumps", *dumps],
            self.folder / "compare.log",
        )
        return float(self._result_of(child, out)["max_difference"])

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
        if any([story.look() for story in self.stories]):
            self._heard_at = time.monotonic()
        self.children.check()
        if time.monotonic() - self._heard_at > SILENCE_S:
            raise self._failed(f"no trainer has told anything for {SILENCE_S:.0f} s")

    def _wait(self, screen: Screen, true: Callable[[], bool], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not true():
            self.children.check()
            if time.monotonic() > until:
                raise self._failed(f"after {timeout_s:.0f} s still waiting: {screen.waiting}")
            screen.show()
            time.sleep(POLL_S)
        self._heard_at = time.monotonic()

    def _join_address(self, node: Node) -> str | None:
        status = node.status()
        return status.addresses[0] if status is not None and status.addresses else None

    def _result_of(self, child: Child, out: Path) -> dict[str, Any]:
        """The last line of a process that computes one thing."""
        until = time.monotonic() + SILENCE_S
        while child.code is None and time.monotonic() < until:
            time.sleep(POLL_S)
        self.children.check()
        lines = JsonLines(out).new()
        if not lines:
            raise DemoFailed(f"{child.name} told nothing", (child.log,))
        return lines[-1]

    def _failed(self, why: str) -> DemoFailed:
        return DemoFailed(why, tuple(log for node in self.nodes for log in node.logs))


class Fate:
    """What happens to the last peer: killed after a third of the steps, restarted with the same
    identity and other initial parameters."""

    def __init__(self, stage: Stage, screen: Screen) -> None:
        assert stage.killed is not None
        self._stage, self._screen, self._killed = stage, screen, stage.killed
        self._node = stage.nodes[stage.killed.peer]
        self._next: Iterator[None] = self._unfold()
        self.began = False

    def advance(self) -> None:
        next(self._next, None)

    def _unfold(self) -> Iterator[None]:
        """One act after the other; yields whenever it has to wait."""
        stage, screen, node, killed = self._stage, self._screen, self._node, self._killed
        while min(story.step for story in stage.stories) * 3 < stage.plan.steps:
            yield
        self.began = True
        node.kill()
        killed.when_s = screen.seconds
        screen.say(f"{node.name}: node killed, daemon and trainer (SIGKILL)", "bold red")
        down_until = time.monotonic() + DOWN_S
        while time.monotonic() < down_until:
            yield
        node.start_daemon(stage.children)
        node.story.state = "restarting"
        screen.say(f"{node.name}: the daemon starts again with the same identity", "yellow")
        give_up = time.monotonic() + DAEMON_START_S
        while (status := node.status()) is None or not status.joined:
            if time.monotonic() > give_up:
                raise DemoFailed(f"{node.name} did not join again", node.logs)
            yield
        screen.say(f"{node.name}: joined as {status.peer_id}; a trainer starts", "yellow")
        node.start_trainer(
            stage.children, stage._options(), seed=node.index + SEED_OF_A_NEWCOMER
        )
        while not node.story.started:
            yield
        killed.back_s = screen.seconds
        took = "with a snapshot" if node.story.took_snapshot else "without a snapshot"
        screen.say(f"{node.name}: back {took}, at step {node.story.step}", "bold green")
