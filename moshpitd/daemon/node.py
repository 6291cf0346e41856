"""One node: everything that a daemon consists of, put together and taken apart again.

One rule: a node owns what it opens and nothing global, so that several live in one process on one
loop, and `stop` leaves neither a file, a thread nor a child behind, however far `start` got.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from moshpitd.core.effects import Effect, Note
from moshpitd.core.events import Event
from moshpitd.core.messages import Message, Record
from moshpitd.core.peer import Peer
from moshpitd.core.store_words import STORE_EFFECTS
from moshpitd.daemon.addresses import join_string
from moshpitd.daemon.api import ApiServer
from moshpitd.daemon.buffers import sweep
from moshpitd.daemon.carried import Carried
from moshpitd.daemon.choosing import group_codec
from moshpitd.daemon.claims import Claims, claim
from moshpitd.daemon.driver import Driver
from moshpitd.daemon.exchange import Exchange
from moshpitd.daemon.ground import Ground
from moshpitd.daemon.history import History
from moshpitd.daemon.http import HttpServer
from moshpitd.daemon.leaving import Leaving
from moshpitd.daemon.logs import log_event, log_note
from moshpitd.daemon.metrics import NodeMetrics
from moshpitd.daemon.network import Network
from moshpitd.daemon.notices import Notices, budget_s
from moshpitd.daemon.notices_clouds import Notice
from moshpitd.daemon.readiness import readiness
from moshpitd.daemon.recorder import FOLDER, Recorder
from moshpitd.daemon.roster import Roster
from moshpitd.daemon.runs import Run
from moshpitd.daemon.settings import Settings
from moshpitd.daemon.storage import Storages
from moshpitd.daemon.stores import Stores
from moshpitd.daemon.trainers import check_codec, checked_run_name
from moshpitd.daemon.views import peer_views, round_views, run_view, set_gauges, software
from moshpitd.errors import ConfigError, Unreachable
from moshpitd.net.identity import Identity
from moshpitd.rpc.status import refusal
from moshpitd.tensors.layout import Layout

log = logging.getLogger(__name__)

THREADS = 4  # for what blocks: digests, checks and file systems; more gain little, memory is slow
LOOK_AROUND_S = 1.0
FAREWELL_S = 0.5
"""How long the last messages may take: a peer that hears Goodbye need not wait for us."""


class Node:
    """Invariant: a run's driver lives until the roster lets go of the run, or the node stops."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.paths = settings.paths()
        self.software = software()
        self.metrics = NodeMetrics(self.software)
        self.runs: dict[str, Run] = {}
        self.leaving = Leaving(lambda: self.runs.values())
        self._roster = Roster(
            self.runs,
            idle_s=settings.runs.idle_s,
            clock=lambda: asyncio.get_running_loop().time(),
            end=self._end_run,
            failed=self.failed,
        )
        self._sequence = 0  # of the last record of a run that was let go
        self.peer_id = ""
        self.warnings = [str(finding) for finding in settings.findings()]
        self._params = settings.averaging.params()
        self._own = settings.own_topology()
        self._claims: Claims | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="node")
        self._exchange: Exchange | None = None
        self._storages: Storages | None = None
        self._stores: Stores | None = None
        self._network: Network | None = None
        self._http: HttpServer | None = None
        self._api: ApiServer | None = None
        self._looking: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._notices: Notices | None = None
        self._recorder: Recorder | None = None
        self._noticed = ""
        self._ended = asyncio.Event()
        self._fault: BaseException | None = None
        self._started_at = time.monotonic()
        self._bytes = (0, 0)
        self._carried = Carried(self.metrics.add_carried)

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything; joining the swarm goes on in the background. Raises ConfigError."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        settings, paths = self.settings, self.paths
        self._claims = await self.in_thread(claim, settings)
        identity = await self.in_thread(Identity.load_or_create, paths.identity)
        self.peer_id = identity.peer_id
        assert self._claims is not None
        self._claims.take_peer_id(self.peer_id, identity=paths.identity)
        stale = partial(sweep, paths.buffers_dir, data_dir=paths.data_dir)
        for path in await self.in_thread(stale):
            log_event(log, logging.INFO, "removed a bucket of a dead daemon", path=path)
        if settings.flight.files:
            self._recorder = Recorder(
                paths.data_dir / FOLDER,
                peer_id=self.peer_id,
                software=self.software,
                file_bytes=settings.flight.file_bytes,
                files=settings.flight.files,
            )
        self._record(Note("daemon_started"))
        self._exchange = Exchange(
            self.peer_id,
            self._post,
            timed=self.metrics.add_codec_seconds,
            error_feedback=settings.averaging.error_feedback,
        )
        self._storages = Storages(self.peer_id, self._post, self._layout_of)
        self._stores = Stores(self._storages, self.in_thread)
        self._network = Network(
            settings, identity, self._exchange, self._storages, self.runs,
            conflict=self._conflict,
        )  # fmt: skip
        await self._network.start()
        if settings.http.port:
            self._http = HttpServer(
                host=settings.http.host,
                port=settings.http.port,
                metrics=self.metrics.render,
                ready=self.ready,
                view=self.view,
            )
            await self._http.start()
        self._api = ApiServer(self, paths.socket, drain_budget_s=settings.node.drain_budget_s)
        await self._api.start()
        self._looking = asyncio.create_task(self._look_around())
        self._notices = Notices(settings.notices, self._heard)
        self._notices.start()
        log_event(
            log,
            logging.INFO,
            "node started",
            peer=self.peer_id,
            socket=paths.socket,
            addresses=self._network.control_addresses(),
            links=self._network.link_addresses,
        )
        for warning in self.warnings:
            log_event(log, logging.WARNING, "address", warning=warning)

    async def wait(self) -> None:
        """Until the node has ended by itself; raises what broke it."""
        await self._ended.wait()
        if self._fault is not None:
            raise self._fault

    async def drain(self, budget_s: float, why: str = "") -> None:
        """Take nothing new, finish what runs, hand over, say goodbye; returns by the end of the
        budget, or of an earlier drain's that is shorter."""
        self._leave(budget_s, why or "drain")
        await self.leaving.over()

    def begin_drain(self, budget_s: float, why: str = "drain", *, preempted: bool = False) -> None:
        """Drain in the background and end; for callers that do not wait."""
        self._leave(budget_s, why, preempted=preempted)
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_drained())

    @property
    def draining(self) -> asyncio.Event:
        return self.leaving.begun

    def _leave(self, budget_s: float, why: str, *, preempted: bool = False) -> None:
        self._roster.shut()  # a drain asks every run that is here when it begins
        begun = self.leaving.begin(budget_s, why, preempted=preempted)
        if begun:
            self.metrics.set_draining(True)
        self._record(Note("daemon_draining", reason=why, fields={"budget_s": budget_s}))

    async def _end_drained(self) -> None:
        try:
            await self.leaving.over()
        except Exception as error:
            self.failed(error)
        self._ended.set()

    def _heard(self, notice: Notice) -> None:
        """The cloud says that this machine will go."""
        left = {} if notice.left_s is None else {"left_s": notice.left_s}
        self._record(Note("notice", reason=str(notice), fields={**left, "leave": notice.leave}))
        log_event(log, logging.WARNING, "notice", reason=str(notice), **left)
        if notice.leave:
            budget = budget_s(notice.left_s, self.settings.node.drain_budget_s)
            self.begin_drain(budget, str(notice), preempted=True)
        else:
            self._noticed = f"notice of {notice}"

    def _record(self, note: Note, run: str = "") -> None:
        if self._recorder is not None:
            self._recorder.record(run, note)

    async def stop(self) -> None:
        """Close everything that `start` opened. Safe after a start that failed, and twice."""
        for task in (self._looking, self._ending):
            if task is not None:
                task.cancel()
        self._looking = self._ending = None
        if self._notices is not None:
            await self._notices.stop()
        await self.leaving.stop()
        runs = list(self.runs.values())
        await self._let_go()
        await asyncio.gather(*(run.driver.flush(FAREWELL_S) for run in runs))
        for step in self._closers():
            try:
                await step
            except Exception:
                log.exception("closing a part of the node failed")
        self.runs.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _let_go(self) -> None:
        """All trainers, and take no new ones."""
        self._roster.shut()
        for run in self.runs.values():
            run.draining = True
            for trainer in list(run.trainers):
                run.leave(trainer)
        await self._roster.settled()

    def _closers(self) -> list[Awaitable[Any]]:
        """Outside in: first nobody can ask, then nobody is told, then nothing is held."""
        steps: list[Awaitable[Any]] = []
        if self._api is not None:
            # Again after it: whose attaching was under way has been let in meanwhile.
            steps += [self._api.stop(), self._let_go()]
        steps += [run.driver.close() for run in self.runs.values()]
        if self._http is not None:
            steps.append(self._http.stop())
        # The exchange before the links: a reader that waits in it for a Begin lets go at once.
        if self._exchange is not None:
            steps.append(asyncio.to_thread(self._exchange.close))
        if self._storages is not None:
            steps.append(asyncio.to_thread(self._storages.close))
        if self._network is not None:
            steps.append(self._network.stop())
        if self._recorder is not None:
            self._record(Note("daemon_stopped"))
            steps.append(asyncio.to_thread(self._recorder.close))
        if self._claims is not None:
            steps.append(asyncio.to_thread(self._claims.release))
        self._api = self._http = self._network = self._exchange = self._claims = None
        self._notices = self._storages = None
        return steps

    def failed(self, error: BaseException) -> None:
        """An invariant of ours is broken: `wait` raises it."""
        if self._fault is None:
            self._fault = error
            self._ended.set()

    def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Run what blocks outside of the loop."""
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    # -- runs -------------------------------------------------------------------------------------

    async def run(self, name: str, codec: str = "", *, feedback: bool = True) -> Run:
        """The run of that name, made at its first trainer, whose `codec` it keeps (empty: that of
        the settings, and with it their error feedback)."""
        check_codec(checked_run_name(name), codec, "")
        run = await self._roster.run(name, partial(self._make_run, name, codec, feedback=feedback))
        check_codec(name, codec, run.codec)
        return run

    def _make_run(self, name: str, codec: str, *, feedback: bool) -> Run:
        averaging = self.settings.averaging
        exchange, network = self._exchange, self._network
        assert exchange is not None
        assert network is not None
        peer = Peer(
            self._params,
            self.peer_id,
            random.Random(),
            run=name,
            codec=group_codec(codec or averaging.codec),
            sequence=max(self._sequence + 1, int(time.time() * 1000)),
            own=self._own,
        )
        driver = Driver(peer, self)
        ground = Ground(
            exchange=exchange,
            codec=codec or averaging.codec,
            feedback=feedback if codec else None,
            part_bytes=averaging.part_bytes or None,
            buffers_dir=self.paths.buffers_dir,
            data_dir=self.paths.data_dir,
            max_trainers=self._params.max_trainers,
            in_thread=self.in_thread,
        )
        driver.handle(network.addressed())
        if self._storages is not None:
            self._storages.know(name)
        return Run(name, ground, driver, History(exchange.counters))

    async def _end_run(self, run: Run, why: str) -> None:
        """Nothing of it is left then, but the number that its next life's records begin above."""
        self._record(Note("run_forgotten", reason=why), run.name)
        await run.end(FAREWELL_S)
        self._sequence = max(self._sequence, run.driver.peer.record.sequence)
        for part in (self._storages, self._network, self._carried, self._recorder):
            if part is not None:
                part.forget(run.name)
        self.metrics.forget(run.name, why)

    def run_of(self, trainer: str) -> Run:
        """The run that a trainer is attached to."""
        for run in self.runs.values():
            if trainer in run.trainers:
                return run
        raise refusal("unknown_trainer", f"no trainer {trainer[:64]!r} is attached")

    @property
    def stores(self) -> Stores:
        if self._stores is None:
            raise Unreachable("the node has not started")
        return self._stores

    def _layout_of(self, run: str) -> Layout | None:
        known = self.runs.get(run)
        return known.layout if known is not None else None

    # -- what the drivers need (driver.Outside) ---------------------------------------------------

    async def send(self, run: str, to: str, message: Message) -> None:
        await self._live().send(run, to, message)

    def at_once(self, run: str, to: str, message: Message) -> bool:
        return self._network is not None and self._network.at_once(run, to, message)

    async def announce(self, run: str, key: str, record: Record, *, ttl_s: float) -> bool:
        return await self._live().announce(run, key, record, ttl_s=ttl_s)

    async def look_up(self, run: str, key: str) -> tuple[Record, ...]:
        return await self._live().look_up(run, key)

    def move(self, run: str, effect: Effect) -> None:
        # Without them the node stops, and nobody waits for tensors any more.
        if isinstance(effect, STORE_EFFECTS):
            if self._storages is not None:
                self._storages.handle(run, effect)
        elif self._exchange is not None:
            self._exchange.handle(run, effect)

    def noted(self, run: str, note: Note) -> None:
        self.metrics.observe(run, note)
        log_note(log, run, note)
        self._record(note, run)
        current = self.runs.get(run)
        line = current.noted(note) if current is not None else None
        if line is not None:
            sent, received = line.bytes_sent, line.bytes_received
            self._bytes = (self._bytes[0] + sent, self._bytes[1] + received)
            busy_s, links = line.phases.get("exchange", 0.0), line.group_size - 1
            if busy_s > 0 and links > 0:  # until the links have measured more than a short round
                self.metrics.set_link_rates(sent / busy_s / links, received / busy_s / links)
            self._tell_links()

    def _post(self, run: str, event: Event) -> None:
        """From any thread."""
        current = self.runs.get(run)
        if current is not None:
            current.driver.post(event)

    def _live(self) -> Network:
        if self._network is None:
            raise Unreachable("the node stops")
        return self._network

    def _conflict(self, words: str) -> None:
        self.failed(
            ConfigError(
                words,
                file=str(self.paths.identity),
                key="node.identity",
                expected="a key of this node's own",
            )
        )

    # -- what people see --------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        return self._network is not None and self._network.joined

    def ready(self) -> tuple[bool, tuple[str, ...]]:
        """For /readyz: (ready, sentences)."""
        bootstrap = self._network.bootstrap() if self._network is not None else []
        leaving = self.leaving
        drain = (leaving.left_s, leaving.why) if leaving.begun.is_set() else None
        return readiness(joined=self.joined, drain=drain, bootstrap=bootstrap)

    def status(self) -> dict[str, Any]:
        """The fields of StatusReply."""
        network = self._network
        addresses = network.control_addresses() if network is not None else []
        links = network.link_addresses if network is not None else ()
        return {
            "peer_id": self.peer_id,
            "version": self.software,
            "uptime_s": time.monotonic() - self._started_at,
            "joined": self.joined,
            "draining": self.draining.is_set(),
            "drain_left_s": self.leaving.left_s,
            "drain_reason": self.leaving.why,
            "swarm_peers": network.swarm_peers if network is not None else 1,
            "addresses": addresses,
            "join": join_string(addresses),
            "bootstrap": [
                {"address": address, "state": state}
                for address, state in (network.bootstrap() if network is not None else ())
            ],
            "runs": [run_view(run, self._roster.idle(run)) for run in self.runs.values()],
            "warnings": self._all_warnings(),
            "link_address": links[0] if links else "",
            "bytes_sent": self._bytes[0],
            "bytes_received": self._bytes[1],
            "links": network.link_lines() if network is not None else [],
        }

    def _all_warnings(self) -> list[str]:
        network, notices, recorder = self._network, self._notices, self._recorder
        warnings = [
            self._noticed,
            notices.trouble if notices is not None else "",
            recorder.stopped if recorder is not None else "",
        ]
        others = network.warnings() if network is not None else []
        return self.warnings + others + [warning for warning in warnings if warning]

    def peers(self, run: str = "") -> list[dict[str, Any]]:
        """The fields of PeerLine, of one run or of all."""
        now = asyncio.get_running_loop().time()
        return [line for one in self._runs(run) for line in peer_views(one, now)]

    def rounds(self, run: str = "", last: int = 0) -> list[dict[str, Any]]:
        """The fields of RoundLine, oldest first; `last` 0 for all that is kept."""
        return round_views(self._runs(run), last)

    def view(self) -> dict[str, Any]:
        """For the page: status with peers and the last rounds, newest first."""
        return self.status() | {"peers": self.peers(), "rounds": self.rounds(last=32)[::-1]}

    def _runs(self, name: str) -> list[Run]:
        return [run for run in self.runs.values() if name in ("", run.name)]

    async def _look_around(self) -> None:
        """Keep the gauges and our own addresses true."""
        addressed = self._live().addressed()
        while True:
            await asyncio.sleep(LOOK_AROUND_S)
            self.metrics.set_joined(self.joined)
            self.metrics.set_drain_left(self.leaving.left_s)
            self._tell_links()
            if self._exchange is not None:
                self.metrics.set_residual_parts_dropped(self._exchange.residuals_dropped)
            self._roster.look()
            now = self._live().addressed()
            for run in self.runs.values():
                if now != addressed:
                    run.driver.handle(now)
                set_gauges(self.metrics, run)
            addressed = now

    def _tell_links(self) -> None:
        network = self._live()
        self._carried.update(self.runs, network.moved(), network.control_bytes)
        self.metrics.set_link_rates(*network.link_rates())
