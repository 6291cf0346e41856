"""S22: an address that nobody can dial is named with its reason, and never becomes a join
string.
"""

from __future__ import annotations

import pytest

from moshpitd.errors import ConfigError
from moshpitd.net.reach import (
    address_problem,
    check_announce,
    check_listen,
    host_problem,
    join_strings,
    warnings_for,
)

PUBLIC = "/ip4/203.0.114.7/tcp/4001/p2p/12D3"
PRIVATE = "/ip4/10.1.2.3/tcp/4001/p2p/12D3"
LOOPBACK = "/ip4/127.0.0.1/tcp/4001/p2p/12D3"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/ip4/203.0.114.7/tcp/0", "port 0"),
        ("/ip4/0.0.0.0/tcp/4001", "no address that can be dialled"),
        ("/ip4/224.0.0.1/tcp/4001", "multicast"),
        ("/ip4/255.255.255.255/tcp/4001", "multicast"),
        ("/ip4/169.254.1.1/tcp/4001", "link-local"),
        ("/ip6/fe80::1/tcp/4001", "link-local"),
        ("/ip4/203.0.114.7/tcp/99999", "no TCP or UDP port"),
        ("203.0.114.7:4001", "is no multiaddr"),
        ("", "is no multiaddr"),
    ],
)
def test_an_announced_address_that_cannot_work_is_refused(address: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_announce([PUBLIC, address])
    assert words in str(caught.value)


def test_what_may_be_announced_and_listened_on() -> None:
    check_announce(
        [PUBLIC, PRIVATE, "/dns4/node.example/tcp/4001", "/ip4/203.0.114.7/udp/1/quic-v1"]
    )
    check_announce([LOOPBACK])  # a demo on one host; `warnings_for` speaks up on two
    check_listen(["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/4001", LOOPBACK])
    with pytest.raises(ConfigError, match="is no multiaddr"):
        check_listen(["0.0.0.0:4001"])


def test_a_join_string_works_from_another_host_or_does_not_exist() -> None:
    assert join_strings([LOOPBACK, PRIVATE, PUBLIC]) == [PUBLIC, PRIVATE]
    assert join_strings([LOOPBACK, "/ip6/::1/tcp/1", "/dns4/localhost/tcp/1"]) == []


def test_loopback_in_a_swarm_elsewhere_is_warned_about() -> None:
    assert "loopback" in warnings_for([LOOPBACK], [PUBLIC])[0]
    assert "loopback" in warnings_for([LOOPBACK], [])[0]
    assert warnings_for([LOOPBACK], [LOOPBACK]) == []
    assert warnings_for([LOOPBACK, PRIVATE], [PUBLIC]) == []


def test_hosts_of_links() -> None:
    assert host_problem("203.0.114.7", announced=True) is None
    assert host_problem("0.0.0.0", announced=False) is None
    assert "this host's name" in str(host_problem("localhost", announced=True))
    assert address_problem("/ip4/127.0.0.1/tcp/1", announced=True) is not None
