"""Which addresses other hosts can use, decided before anything is opened.

One rule: pure functions over text; nothing here resolves a name or touches a socket, so the answer
is the same on every host and in every test.

An address that nobody can dial costs its peers a timeout in every round and costs the operator an
evening. The cases that can be told from the text alone (port 0, 0.0.0.0, a loopback address offered
to another host) are therefore told at start, with the address and the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address

MAX_JOIN_ADDRESSES = 3  # one line of a terminal; the first that answers is enough
_DOCKER_BRIDGE = IPv4Network("172.17.0.0/16")  # on every host the same, so no way in
_HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}")  # base58btc of a multihash


@dataclass(frozen=True, slots=True)
class Address:
    """One dialable place: a host (IP literal or name), a port, and whose it is if that is said."""

    text: str
    host: str
    port: int
    peer_id: str = ""
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one address of one setting. `fatal`: refused at start, else a warning."""

    key: str
    address: str
    reason: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.address}: {self.reason}"


def parse_multiaddr(text: str) -> Address:
    """`/ip4/HOST/tcp/PORT[/p2p/PEER_ID]` and its relatives (ip6, dns*, udp with quic).

    Raises `ValueError` with the reason.
    """
    words = text.split("/")
    if len(words) < 5 or words[0]:
        raise ValueError("not a multiaddr, which looks like /ip4/198.51.100.7/tcp/31337")
    kind, host, transport, port_text, *rest = words[1:]
    if kind not in _HOST_KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(_HOST_KINDS)}")
    _check_host(host, kind)
    if transport not in ("tcp", "udp"):
        raise ValueError(f"{transport!r} is neither tcp nor udp")
    port = _port(port_text)
    while rest and rest[0] in ("quic", "quic-v1", "ws", "wss", "webtransport"):
        rest = rest[1:]
    peer_id, relayed = "", False
    while rest:
        match rest:
            case ["p2p" | "ipfs", name, *more]:
                if not _PEER_ID.fullmatch(name):
                    raise ValueError(f"{name!r} is not a PeerID")
                peer_id, rest = name, more
            case ["p2p-circuit", *more]:
                relayed, peer_id, rest = True, "", more
            case _:
                raise ValueError(f"/{'/'.join(rest)} is not understood here")
    return Address(text, host, port, peer_id, relayed)


def is_peer_id(text: str) -> bool:
    return _PEER_ID.fullmatch(text) is not None


def parse_host_port(text: str) -> Address:
    """`HOST:PORT` or `[IPv6]:PORT`. Raises `ValueError` with the reason."""
    host, colon, port_text = text.rpartition(":")
    if not colon:
        raise ValueError("has no port, which looks like 198.51.100.7:31338")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        _check_host(host, "ip6")
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets: [2001:db8::7]:31338")
    else:
        _check_host(host, "ip4 or name")
    return Address(text, host, _port(port_text))


def address_warnings(
    *,
    listen: Sequence[str],
    announce: Sequence[str],
    bootstrap: Sequence[str],
    link_listen: str,
    link_announce: Sequence[str],
) -> list[Finding]:
    """Every address of the `[network]` section that cannot work, the fatal ones first."""
    foreign = [entry for entry in _parsed(bootstrap) if not is_loopback(entry.host)]
    findings = [
        finding
        for key, addresses in (
            ("network.announce", _parsed(announce)),
            ("network.link_announce", _parsed(link_announce, parse_host_port)),
        )
        for address in addresses
        for finding in _offered(key, address, foreign)
    ]
    findings += [
        Finding("network.bootstrap", entry.text, reason, fatal=True)
        for entry in _parsed(bootstrap)
        if (reason := _undialable(entry))
    ]
    if foreign:
        for key, bound, offered in (
            ("network.listen", _parsed(listen), announce),
            ("network.link_listen", _parsed([link_listen], parse_host_port), link_announce),
        ):
            if bound and not offered and all(is_loopback(address.host) for address in bound):
                reason = (
                    f"only this machine can dial it, but {foreign[0].text} is another host: this "
                    f"peer can dial out and not be dialled"
                )
                findings.append(Finding(key, bound[0].text, reason, fatal=False))
    return sorted(findings, key=lambda finding: not finding.fatal)


