"""Several flows of one link: nothing is lost or doubled between them, and the loss of one is the
loss of the link unless both sides said farewell.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from moshpitd.net.channel import Channel
from moshpitd.net.frames import ASIDE, SEGMENT_BYTES, FrameKind, Header
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkOptions
from moshpitd.net.sockets import NEAR_WINDOW_BYTES
from moshpitd.net.tls import Credentials
from moshpitd.net.traffic import RUNS_MAX
from moshpitd.net.watch import FLOWS_MAX
from tests.kit.link_sides import LIMITS, PATIENCE_S, Side, constant

FLOWS = 3


@dataclass
class Net:
    """Two pools that want FLOWS flows, `small` with the smaller PeerID, and a third key."""

    small: Side
    large: Side
    third: Identity

    def wide(self) -> None:
        """Link them; some traffic makes the watch add the flows."""
        self.small.dial(self.large).result(PATIENCE_S)
        self.small.send(self.large, b"first")
        eventually(lambda: widths(self) == (FLOWS, FLOWS))


@pytest.fixture
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    folder = tmp_path_factory.mktemp("keys")
    keys = [Identity.load_or_create(folder / name) for name in "abc"]
    keys.sort(key=lambda identity: identity.peer_id)
    options = LinkOptions(flows=FLOWS)
    made = Net(Side(keys[0], options=options), Side(keys[1], options=options), keys[2])
    yield made
    for side in (made.small, made.large):
        side.gate.set()
        side.pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("link-")]


def widths(net: Net) -> tuple[int, ...]:
    return tuple(one.flows for side in (net.small, net.large) for one in side.pool.stats())


def eventually(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 100)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came to that")


def further_flow(net: Net, token: bytes, number: int) -> tuple[Channel, str]:
    """Ask `large` by hand, as the third peer, to let a flow join; its answer."""
    proven = Credentials(net.third).connect(net.large.address, expected=None, timeout_s=5)
    channel = Channel(proven.stream, payload_bytes_max=1 << 20)
    hello = Header(FrameKind.HELLO, run=b"sessionX", group=token, part=number)
    channel.send_text(hello, net.large.id)
    received = channel.receive(5.0)
    assert received is not None
    return channel, received[0].kind.name + " " + bytes(received[1]).decode()


def test_frames_of_all_flows_arrive_once_each_both_ways(net: Net) -> None:
    net.wide()
    for side, other in ((net.small, net.large), (net.large, net.small)):
        for part in range(80):
            side.send(other, b"%d" % part * 30_000, part=part)
    net.large.wait(lambda: len(net.large.frames) == 81)
    net.small.wait(lambda: len(net.small.frames) == 80)
    arrived = [(h.part, p) for _, h, p in net.large.frames if p != b"first"]
    assert sorted(arrived) == [(part, b"%d" % part * 30_000) for part in range(80)]
    assert sorted(h.part for _, h, _ in net.small.frames) == list(range(80))
    assert net.small.names() == net.large.names() == ["up"]


def test_all_flows_carry(net: Net) -> None:
    """While one flow's reader is held up, the others go on."""
    net.wide()
    net.large.wait(lambda: net.large.frames)
    net.large.gate.clear()
    for part in range(40):
        net.small.send(net.large, bytes(1 << 20), part=part)
    writers = {f"link-write-{net.large.id[-6:]}-{number}" for number in range(FLOWS)}
    assert writers <= {thread.name for thread in threading.enumerate()}
    [link] = net.large.pool._links
    # A reader that waits in the gate has counted its frame: one per flow, and none has gone on.
    eventually(lambda: [flow.counts().bytes_in > 1 << 20 for flow in link._flows] == [True] * FLOWS)
    net.large.gate.set()
    net.large.wait(lambda: len(net.large.frames) == 41)


def test_the_loss_of_one_flow_is_the_loss_of_the_link(net: Net) -> None:
    net.wide()
    [link] = net.small.pool._links
    link._flows[1]._channel.shut()
    for side in (net.small, net.large):
        side.wait(side.lost)
        assert side.names() == ["up", "lost"]
        assert side.pool.stats() == []


