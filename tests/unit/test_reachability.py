"""Reachability: one proof is enough, silence proves nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from moshpitd.daemon.reachability import Finding, Reachability


@dataclass
class Found:
    peer_id: str
    address: str
    cause: str = ""
    tried: bool = True


REFUSED = Found("p1", "a:1", "a:1: refused")
TIMEOUT = Found("p2", "b:2", "b:2: timeout")
REACHED = Found("p2", "a:1")
UNWILLING = Found("p3", "c:3", "c:3: not dialled, you are not connected from there", tried=False)


class Others:
    """What the others answer, one list per question."""

    def __init__(self, *answers: list[Found] | Exception) -> None:
        self.answers = list(answers)

    async def ask(self) -> list[Finding]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


async def test_nobody_reaches_us_until_one_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    others = Others(
        [UNWILLING], [REFUSED, UNWILLING, TIMEOUT], [REFUSED, TIMEOUT], OSError(), [], [REACHED]
    )
    reach = Reachability(others.ask, joined=lambda: True)
    await reach.check()
    assert reach.warnings() == []
    for _ in range(4):
        await reach.check()
        assert reach.warnings() == ["no peer could dial our links: a:1: refused; b:2: timeout"]
    assert len(caplog.records) == 1
    await reach.check()
    assert reach.warnings() == []
    assert len(caplog.records) == 2


async def test_one_proof_outweighs_what_others_could_not_reach() -> None:
    reach = Reachability(Others([REFUSED, REACHED]).ask, joined=lambda: True)
    await reach.check()
    assert reach.warnings() == []
