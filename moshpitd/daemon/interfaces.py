"""The addresses of this machine, for peers that are to dial its bulk links. One rule: what the
operator announced holds; otherwise only addresses that an interface has, and the loopback only
where nothing else is."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from moshpitd.daemon.addresses import Address, is_loopback

MAX_ADDRESSES = 16  # what a record carries
_SIOCGIFADDR = 0x8915
# Bridges and pairs of container engines: up on every host, and no way in from another one.
_INSIDE = ("docker", "br-", "veth", "virbr", "cni", "flannel", "lxc")
_ANY = ("0.0.0.0", "::", "")


def link_addresses(listen: Address, port: int, announce: Sequence[str]) -> tuple[str, ...]:
    """HOST:PORT under which others should dial our links, the best first. `port` is in use."""
    if announce:
        return tuple(announce[:MAX_ADDRESSES])
    if listen.host not in _ANY:
        return (_text(listen.host, port),)
    hosts = host_addresses(six=listen.host == "::")
    return tuple(_text(host, port) for host in hosts[:MAX_ADDRESSES])


def host_addresses(*, six: bool = False) -> list[str]:
    """IPv4 (and with `six` IPv6) addresses of the interfaces, those of container engines last; the
    loopback alone when there is no other."""
    found = [*_ipv4(), *(_ipv6() if six else ())]
    usable = [(name, host) for name, host in found if not is_loopback(host)]
    usable.sort(key=lambda entry: entry[0].startswith(_INSIDE))
    return list(dict.fromkeys(host for _, host in usable)) or ["127.0.0.1"]


def _ipv4() -> list[tuple[str, str]]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            question = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, question)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6() -> list[tuple[str, str]]:
    found = []
    with contextlib.suppress(OSError):  # no IPv6 in this kernel
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # global; link-local needs a zone that only this host knows
                found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
