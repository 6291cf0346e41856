"""Which addresses others can use: checks of what an operator configures and of what is shown to
people.

One rule: an address that cannot work is named with its reason before anybody tries to dial it, and
never becomes part of a join string. Whether one works is proved by dialling back, not here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from moshpitd.errors import ConfigError

EXPECTED_MULTIADDR = "a multiaddr such as /ip4/203.0.113.7/tcp/4001"


def address_problem(multiaddr: str, *, announced: bool) -> str | None:
    """Why nobody on another host can dial this multiaddr, or None. `announced` ones need a real
    port.
    """
    words = multiaddr.strip("/").split("/")
    if len(words) < 4 or words[0] not in ("ip4", "ip6", "dns", "dns4", "dns6"):
        return f"{multiaddr} is no {EXPECTED_MULTIADDR.removeprefix('a ')}"
    if words[2] not in ("tcp", "udp") or not words[3].isdigit() or int(words[3]) > 65535:
        return f"{multiaddr} names no TCP or UDP port"
    if announced and int(words[3]) == 0:
        return f"{multiaddr} has port 0, which nobody can dial"
    return host_problem(words[1], announced=announced)


def host_problem(host: str, *, announced: bool) -> str | None:
    """Why nobody on another host can dial this host, or None."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        local = host == "localhost" or host.endswith(".localhost")
        return f"{host} is this host's name for itself" if local else None
    if address.is_loopback:
        return f"{host} is the loopback: only this host can dial it"
    if address.is_unspecified:
        return f"{host} is no address that can be dialled" if announced else None
    if address.is_multicast or (address.version == 4 and str(address) == "255.255.255.255"):
        return f"{host} is a multicast address"
    if address.is_link_local:
        return f"{host} is link-local: it works on one cable only"
    return None


def check_listen(multiaddrs: Sequence[str]) -> None:
    """Raise ConfigError for a listen address that is none. The loopback is allowed: see
    `warnings_for`.
    """
    for text in multiaddrs:
        problem = address_problem(text, announced=False)
        if problem and "loopback" not in problem and "itself" not in problem:
            raise ConfigError(problem, key="control.listen", expected=EXPECTED_MULTIADDR)


def check_announce(multiaddrs: Sequence[str]) -> None:
    """Raise ConfigError for an announced address that nobody could dial, with the reason."""
    for text in multiaddrs:
        problem = address_problem(text, announced=True)
        if problem and "loopback" not in problem and "itself" not in problem:
            raise ConfigError(problem, key="control.announce", expected=EXPECTED_MULTIADDR)


def warnings_for(visible: Sequence[str], bootstrap: Sequence[str]) -> list[str]:
    """What an operator should know at start: with a bootstrap address elsewhere, or none, a daemon
    that only this host can dial is no member of a swarm on two hosts.
    """
    problems = [address_problem(text, announced=True) for text in visible]
    if not visible or not all(problems):
        return []
    elsewhere = [text for text in bootstrap if address_problem(text, announced=True) is None]
    if bootstrap and not elsewhere:
        return []  # everything on this host: a demo or a test
    return [f"no other host can dial this daemon: {problem}" for problem in problems if problem]


def join_strings(visible: Iterable[str]) -> list[str]:
    """The multiaddrs that a daemon on another host can use, public ones first."""
    usable = [text for text in visible if address_problem(text, announced=True) is None]
    return sorted(usable, key=_is_private)


def _is_private(multiaddr: str) -> bool:
    try:
        return ipaddress.ip_address(multiaddr.strip("/").split("/")[1]).is_private
    except (ValueError, IndexError):
        return False
