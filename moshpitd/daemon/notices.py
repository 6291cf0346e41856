"""Waits for the notice that this machine will be taken away, and says so once.

One rule: a metadata server that fails costs a warning and is asked again; it never ends the daemon
and never makes it leave.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp

from moshpitd.daemon.logs import log_event
from moshpitd.daemon.notices_clouds import (
    AWS_POLL_S,
    AZURE_POLL_S,
    FILE_POLL_S,
    GCP_POLL_S,
    METADATA_URL,
    Aws,
    Azure,
    Gcp,
    Notice,
    Source,
    Unanswered,
    WatchedFile,
)
from moshpitd.daemon.settings import NoticesSection

log = logging.getLogger(__name__)

LONGEST_S: Final = 20.0
"""Between two questions to a server that fails: less than the 30 s that the shortest notice
gives, and far from what makes a throttled server angrier."""
PROBES: Final = 3  # a machine's network may be up later than its daemons
PROBE_AGAIN_S: Final = 10.0
TROUBLE: Final = (aiohttp.ClientError, Unanswered, TimeoutError, OSError, ValueError)
"""ValueError: a header or an address that aiohttp cannot read."""
RESERVE_S: Final = 5.0
"""Kept back of what the cloud gives: a stop takes a second, at worst (lifecycle) ten."""


def budget_s(left_s: float | None, default_s: float) -> float:
    """How long a drain may take when the machine goes in `left_s` (None: not said)."""
    return default_s if left_s is None else max(left_s - RESERVE_S, left_s / 2)


class Notices:
    """Invariant: `heard` is called at most once for each notice that differs from the one
    before it."""

    def __init__(
        self,
        settings: NoticesSection,
        heard: Callable[[Notice], None],
        *,
        answer_s: float | None = None,
        probe_again_s: float = PROBE_AGAIN_S,
    ) -> None:
        self.trouble = ""
        """What is wrong with the source, as a sentence; empty while it answers."""
        self.source = ""
        """Whom we ask: aws, gcp, azure or file; empty while nobody."""
        self._settings = settings
        self._heard = heard
        self._answer = {} if answer_s is None else {"answer_s": answer_s}
        self._probe_again_s = probe_again_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask, in the background."""
        if self._settings.provider != "none":
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            # No proxy of the environment: a metadata server is asked by the machine itself.
            async with aiohttp.ClientSession(trust_env=False) as session:
                source = await self._chosen(session)
                if source is not None:
                    self.source = source.name
                    await self._ask_on(source)
        except Exception:
            # The daemon is worth more than its notices; SIGTERM still comes.
            log.exception("preemption notices are not watched any more")
            self.trouble = "preemption notices are not watched any more: a fault of the daemon"

    async def _ask_on(self, source: Source) -> None:
        told: Notice | None = None
        failures = 0
        while True:
            try:
                notice = await source.ask()
            except TROUBLE as error:
                failures += 1
                self._troubled(source, error)
            else:
                failures = 0
                if self.trouble:
                    log_event(log, logging.INFO, "notices answered again", source=source.name)
                    self.trouble = ""
                if notice is not None and (told is None or told.what != notice.what):
                    told = notice
                    self._heard(notice)
            await asyncio.sleep(min(source.poll_s * 2 ** min(failures, 8), self._longest(source)))

    def _longest(self, source: Source) -> float:
        return max(LONGEST_S, source.poll_s)

    def _troubled(self, source: Source, error: BaseException) -> None:
        words = str(error) or "no answer in time"
        trouble = f"preemption notices of {source.name}: {words}, trying again"
        if trouble != self.trouble:
            log_event(log, logging.WARNING, "no notices", source=source.name, reason=words)
        self.trouble = trouble

    async def _chosen(self, session: aiohttp.ClientSession) -> Source | None:
        settings = self._settings
        if settings.provider == "file":
            return _file(settings)
        clouds = self._clouds(session)
        if settings.provider != "auto":
            return clouds[settings.provider]
        for _ in range(PROBES):
            answers = await asyncio.gather(*(_is_here(cloud) for cloud in clouds.values()))
            for cloud, here in zip(clouds.values(), answers, strict=True):
                if here:
                    log_event(log, logging.INFO, "notices watched", source=cloud.name)
                    return cloud
            await asyncio.sleep(self._probe_again_s)
        log_event(log, logging.DEBUG, "no metadata server: no preemption notices")
        return None

    def _clouds(self, session: aiohttp.ClientSession) -> dict[str, Source]:
        settings = self._settings
        url, poll_s, answer = settings.url or METADATA_URL, settings.poll_s, self._answer
        aws = Aws(
            session,
            url=url,
            poll_s=poll_s or AWS_POLL_S,
            rebalance_drains=settings.rebalance_drains,
            **answer,
        )
        azure = Azure(
            session,
            url=url,
            poll_s=poll_s or AZURE_POLL_S,
            leave_for=settings.azure_events,
            **answer,
        )
        gcp = Gcp(session, url=url, poll_s=poll_s or GCP_POLL_S, **answer)
        return {source.name: source for source in (aws, gcp, azure)}


def _file(settings: NoticesSection) -> WatchedFile:
    path = Path(os.path.abspath(os.path.expanduser(settings.file)))
    return WatchedFile(path, poll_s=settings.poll_s or FILE_POLL_S)


async def _is_here(source: Source) -> bool:
    try:
        return await source.present()
    except TROUBLE:
        return False
