"""A LocalSwarm whose every connection between nodes goes through a proxy: control messages, the
directory and the bulk links. One rule: nodes never learn each other's real ports, so that nothing
goes around the network that a test makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from moshpitd.testing.local_swarm import LocalSwarm
from moshpitd.testing.proxy import Path, Proxies


@dataclass(slots=True)
class Network:
    """The paths to each node, by its index. Of a connection, "there" is towards the one that was
    dialled."""

    proxies: Proxies
    control: list[Path] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)

    def to(self, target: str) -> Path:
        """One more path, for something beside the nodes that is to meet the same delays."""
        path = self.proxies.to(target)
        self.others.append(path)
        return path

    def slow(self, delay_s: float, bytes_per_s: float = float("inf")) -> None:
        """The same one-way delay between all; `bytes_per_s` of each path and direction."""
        for path in (*self.control, *self.links, *self.others):
            path.slow(delay_s, bytes_per_s)

    @property
    def link_bytes(self) -> int:
        """Everything that the bulk links carried so far, with TLS."""
        return sum(path.there.passed + path.back.passed for path in self.links)


@asynccontextmanager
async def proxied_swarm(
    ports: Sequence[int], **options: Any
) -> AsyncIterator[tuple[LocalSwarm, Network]]:
    """A node for every two of `ports`, which nobody uses, that found each other over an undelayed
    network. `options` as of `LocalSwarm`."""
    with Proxies() as proxies:
        network = Network(proxies)
        async with LocalSwarm(0, **options) as swarm:
            for control, links in zip(ports[::2], ports[1::2], strict=True):
                network.control.append(proxies.to(f"127.0.0.1:{control}"))
                network.links.append(proxies.to(f"127.0.0.1:{links}"))
                await swarm.add(
                    network__listen=[f"/ip4/127.0.0.1/tcp/{control}"],
                    network__announce=[network.control[-1].multiaddr],
                    network__link_listen=f"127.0.0.1:{links}",
                    network__link_announce=[network.links[-1].address],
                )
            await swarm.together()
            yield swarm, network
