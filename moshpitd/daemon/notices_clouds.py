"""How each cloud says that this machine is about to go: one question, one answer.

    aws    /latest/meta-data/spot/instance-action, IMDSv2     two minutes before, as an instant
    gcp    /computeMetadata/v1/instance/preempted             about 30 s before, without an instant
    azure  /metadata/scheduledevents                          30 s (Preempt) to 15 min before

One rule: an answer that is not understood never counts as "nothing to say". It is `Unanswered`
where the server failed, and a notice without a time where something is announced in a form that we
do not know.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from moshpitd.errors import TransportError

METADATA_URL: Final = "http://169.254.169.254"  # link-local; all three clouds answer here
ANSWER_S: Final = 2.0
"""A metadata server is on the host and answers within milliseconds; more is a server that hangs."""
MAX_ANSWER_BYTES: Final = 1 << 18  # a list of events of a scale set of 1000 machines

TOKEN_S: Final = 21_600  # the longest that AWS gives; a token costs a request, and an old one a 401
AWS_POLL_S: Final = 5.0  # what AWS recommends; costs 5 of 120 s
GCP_WAIT_S: Final = 5
"""The server answers when the value changes; this renews the question, because one that hangs must
not cost more of the 30 s than that."""
GCP_POLL_S: Final = 1.0  # between two questions, for a server that does not wait
AZURE_POLL_S: Final = 1.0  # what Azure recommends; a preemption is told 30 s before
AZURE_FIRST_S: Final = 120.0  # the first question turns the service on, which takes that long
FILE_POLL_S: Final = 1.0  # a stat costs microseconds

AZURE_EVENTS: Final = ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze")


class Unanswered(TransportError):
    """The metadata server did not answer, or not what it should; asked again later."""


@dataclass(frozen=True, slots=True)
class Notice:
    """`left_s` is the time until the machine goes, None where the cloud does not say. Without
    `leave` it is worth telling and no reason to go."""

    source: str
    what: str
    left_s: float | None = None
    leave: bool = True

    def __str__(self) -> str:
        return f"{self.source}: {self.what}"


class Source(Protocol):
    """One place where notices come from."""

    @property
    def name(self) -> str: ...
    @property
    def poll_s(self) -> float: ...

    async def present(self) -> bool:
        """Whether this machine is of that cloud. May raise what a request raises."""
        ...

    async def ask(self) -> Notice | None:
        """The notice, if there is one. Raises Unanswered, and what a request raises."""
        ...


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str
    headers: dict[str, str]  # keys in lower case

    def left_s(self, until: datetime) -> float:
        """Time until an instant that this server named, by the server's own clock where it says
        it: ours may be off by minutes."""
        try:
            now = parsedate_to_datetime(self.headers.get("date", ""))
        except ValueError:
            now = datetime.fromtimestamp(time.time(), UTC)
        return (until - now).total_seconds()


class _Http:
    """Requests to one metadata server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, answer_s: float) -> None:
        self._session, self._url, self._answer_s = session, url.rstrip("/"), answer_s

    async def ask(
        self, method: str, path: str, headers: dict[str, str], *, wait_s: float = 0.0
    ) -> _Answer:
        timeout = aiohttp.ClientTimeout(total=self._answer_s + wait_s)
        async with self._session.request(
            method, self._url + path, headers=headers, timeout=timeout, allow_redirects=False
        ) as reply:
            body = await reply.content.read(MAX_ANSWER_BYTES)
            kept = {key.lower(): value for key, value in reply.headers.items()}
            return _Answer(reply.status, body.decode("utf-8", "replace"), kept)


class Aws:
    """A spot instance of EC2. Invariant: no answer counts that was asked for without a token."""

    name = "aws"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        url: str = METADATA_URL,
        poll_s: float = AWS_POLL_S,
        answer_s: float = ANSWER_S,
        rebalance_drains: bool = False,
    ) -> None:
        self.poll_s = poll_s
        self._http = _Http(session, url, answer_s)
        self._rebalance_drains = rebalance_drains
        self._token, self._token_at = "", 0.0

    async def present(self) -> bool:
        await self._renew()
        return True

    async def ask(self) -> Notice | None:
        answer = await self._get("/latest/meta-data/spot/instance-action")
        if answer is not None:
            action = _object(answer.text)
            kind = action.get("action", "interruption")
            return Notice(self.name, f"spot {kind}", _left(answer, action.get("time")))
        if await self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return Notice(self.name, "rebalance recommended", None, self._rebalance_drains)
        return None

    async def _get(self, path: str) -> _Answer | None:
        """None for 404, which is how this server says that there is nothing."""
        for _ in range(2):
            if not self._token or time.monotonic() - self._token_at > 0.8 * TOKEN_S:
                await self._renew()
            answer = await self._http.ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status == 200:
                return answer
            if answer.status == 404:
                return None
            if answer.status != 401:
                break
            self._token = ""  # expired, or the instance was stopped and started
        raise Unanswered(f"{path}: HTTP {answer.status}")

    async def _renew(self) -> None:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        answer = await self._http.ask("PUT", "/latest/api/token", ttl)
        if answer.status != 200 or not answer.text:
            raise Unanswered(f"/latest/api/token: HTTP {answer.status}")
        self._token, self._token_at = answer.text.strip(), time.monotonic()