def join_string(addresses: Sequence[str]) -> str:
    """The command with which another host joins through us; "" when it could use no address.

    `addresses` are our control addresses with /p2p/. Loopback is never offered, not even marked as
    such: lines like this one are copied to other hosts. `status` shows all addresses.
    """
    usable = [
        address
        for address in _parsed(addresses)
        if address.peer_id and not _undialable(address) and not _needs_zone(address.host)
    ]
    far = sorted((a for a in usable if not is_loopback(a.host)), key=_closeness)
    return _command(far[:MAX_JOIN_ADDRESSES]) if far else ""


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 (also mapped) and the name localhost."""
    if ("." + host.rstrip(".").lower()).endswith(".localhost"):
        return True
    try:
        return _unmapped(host).is_loopback
    except ValueError:
        return False


def _command(addresses: Iterable[Address]) -> str:
    return "moshpitd run " + " ".join(f"--bootstrap {address.text}" for address in addresses)


def _offered(key: str, address: Address, foreign: Sequence[Address]) -> Iterable[Finding]:
    """What is wrong with telling other peers to dial `address`."""
    if reason := _undialable(address):
        yield Finding(key, address.text, reason, fatal=True)
    elif is_loopback(address.host) and foreign:
        reason = (
            f"a loopback address, but {foreign[0].text} is another host, which would dial itself"
        )
        yield Finding(key, address.text, reason, fatal=True)
    elif is_loopback(address.host):
        yield Finding(key, address.text, "a loopback address: this machine only", fatal=False)
    elif _needs_zone(address.host):
        reason = "a link-local address: it means something else on every host"
        yield Finding(key, address.text, reason, fatal=True)
    elif _is_private(address.host) and any(_is_global(entry.host) for entry in foreign):
        reason = (
            "a private address, but the bootstrap peers are on the internet: no peer outside this "
            "network can dial it"
        )
        yield Finding(key, address.text, reason, fatal=False)


def _undialable(address: Address) -> str:
    """Why nobody at all can dial it; empty if somebody may."""
    if address.port == 0:
        return "port 0 means any free port when listening and nothing when dialling"
    try:
        ip = _unmapped(address.host)
    except ValueError:
        return ""
    if ip.is_unspecified:
        return f"{address.host} means every interface when listening and no host when dialling"
    if ip.is_multicast or address.host == "255.255.255.255":
        return "a multicast or broadcast address is no host"
    return ""


def _needs_zone(host: str) -> bool:
    try:
        return _unmapped(host).is_link_local
    except ValueError:
        return False


def _is_private(host: str) -> bool:
    try:
        return _unmapped(host).is_private
    except ValueError:
        return False


def _is_global(host: str) -> bool:
    try:
        return _unmapped(host).is_global
    except ValueError:
        return False


def _closeness(address: Address) -> int:
    """Sorting key: names, which somebody chose, then global, then private addresses."""
    try:
        ip = _unmapped(address.host)
    except ValueError:
        return 0
    if ip.is_global:
        return 1
    return 3 if ip.version == 4 and ip in _DOCKER_BRIDGE else 2


def _unmapped(host: str) -> IPv4Address | IPv6Address:
    """The IP of `host`, with ::ffff:1.2.3.4 read as 1.2.3.4. Raises `ValueError` for a name."""
    ip = ip_address(host)
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


def _check_host(host: str, kind: str) -> None:
    if kind in ("ip4", "ip6"):
        try:
            version = ip_address(host).version
        except ValueError:
            raise ValueError(f"{host!r} is not an IP address") from None
        if version != int(kind[2]):
            raise ValueError(f"{host!r} is an IPv{version} address, not {kind}")
    elif not _is_name(host):
        raise ValueError(f"{host!r} is neither an IP address nor a host name")


def _is_name(host: str) -> bool:
    """A host name or an IPv4 literal; 10.0.0.256 is neither, though its letters fit a name."""
    if len(host) > 253 or not _NAME.fullmatch(host):
        return False
    if not host.rstrip(".").rpartition(".")[2].isdigit():
        return True
    try:
        return ip_address(host).version == 4
    except ValueError:
        return False


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise ValueError(f"{text!r} is not a port, which is 0..65535")
    return int(text)


def _parsed(
    texts: Iterable[str], parse: Callable[[str], Address] = parse_multiaddr
) -> list[Address]:
    """Those of `texts` that are addresses; the settings refuse the others by themselves."""
    found = []
    for text in texts:
        try:
            found.append(parse(text))
        except ValueError:
            continue
    return found
