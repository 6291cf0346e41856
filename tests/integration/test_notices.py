"""Preemption notices against metadata servers on loopback: ill ones, slow ones, and then the
notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from moshpitd.daemon.notices import LONGEST_S, RESERVE_S, Notices, budget_s
from moshpitd.daemon.notices_clouds import Notice
from moshpitd.daemon.settings import NoticesSection
from tests.kit.clouds import AwsMetadata, AzureMetadata, Cloud, GcpMetadata, Mood
from tests.kit.swarm import until

ANSWER_S = 0.2
QUICK_S = 10.0  # a bound for what takes milliseconds; a question to gcp that hangs, 5 s


class Listener:
    """What a watch has heard."""

    def __init__(self) -> None:
        self.heard: list[Notice] = []

    async def first(self) -> Notice:
        await until(lambda: bool(self.heard), timeout_s=QUICK_S, what="a notice")
        return self.heard[0]


@asynccontextmanager
async def watching(**settings: Any) -> AsyncIterator[tuple[Notices, Listener]]:
    listener = Listener()
    section = NoticesSection(**({"poll_s": 0.01} | settings))
    notices = Notices(section, listener.heard.append, answer_s=ANSWER_S, probe_again_s=0.01)
    notices.start()
    try:
        yield notices, listener
    finally:
        await notices.stop()


def action(in_s: float, *, clock_ahead_s: float = 0.0) -> str:
    at = datetime.now(UTC) + timedelta(seconds=in_s + clock_ahead_s)
    return f'{{"action": "terminate", "time": "{at.strftime("%Y-%m-%dT%H:%M:%SZ")}"}}'


def preempt(cloud: Cloud) -> None:
    """The notice, in the words of each cloud."""
    if isinstance(cloud, AwsMetadata):
        cloud.action = action(120)
    elif isinstance(cloud, GcpMetadata):
        cloud.preempt()
    elif isinstance(cloud, AzureMetadata):
        cloud.schedule("Preempt", format_datetime(datetime.now(UTC) + timedelta(seconds=30), True))


CLOUDS: dict[str, Callable[[], Cloud]] = {
    "aws": AwsMetadata,
    "gcp": GcpMetadata,
    "azure": AzureMetadata,
}
LEFT = {"aws": (110.0, 121.0), "gcp": None, "azure": (25.0, 31.0)}
ILLNESSES: list[list[Mood]] = [[], [503, 503], ["hang"], ["reset", 500], [429, "hang", 503]]


@pytest.mark.parametrize("broken", ILLNESSES, ids=str)
@pytest.mark.parametrize("provider", CLOUDS)
async def test_the_notice_is_heard_once_whatever_came_before(
    provider: str, broken: list[Mood]
) -> None:
    async with CLOUDS[provider]() as cloud:
        settings = {"provider": provider, "url": cloud.url}
        async with watching(**settings) as (notices, listener):
            await until(lambda: len(cloud.asked) >= 2, timeout_s=QUICK_S, what="asked")
            assert listener.heard == []
            cloud.broken = list(broken)
            if isinstance(cloud, GcpMetadata):
                cloud.wake()  # it asks again, and meets the illness
            await until(lambda: not cloud.broken, timeout_s=QUICK_S, what="was ill")
            preempt(cloud)
            notice = await listener.first()
            assert (notice.source, notice.leave) == (provider, True)
            expected = LEFT[provider]
            if expected is None:
                assert notice.left_s is None
            else:
                assert notice.left_s is not None
                assert expected[0] < notice.left_s <= expected[1]
            asked = len(cloud.asked)
            await until(lambda: len(cloud.asked) > asked, timeout_s=QUICK_S, what="asked on")
            assert len(listener.heard) == 1
            assert notices.trouble == ""


@pytest.mark.parametrize("provider", CLOUDS)
@pytest.mark.parametrize("mood", [503, "hang", 403])
async def test_an_ill_server_is_a_warning_and_never_a_notice(provider: str, mood: Mood) -> None:
    async with CLOUDS[provider]() as cloud:
        cloud.broken = [mood] * 1000
        async with watching(provider=provider, url=cloud.url) as (notices, listener):
            await until(lambda: notices.trouble != "", timeout_s=QUICK_S, what="the trouble")
            assert notices.trouble.startswith(f"preemption notices of {provider}: ")
            assert listener.heard == []
            cloud.recover()
            await until(lambda: notices.trouble == "", timeout_s=QUICK_S, what="well again")
            assert listener.heard == []


async def test_nobody_there_at_all_is_a_warning() -> None:
    async with watching(provider="gcp", url="http://127.0.0.1:9") as (notices, listener):
        await until(lambda: notices.trouble != "", timeout_s=QUICK_S, what="the trouble")
        assert listener.heard == []


# -- aws --------------------------------------------------------------------------------------


async def test_an_expired_token_is_renewed_and_the_question_asked_again() -> None:
    async with (
        AwsMetadata() as cloud,
        watching(provider="aws", url=cloud.url) as (notices, listener),
    ):
        await until(lambda: len(cloud.asked) > 5, timeout_s=QUICK_S, what="asked")
        assert cloud.asked.count("PUT /latest/api/token") == 1
        cloud.expire()
        await until(
            lambda: cloud.asked.count("PUT /latest/api/token") == 2,
            timeout_s=QUICK_S,
            what="a new token",
        )
        assert notices.trouble == ""
        preempt(cloud)
        assert (await listener.first()).what == "spot terminate"


async def test_the_time_left_is_by_the_clock_of_the_server() -> None:
    """S11: this machine's clock is 90 s off; the time in the notice is the cloud's."""
    async with AwsMetadata() as cloud:
        cloud.clock_ahead_s = -90.0
        cloud.action = action(120, clock_ahead_s=-90.0)
        async with watching(provider="aws", url=cloud.url) as (_, listener):
            left_s = (await listener.first()).left_s
    assert left_s is not None
    assert 110 < left_s <= 121


@pytest.mark.parametrize("text", ["", "soon", "[]", '{"action": "stop", "time": "tomorrow"}'])
async def test_a_notice_in_unknown_words_is_a_notice_without_a_time(text: str) -> None:
    async with AwsMetadata() as cloud:
        cloud.action = text
        async with watching(provider="aws", url=cloud.url) as (_, listener):
            notice = await listener.first()
    assert (notice.left_s, notice.leave) == (None, True)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_rebalance_recommendation_is_told_and_an_interruption_still_heard(
    drains: bool,
) -> None:
    async with AwsMetadata() as cloud:
        cloud.rebalance = '{"noticeTime": "2026-11-05T08:22:00Z"}'
        async with watching(provider="aws", url=cloud.url, rebalance_drains=drains) as (_, heard):
            assert await heard.first() == Notice("aws", "rebalance recommended", None, drains)
            preempt(cloud)
            await until(lambda: len(heard.heard) == 2, timeout_s=QUICK_S, what="the second")
            assert heard.heard[1].leave


# -- gcp --------------------------------------------------------------------------------------


async def test_gcp_is_asked_to_answer_when_the_value_changes() -> None:
    async with GcpMetadata() as cloud, watching(provider="gcp", url=cloud.url) as (_, listener):
        await until(lambda: bool(cloud.waited), timeout_s=QUICK_S, what="a question waits")
        assert "last_etag=e0" in cloud.waited[0]
        assert len(cloud.asked) == 2  # one for the value of now, one that waits
        cloud.preempt()
        assert (await listener.first()).what == "preempted"


async def test_an_answer_of_somebody_else_s_server_does_not_count() -> None:
    async with GcpMetadata() as cloud:
        cloud.flavored = False
        cloud.preempt()
        async with watching(provider="gcp", url=cloud.url) as (notices, listener):
            await until(lambda: notices.trouble != "", timeout_s=QUICK_S, what="the trouble")
            assert "not the metadata server of Google" in notices.trouble
            assert listener.heard == []


# -- azure ------------------------------------------------------------------------------------


async def test_events_of_other_machines_are_not_ours() -> None:
    async with AzureMetadata("node_3") as cloud:
        cloud.schedule("Preempt", "", "node_1", "node_2")
        async with watching(provider="azure", url=cloud.url) as (_, listener):
            await until(lambda: len(cloud.asked) > 5, timeout_s=QUICK_S, what="asked")
            assert listener.heard == []
            cloud.schedule("Terminate", "", "node_2", "node_3")
            notice = await listener.first()
    assert (notice.what, notice.left_s) == ("Terminate scheduled", None)


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("Preempt", True),
        ("Terminate", True),
        ("Reboot", True),
        ("Redeploy", True),
        ("Freeze", False),
    ],
)
async def test_what_azure_schedules_and_what_is_a_reason_to_go(kind: str, leaves: bool) -> None:
    async with AzureMetadata() as cloud:
        cloud.schedule(kind, format_datetime(datetime.now(UTC) + timedelta(seconds=900), True))
        async with watching(provider="azure", url=cloud.url) as (_, listener):
            notice = await listener.first()
    assert (notice.what, notice.leave) == (f"{kind} scheduled", leaves)
    assert notice.left_s == pytest.approx(900, abs=10)


async def test_of_several_events_the_one_that_comes_first_counts() -> None:
    async with AzureMetadata() as cloud:
        now = datetime.now(UTC)
        for kind, in_s in (("Freeze", 5), ("Reboot", 900), ("Preempt", 30), ("Terminate", 300)):
            cloud.schedule(kind, format_datetime(now + timedelta(seconds=in_s), True))
        async with watching(provider="azure", url=cloud.url) as (_, listener):
            assert (await listener.first()).what == "Preempt scheduled"


async def test_a_freeze_can_be_made_a_reason_to_go() -> None:
    async with AzureMetadata() as cloud:
        cloud.schedule("Freeze", "")
        settings = {"provider": "azure", "url": cloud.url, "azure_events": ["Freeze"]}
        async with watching(**settings) as (_, listener):
            assert (await listener.first()).leave


# -- a file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "left_s"),
    [("", None), ("40", 40.0), ("12.5\n", 12.5), ("soon", None), ("-1", None), ("nan", None)],
)
async def test_a_file_that_appears_is_a_notice(
    tmp_path: Path, text: str, left_s: float | None
) -> None:
    file = tmp_path / "preempted"
    async with watching(provider="file", file=str(file)) as (notices, listener):
        await until(lambda: notices.source == "file", timeout_s=QUICK_S, what="watched")
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)
        notice = await listener.first()
    assert notice == Notice("file", f"{file} appeared", left_s)


async def test_a_file_of_an_earlier_preemption_does_not_count_until_it_changes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "preempted"
    file.write_text("30")
    async with watching(provider="file", file=str(file)) as (notices, listener):
        await until(lambda: notices.source == "file", timeout_s=QUICK_S, what="watched")
        await asyncio.sleep(0.1)
        assert listener.heard == []
        file.unlink()
        await asyncio.sleep(0.1)
        file.write_text("30")
        assert (await listener.first()).left_s == 30.0


# -- auto -------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", CLOUDS)
async def test_auto_finds_the_cloud_that_answers(provider: str) -> None:
    async with (
        CLOUDS[provider]() as cloud,
        watching(provider="auto", url=cloud.url) as (notices, listener),
    ):
        await until(lambda: notices.source == provider, timeout_s=QUICK_S, what="found")
        preempt(cloud)
        assert (await listener.first()).source == provider


async def test_auto_on_a_machine_of_no_cloud_asks_nobody_for_long_and_warns_of_nothing() -> None:
    async with watching(provider="auto", url="http://127.0.0.1:9") as (notices, listener):
        task = notices._task
        assert task is not None
        await asyncio.wait_for(task, QUICK_S)
        assert (notices.source, notices.trouble, listener.heard) == ("", "", [])


async def test_none_asks_nobody() -> None:
    async with AwsMetadata() as cloud:
        preempt(cloud)
        async with watching(provider="none", url=cloud.url) as (notices, _):
            await asyncio.sleep(0.1)
            assert notices._task is None
            assert cloud.asked == []


def test_the_budget_ends_before_the_machine_does() -> None:
    assert budget_s(None, 25.0) == 25.0
    assert budget_s(120.0, 25.0) == 120.0 - RESERVE_S
    for left_s in (0.0, 1.0, 4.0, 30.0, 900.0):
        assert budget_s(left_s, 25.0) <= left_s
    assert budget_s(4.0, 25.0) == 2.0
    assert LONGEST_S < 30.0