def test_flows_that_are_taken_away_lose_nothing(net: Net) -> None:
    net.wide()
    [link] = net.small.pool._links
    net.small.pool._watch._flows = 1  # or it would add them again at once
    for part in range(60):
        net.small.send(net.large, bytes(100_000), part=part)
    link.shrink()
    for part in range(60, 90):
        net.small.send(net.large, bytes(100_000), part=part)
    net.large.wait(lambda: len(net.large.frames) == 91)
    eventually(lambda: widths(net) == (1, 1))
    assert sorted(h.part for _, h, p in net.large.frames if p != b"first") == list(range(90))
    assert net.small.names() == net.large.names() == ["up"]
    heard = net.large.pool.heard(net.small.id)
    assert heard > 90 * 100_000, "what removed flows carried still counts"


def test_no_flow_gets_the_number_of_one_that_the_other_end_may_still_have(net: Net) -> None:
    net.wide()
    [link] = net.small.pool._links
    used = {flow.number for flow in link._flows}
    net.small.pool._watch._flows = 1  # or it would add them again at once
    link.shrink()
    eventually(lambda: widths(net) == (1, 1))
    further = [link.free_number() for _ in range(3)]
    assert len(used | {*further}) == len(used) + 3


def test_frames_of_a_snapshot_stay_in_order(net: Net) -> None:
    net.wide()
    for part in range(90):
        size = 1 << 19 if part % 9 == 0 else 100  # a small one behind a large one would overtake
        net.small.pool.send(
            net.large.id, Header(FrameKind.SNAPSHOT, part=part), constant(bytes(size))
        )
    net.large.wait(lambda: len(net.large.frames) == 91)
    snapshot = [h.part for _, h, _ in net.large.frames if h.kind is FrameKind.SNAPSHOT]
    assert snapshot == list(range(90))


@pytest.mark.parametrize("attempt", range(5))
def test_dials_that_cross_end_in_one_link_with_all_its_flows(net: Net, attempt: int) -> None:
    for side, other in ((net.small, net.large), (net.large, net.small)):
        side.pool.expect(other.id)
        for part in range(40):
            side.send(other, b"%d" % part * 2000, part=part)
    for dial in [net.small.dial(net.large), net.large.dial(net.small)]:
        dial.result(PATIENCE_S)
    for side in (net.small, net.large):
        side.wait(lambda side=side: len(side.frames) == 40)  # type: ignore[misc]
        assert sorted(header.part for _, header, _ in side.frames) == list(range(40))

    def wide_while_it_carries() -> bool:
        net.small.send(net.large, b"more")
        return widths(net) == (FLOWS, FLOWS)

    eventually(wide_while_it_carries)
    assert net.small.names() == net.large.names() == ["up"]


def test_a_flow_joins_only_the_link_that_it_names(net: Net) -> None:
    channel, answer = further_flow(net, b"t" * 16, 1)
    assert answer == "FAREWELL no link that takes this flow"
    channel.abandon()
    first, answer = further_flow(net, b"t" * 16, 0)
    assert answer.startswith("HELLO")
    wrong, answer = further_flow(net, b"u" * 16, 1)
    assert answer.startswith("FAREWELL")
    wrong.abandon()
    flows = [first]
    for number in range(1, FLOWS_MAX):
        more, answer = further_flow(net, b"t" * 16, number)
        assert answer.startswith("HELLO")
        flows.append(more)
        eventually(lambda number=number: net.large.pool.stats()[0].flows == number + 1)  # type: ignore[misc]
    beyond, answer = further_flow(net, b"t" * 16, FLOWS_MAX)
    assert answer.startswith("FAREWELL")
    assert net.large.names() == ["up"]
    for channel in (*flows, beyond):
        channel.abandon()


# -- life signs, and what was carried -------------------------------------------------------------


def test_a_ping_in_the_middle_of_a_frame_is_answered_and_bytes_are_heard(net: Net) -> None:
    """The rest of the frame never comes, so the answer cannot have waited for it."""
    channel, _ = further_flow(net, b"t" * 16, 0)
    before = net.large.pool.heard(net.third.peer_id)
    head = Header(FrameKind.CONTRIBUTION).pack(length=LIMITS.payload_bytes_max, crc=None)
    ping = ASIDE + Header(FrameKind.PING, contributors=77).pack(length=0, crc=0)
    segment = bytes(SEGMENT_BYTES)
    channel.stream.write((memoryview(head), memoryview(segment), memoryview(ping)))
    received = channel.receive(5.0)
    assert received is not None
    assert (received[0].kind, received[0].contributors) == (FrameKind.PONG, 77)
    assert net.large.pool.heard(net.third.peer_id) > before + SEGMENT_BYTES
    assert not net.large.frames
    channel.abandon()
    net.large.wait(net.large.lost)
    assert net.large.pool.heard(net.third.peer_id) > before + SEGMENT_BYTES
    assert net.large.pool.heard("somebody else") == 0


