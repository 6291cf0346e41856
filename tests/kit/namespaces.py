"""Network namespaces for tests, and why there are none. One rule: a test that needs them is skipped
with the kernel's own words, and leaves none behind (`moshpitd.cli.namespaces` sees to both)."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from moshpitd.cli.namespaces import Line, Namespace, missing, namespaces
from tests.kit.processes import DaemonProcess

PORT = 4001  # a namespace's ports are its own

Make = Callable[..., list[Namespace]]


@pytest.fixture
def lines() -> Iterator[Make]:
    """Make namespaces with these lines, `loss` at will; gone after the test."""
    with ExitStack() as stack:

        def make(wanted: Sequence[Line], *, loss: float = 0.0) -> list[Namespace]:
            reason = missing(loss=loss > 0)
            if reason:
                pytest.skip(reason)
            return stack.enter_context(namespaces(wanted, loss=loss))

        yield make


class Inside(DaemonProcess):
    """`moshpitd run` in a namespace, at its address, told what its line carries. Trainers reach it
    from anywhere: a Unix socket is a file."""

    def __init__(
        self,
        home: Path,
        place: Namespace,
        *,
        bootstrap: tuple[str, ...] = (),
        settings: Sequence[str] = (),
    ) -> None:
        rates = (
            f"network.up_mbps={place.line.up_mbps}",
            f"network.down_mbps={place.line.down_mbps}",
        )
        super().__init__(home, port=PORT, bootstrap=bootstrap, settings=(*rates, *settings))
        self._place = place

    @property
    def argv(self) -> list[str]:
        own = [word.replace("127.0.0.1", self._place.host) for word in super().argv]
        return [*self._place.within, *own]

    @property
    def address(self) -> str:
        """Known before it runs, so that all can start at once."""
        return f"/ip4/{self._place.host}/tcp/{PORT}/p2p/{self.peer_id}"


def names() -> list[str]:
    """All namespaces of this machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line]


@contextlib.contextmanager
def daemons(homes: Path, places: Sequence[Namespace], *settings: str) -> Iterator[list[Inside]]:
    """One per namespace, up, told of the first."""
    with ExitStack() as stack:
        found: list[Inside] = []
        for index, place in enumerate(places):
            bootstrap = tuple(one.address for one in found[:1])
            one = Inside(homes / str(index), place, bootstrap=bootstrap, settings=settings)
            stack.callback(one.end)
            one.start()
            found.append(one)
        for one in found:
            one.up()
        yield found