class Gcp:
    """A preemptible or spot machine of Compute Engine."""

    name = "gcp"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        url: str = METADATA_URL,
        poll_s: float = GCP_POLL_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.poll_s = poll_s
        self._http = _Http(session, url, answer_s)
        self._etag = ""

    async def present(self) -> bool:
        await self._get("/computeMetadata/v1/instance/id")
        return True

    async def ask(self) -> Notice | None:
        path, wait_s = "/computeMetadata/v1/instance/preempted", 0.0
        if self._etag:
            # With the etag a change between two questions is not missed.
            path += f"?wait_for_change=true&timeout_sec={GCP_WAIT_S}&last_etag={self._etag}"
            wait_s = float(GCP_WAIT_S)
        try:
            answer = await self._get(path, wait_s=wait_s)
        except BaseException:
            self._etag = ""  # the next question is answered at once
            raise
        self._etag = answer.headers.get("etag", "")
        return Notice(self.name, "preempted") if answer.text.strip().upper() == "TRUE" else None

    async def _get(self, path: str, *, wait_s: float = 0.0) -> _Answer:
        answer = await self._http.ask("GET", path, {"Metadata-Flavor": "Google"}, wait_s=wait_s)
        if answer.status != 200:
            raise Unanswered(f"{path}: HTTP {answer.status}")
        if answer.headers.get("metadata-flavor") != "Google":
            raise Unanswered(f"{path}: not the metadata server of Google")
        return answer


class Azure:
    """A virtual machine of Azure, alone or in a scale set, whose other machines' events it sees."""

    name = "azure"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        url: str = METADATA_URL,
        poll_s: float = AZURE_POLL_S,
        answer_s: float = ANSWER_S,
        leave_for: Collection[str] = AZURE_EVENTS,
    ) -> None:
        self.poll_s = poll_s
        self._http = _Http(session, url, answer_s)
        self._leave_for = frozenset(leave_for)
        self._machine = ""
        self._turned_on = False

    async def present(self) -> bool:
        await self._named()
        return True

    async def ask(self) -> Notice | None:
        machine = await self._named()
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = await self._get(path, wait_s=0.0 if self._turned_on else AZURE_FIRST_S)
        self._turned_on = True
        events = _object(answer.text).get("Events")
        if not isinstance(events, list):
            raise Unanswered(f"{path}: no list of events")
        notices = [
            self._notice(event, answer)
            for event in events
            if isinstance(event, dict) and machine in _words(event.get("Resources"))
        ]
        # What makes us leave before what does not, and of those the one that comes first.
        notices.sort(key=lambda one: (not one.leave, one.left_s is not None, one.left_s or 0.0))
        return notices[0] if notices else None

    def _notice(self, event: dict[str, Any], answer: _Answer) -> Notice:
        kind = str(event.get("EventType", ""))
        left_s = _left(answer, event.get("NotBefore"))
        return Notice(self.name, f"{kind} scheduled", left_s, kind in self._leave_for)

    async def _named(self) -> str:
        """The name of this machine, which the list of events uses."""
        if not self._machine:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = (await self._get(path)).text.strip()
            if not self._machine:
                raise Unanswered(f"{path}: an empty name")
        return self._machine

    async def _get(self, path: str, *, wait_s: float = 0.0) -> _Answer:
        answer = await self._http.ask("GET", path, {"Metadata": "true"}, wait_s=wait_s)
        if answer.status != 200:
            raise Unanswered(f"{path}: HTTP {answer.status}")
        return answer


class WatchedFile:
    """A file whose appearance is the notice; its content may say how many seconds are left.

    What lies there when the daemon starts is of an earlier preemption and does not count until it
    changes: a disk that outlives its machine must not end every daemon that finds it.
    """

    name = "file"

    def __init__(self, path: Path, *, poll_s: float = FILE_POLL_S) -> None:
        self.poll_s = poll_s
        self.path = path
        self._old = self._mark()

    async def present(self) -> bool:
        return True

    async def ask(self) -> Notice | None:
        mark = self._mark()
        if mark is None:
            self._old = None
            return None
        if mark == self._old:
            return None
        try:
            left_s: float | None = float(self.path.read_bytes()[:64])
        except (OSError, ValueError):
            left_s = None
        if left_s is not None and not 0 <= left_s < 1e9:
            left_s = None
        return Notice(self.name, f"{self.path} appeared", left_s)

    def _mark(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _words(value: object) -> list[str]:
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _left(answer: _Answer, instant: object) -> float | None:
    """Seconds until an instant in ISO 8601 (AWS) or RFC 1123 (Azure), at least 0; None for no
    instant, which is also what a form means that we do not know."""
    if not isinstance(instant, str) or not instant:
        return None
    try:
        until = datetime.fromisoformat(instant)
    except ValueError:
        try:
            until = parsedate_to_datetime(instant)
        except ValueError:
            return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, answer.left_s(until))
