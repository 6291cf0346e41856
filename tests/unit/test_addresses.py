"""Scenario S22.

An address that cannot work is told at start; a join string that cannot work is never printed.
"""

from __future__ import annotations

import pytest

from moshpitd.daemon.addresses import (
    MAX_JOIN_ADDRESSES,
    Finding,
    address_warnings,
    is_loopback,
    join_string,
    parse_host_port,
    parse_multiaddr,
)

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
FAR = f"/ip4/8.8.8.8/tcp/31337/p2p/{PEER}"
LAN = f"/ip4/192.168.1.5/tcp/31337/p2p/{PEER}"
HERE = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"


def warnings(**changed: object) -> list[Finding]:
    network: dict[str, object] = {
        "listen": ["/ip4/0.0.0.0/tcp/31337"],
        "announce": [],
        "bootstrap": [],
        "link_listen": "0.0.0.0:31338",
        "link_announce": [],
    }
    return address_warnings(**(network | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("/ip4/8.8.8.8/tcp/31337", "8.8.8.8", 31337),
        ("/ip6/2001:4860::1/tcp/1", "2001:4860::1", 1),
        ("/dns4/seed.example.org/tcp/31337", "seed.example.org", 31337),
        ("/ip4/8.8.8.8/udp/31337/quic-v1", "8.8.8.8", 31337),
        (FAR, "8.8.8.8", 31337),
        (f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "8.8.8.8", 1),
    ],
)
def test_multiaddrs_that_are_read(text: str, host: str, port: int) -> None:
    address = parse_multiaddr(text)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8.8.8.8:31337", "not a multiaddr"),
        ("", "not a multiaddr"),
        ("/ip4/8.8.8.8", "not a multiaddr"),
        ("/ip4/8.8.8.256/tcp/1", "not an IP address"),
        ("/ip4/::1/tcp/1", "IPv6"),
        ("/ip6/8.8.8.8/tcp/1", "IPv4"),
        ("/ip5/8.8.8.8/tcp/1", "'ip5' is not one of"),
        ("/ip4/8.8.8.8/sctp/1", "neither tcp nor udp"),
        ("/ip4/8.8.8.8/tcp/70000", "not a port"),
        ("/ip4/8.8.8.8/tcp/-1", "not a port"),
        ("/ip4/8.8.8.8/tcp/²", "not a port"),
        ("/ip4/8.8.8.8/tcp/1/p2p/me", "not a PeerID"),
        ("/ip4/8.8.8.8/tcp/1/p2p", "not understood"),
        ("/ip4/8.8.8.8/tcp/1/bogus/x", "not understood"),
        ("/dns4/-bad-/tcp/1", "host name"),
    ],
)
def test_multiaddrs_that_are_refused_say_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_multiaddr(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8.8.8.8", "no port"),
        ("2001:db8::1:31338", "brackets"),
        ("[2001:db8::x]:1", "not an IP address"),
        ("10.0.0.256:1", "neither an IP address nor a host name"),
        ("host name:1", "neither an IP address nor a host name"),
        ("host:http", "not a port"),
        (":1", "neither"),
    ],
)
def test_link_addresses_that_are_refused_say_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_host_port(text)


def test_link_addresses_that_are_read() -> None:
    assert parse_host_port("[2001:4860::1]:31338").host == "2001:4860::1"
    assert parse_host_port("gpu-3.example.org:31338").port == 31338
    assert parse_host_port("10.0.0.7:0").port == 0


def test_the_defaults_have_nothing_to_say() -> None:
    assert warnings() == []
    assert warnings(bootstrap=[FAR]) == []
    assert warnings(listen=["/ip4/127.0.0.1/tcp/0"], link_listen="127.0.0.1:0") == []


