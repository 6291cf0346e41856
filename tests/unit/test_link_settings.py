"""[links] and [limits]: what is refused, what the pool is told, and what peers and people hear."""

from __future__ import annotations

import pytest

from moshpitd.daemon import settings as settings_module
from moshpitd.daemon.carried import Carried
from moshpitd.daemon.network import link_options
from moshpitd.daemon.ongoing import run_hash
from moshpitd.daemon.pace import LEAST_MBPS, STEP, Pace
from moshpitd.daemon.settings import Settings
from moshpitd.errors import ConfigError
from moshpitd.net import watch
from moshpitd.net.frames import NO_RUN, FrameKind
from moshpitd.net.links import LinkOptions, Moved, Security

AUTHENTICATED = {"links.security": "authenticated"}


def refused(**environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.load(environ=environ)
    return str(caught.value)


def test_plain_streams_need_the_word_of_the_operator() -> None:
    words = refused(MOSHPITD_LINKS__SECURITY="authenticated")
    assert "MOSHPITD_LINKS__SECURITY" in words
    assert "network.trusted_network = true" in words
    trusted = Settings.load(environ={}, flags=AUTHENTICATED | {"network.trusted_network": True})
    assert link_options(trusted).security is Security.AUTHENTICATED
    assert link_options(Settings()).security is Security.TLS


@pytest.mark.parametrize(("text", "flows"), [("auto", 0), ("1", 1), ("8", 8)])
def test_flows_are_a_word_or_a_number(text: str, flows: int) -> None:
    loaded = Settings.load(environ={"MOSHPITD_LINKS__FLOWS": text})
    assert link_options(loaded) == LinkOptions(flows=flows)


@pytest.mark.parametrize("text", ["0", "9", "many", "true", "1.5", ""])
def test_other_flows_are_refused(text: str) -> None:
    words = refused(MOSHPITD_LINKS__FLOWS=text)
    assert "MOSHPITD_LINKS__FLOWS" in words
    assert '"auto", or a number from 1 to 8' in words


def test_the_bound_is_that_of_the_links() -> None:
    assert settings_module.FLOWS_MAX == watch.FLOWS_MAX


def test_caps_reach_the_links() -> None:
    loaded = Settings.load(
        environ={"MOSHPITD_LIMITS__UPLOAD_MBPS": "25", "MOSHPITD_LIMITS__DOWNLOAD_MBPS": "50.5"}
    )
    options = link_options(loaded)
    assert (options.upload_mbps, options.download_mbps) == (25, 50.5)
    assert "LIMITS__UPLOAD_MBPS" in refused(MOSHPITD_LIMITS__UPLOAD_MBPS="-1")


# -- what peers are told ---------------------------------------------------------------------------

MBPS = 1e6 / 8


def test_the_configured_rate_is_told_until_less_was_measured() -> None:
    pace = Pace(up_mbps=1000, down_mbps=400)
    assert (pace.up(None), pace.down(None)) == (1000, 400)
    assert (pace.up(94 * MBPS), pace.down(23.5 * MBPS)) == (94, 23.5)
    assert (pace.up(5000 * MBPS), pace.down(5000 * MBPS)) == (1000, 400)


def test_noise_is_no_news() -> None:
    pace = Pace(up_mbps=1000, down_mbps=1000)
    told = {pace.up(100 * MBPS * (1 + STEP * noise)) for noise in (0, 0.9, -0.9, 0.5, -0.2)}
    assert told == {100}
    assert pace.up(120 * MBPS) == pytest.approx(120)
    assert pace.up(950 * MBPS) == 1000, "that close to the limit is the limit, less its headers"


def test_what_is_told_is_bounded_below() -> None:
    assert Pace(up_mbps=1000, down_mbps=1000).up(1.0) == LEAST_MBPS


# -- what the metrics are told ---------------------------------------------------------------------


def test_only_what_is_new_is_told_by_run_and_kind() -> None:
    told: list[tuple[str, str, bool, int]] = []
    carried = Carried(lambda *what: told.append(what))
    part = Moved(run_hash("digits"), FrameKind.CONTRIBUTION, True)
    moved = {
        part: 100,
        Moved(run_hash("digits"), FrameKind.SNAPSHOT, False): 7,
        Moved(run_hash("not here"), FrameKind.RESULT, False): 1000,
        Moved(NO_RUN, FrameKind.RESULT, False): 1000,
    }
    control = {("digits", True): 3}
    carried.update(["digits"], moved, control)
    carried.update(["digits"], moved, control)
    assert sorted(told) == [
        ("digits", "control", True, 3),
        ("digits", "part", True, 100),
        ("digits", "snapshot", False, 7),
    ]
    carried.update(["digits"], moved | {part: 150}, control)
    assert told[3:] == [("digits", "part", True, 50)]