def test_a_pong_overtakes_a_frame_that_is_being_sent(net: Net) -> None:
    """We read the answer between the segments of the frame that was in front of it."""
    channel, _ = further_flow(net, b"t" * 16, 0)
    net.large.wait(lambda: net.large.events)
    taken, asked = threading.Event(), threading.Event()

    def slow(scratch: memoryview) -> memoryview:
        taken.set()
        asked.wait(PATIENCE_S)  # until the ping is in the outbox, behind this frame
        return scratch

    net.large.pool.send(net.third.peer_id, Header(FrameKind.RESULT), slow)
    assert taken.wait(PATIENCE_S)
    channel.send(Header(FrameKind.PING, contributors=5))
    eventually(lambda: net.large.pool.stats()[0].waiting_frames == 1)
    asked.set()
    asides: list[Header] = []
    received = channel.receive(5.0, aside=asides.append)
    assert received is not None
    assert received[0].kind is FrameKind.RESULT
    assert [(one.kind, one.contributors) for one in asides] == [(FrameKind.PONG, 5)]
    channel.abandon()


def test_bytes_are_counted_by_run_kind_and_direction(net: Net) -> None:
    net.small.dial(net.large).result(PATIENCE_S)
    for kind, size in ((FrameKind.RESULT, 10), (FrameKind.RESULT, 20), (FrameKind.SNAPSHOT, 5)):
        net.small.pool.send(net.large.id, Header(kind, run=b"run-hash"), constant(bytes(size)))
    net.large.wait(lambda: len(net.large.frames) == 3)
    eventually(lambda: len(net.small.pool.moved()) == 2)
    for side, sent in ((net.small, True), (net.large, False)):
        moved = {(m.run, m.kind, m.sent): count for m, count in side.pool.moved().items()}
        assert moved == {
            (b"run-hash", FrameKind.RESULT, sent): 30 + 2 * 52,
            (b"run-hash", FrameKind.SNAPSHOT, sent): 5 + 52,
        }


def test_runs_that_a_stranger_invents_are_counted_together(net: Net) -> None:
    net.small.dial(net.large).result(PATIENCE_S)
    for number in range(3 * RUNS_MAX):
        header = Header(FrameKind.RESULT, run=number.to_bytes(8, "big"))
        eventually(lambda: net.small.pool.stats()[0].waiting_frames < 50)
        net.small.pool.send(net.large.id, header, constant(b""))
    net.large.wait(lambda: len(net.large.frames) == 3 * RUNS_MAX)
    assert len(net.large.pool.moved()) <= RUNS_MAX
    assert sum(net.large.pool.moved().values()) == 3 * RUNS_MAX * 52


@pytest.mark.skipif(not hasattr(socket, "TCP_WINDOW_CLAMP"), reason="Linux tells and takes it")
def test_what_may_wait_in_the_kernel_for_a_near_reader_is_bounded(net: Net) -> None:
    net.wide()
    net.large.wait(lambda: net.large.frames)
    wires = [flow._channel.stream.wire for link in net.large.pool._links for flow in link._flows]
    assert all(wire.near for wire in wires)  # this machine's loopback
    option = socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP
    for wire in wires:  # what the kernel may have made of it meanwhile
        wire._socket.setsockopt(*option, 8 << 20)
    wires[0].near = False
    wires[0].bound_window()
    assert wires[0]._socket.getsockopt(*option) == 8 << 20
    wires[0].near = True
    for part in range(40):
        net.small.send(net.large, bytes(SEGMENT_BYTES + 1), part=part)
    net.large.wait(lambda: len(net.large.frames) == 41)
    clamps = [wire._socket.getsockopt(*option) for wire in wires]
    assert min(clamps) <= NEAR_WINDOW_BYTES, clamps