@pytest.mark.parametrize(
    ("changed", "key", "reason"),
    [
        ({"announce": ["/ip4/8.8.4.4/tcp/0"]}, "network.announce", "port 0"),
        ({"announce": ["/ip4/0.0.0.0/tcp/31337"]}, "network.announce", "every interface"),
        ({"announce": ["/ip6/::/tcp/31337"]}, "network.announce", "every interface"),
        ({"announce": ["/ip4/224.0.0.1/tcp/31337"]}, "network.announce", "multicast"),
        ({"announce": ["/ip4/255.255.255.255/tcp/1"]}, "network.announce", "broadcast"),
        ({"announce": ["/ip6/fe80::1/tcp/1"]}, "network.announce", "link-local"),
        ({"link_announce": ["8.8.4.4:0"]}, "network.link_announce", "port 0"),
        ({"link_announce": ["0.0.0.0:31338"]}, "network.link_announce", "every interface"),
        ({"bootstrap": [f"/ip4/0.0.0.0/tcp/1/p2p/{PEER}"]}, "network.bootstrap", "every interface"),
        ({"bootstrap": [f"/ip4/8.8.8.8/tcp/0/p2p/{PEER}"]}, "network.bootstrap", "port 0"),
        (
            {"announce": ["/ip4/127.0.0.1/tcp/1"], "bootstrap": [FAR]},
            "network.announce",
            "would dial itself",
        ),
        (
            {"announce": ["/ip6/::ffff:127.0.0.1/tcp/1"], "bootstrap": [FAR]},
            "network.announce",
            "would dial itself",
        ),
        (
            {"link_announce": ["localhost:31338"], "bootstrap": [LAN]},
            "network.link_announce",
            "would dial itself",
        ),
    ],
)
def test_addresses_that_are_refused(changed: dict[str, object], key: str, reason: str) -> None:
    [finding] = warnings(**changed)
    assert finding.fatal
    assert finding.key == key
    assert reason in finding.reason
    assert finding.address in str(finding)


@pytest.mark.parametrize(
    ("changed", "key", "reason"),
    [
        ({"announce": ["/ip4/127.0.0.1/tcp/1"]}, "network.announce", "this machine only"),
        (
            {"announce": ["/ip4/127.0.0.1/tcp/1"], "bootstrap": [HERE]},
            "network.announce",
            "this machine only",
        ),
        (
            {"announce": ["/ip4/10.0.0.4/tcp/1"], "bootstrap": [FAR]},
            "network.announce",
            "a private address",
        ),
        (
            {"listen": ["/ip4/127.0.0.1/tcp/1"], "bootstrap": [FAR]},
            "network.listen",
            "not be dialled",
        ),
        (
            {"link_listen": "127.0.0.1:31338", "bootstrap": [LAN]},
            "network.link_listen",
            "not be dialled",
        ),
    ],
)
def test_addresses_that_are_warned_about(changed: dict[str, object], key: str, reason: str) -> None:
    [finding] = warnings(**changed)
    assert not finding.fatal
    assert finding.key == key
    assert reason in finding.reason


def test_the_refused_come_before_the_warned() -> None:
    found = warnings(announce=["/ip4/10.0.0.4/tcp/1", "/ip4/8.8.4.4/tcp/0"], bootstrap=[FAR])
    assert [finding.fatal for finding in found] == [True, False]


def test_loopback_in_all_its_spellings() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost", "a.localhost."):
        assert is_loopback(host), host
    for host in ("10.0.0.1", "0.0.0.0", "localhost.example.org", "8.8.8.8"):
        assert not is_loopback(host), host


def test_a_join_string_names_addresses_that_others_can_use() -> None:
    assert join_string([HERE, FAR]) == f"moshpitd run --bootstrap {FAR}"


@pytest.mark.parametrize(
    "addresses",
    [
        [],
        [HERE],
        ["/ip4/8.8.8.8/tcp/31337"],  # nobody can dial it without the PeerID
        [f"/ip4/8.8.8.8/tcp/0/p2p/{PEER}"],
        [f"/ip4/0.0.0.0/tcp/31337/p2p/{PEER}"],
        [f"/ip4/169.254.1.1/tcp/31337/p2p/{PEER}"],
        [f"/ip6/fe80::1/tcp/31337/p2p/{PEER}"],
        ["nonsense"],
    ],
)
def test_a_join_string_that_nobody_could_use_is_not_made(addresses: list[str]) -> None:
    assert join_string(addresses) == ""


def test_a_loopback_join_string_is_never_made() -> None:
    assert join_string([HERE]) == ""


def test_a_join_string_prefers_global_addresses_and_puts_docker_last() -> None:
    docker = f"/ip4/172.17.0.1/tcp/31337/p2p/{PEER}"
    line = join_string([docker, LAN, FAR, LAN.replace("1.5", "1.6")])
    offered = [word for word in line.split() if word.startswith("/")]
    assert offered[0] == FAR
    assert docker not in offered
    assert len(offered) == MAX_JOIN_ADDRESSES
