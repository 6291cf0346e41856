"""Real p2pd processes and DHT nodes, a few in one loop: joining, messages, records, faults of the
way in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
import uvloop
from libp2p.peer.id import ID

from moshpitd.errors import ConfigError, Oversized, Unreachable
from moshpitd.net import wire
from moshpitd.net.bootstrap import Status
from moshpitd.net.control import Control, ControlOptions, node_key
from moshpitd.net.dialback import DialBackAnswer, DialBackQuestion
from moshpitd.net.directory import RECORD_BYTES_MAX
from moshpitd.net.identity import Identity
from moshpitd.net.links import LinkCallbacks, LinkPool
from moshpitd.net.messenger import MESSAGE_BYTES_MAX
from moshpitd.net.p2pd import P2pdOptions
from moshpitd.net.tls import listen

PATIENCE_S = 30.0


class Daemon:
    """A Control with its own data directory, and what it received."""

    def __init__(
        self,
        folder: Path,
        *,
        bootstrap: tuple[str, ...] = (),
        port: int = 0,
        identity: Identity | None = None,
        pool: LinkPool | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.identity = identity or Identity.load_or_create(folder / "identity")
        self.received: list[tuple[str, bytes]] = []
        self.conflicts: list[str] = []
        self.refuse: Exception | None = None
        options = ControlOptions(
            data_dir=folder,
            bootstrap=bootstrap,
            p2pd=P2pdOptions(listen=(f"/ip4/127.0.0.1/tcp/{port}",)),
            links=(f"127.0.0.1:{pool.port}",) if pool else (),
        )
        self.control = Control(
            self.identity,
            options,
            self._take,
            on_conflict=self.conflicts.append,
            credentials=pool.credentials if pool else None,
        )

    async def _take(self, peer_id: str, payload: bytes) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.received.append((peer_id, payload))

    @property
    def id(self) -> str:
        return self.identity.peer_id

    @property
    def address(self) -> str:
        return self.control.visible_addresses()[0]

    def statuses(self) -> list[Status]:
        return [one.status for one in self.control.bootstrap_status()]


Make = Callable[..., Awaitable[Daemon]]
Answer = TypeVar("Answer")


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Daemon] = []

    async def one(name: str, **options: object) -> Daemon:
        daemon = Daemon(tmp_path / name, **options)  # type: ignore[arg-type]
        await daemon.control.start()
        made.append(daemon)
        return daemon

    yield one
    await asyncio.gather(*(daemon.control.stop() for daemon in made))


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the state is another process's
            await asyncio.sleep(0.02)


async def until_answer(
    question: Callable[[], Awaitable[Answer]], wanted: Callable[[Answer], object]
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not wanted(await question()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def free_port() -> int:
    with listen("127.0.0.1", 0) as sock:
        port: int = sock.getsockname()[1]
        return port


def address_of(identity: Identity, port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"


def p2pd_children(folder: Path) -> list[int]:
    mark = os.fsencode(folder)
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if b"p2pd\0" in words and mark in words:
            found.append(int(name))
    return found


async def test_one_key_file_one_peer_id_on_all_sides(make: Make) -> None:
    seed = await make("seed")
    assert seed.address.endswith(f"/p2p/{seed.id}")  # what p2pd says
    assert ID.from_pubkey(seed.identity.keypair.public_key).to_base58() == seed.id


async def test_peers_that_know_only_the_seed_reach_each_other(make: Make) -> None:
    seed = await make("seed")
    one, two = [await make(name, bootstrap=(seed.address,)) for name in ("one", "two")]
    await until(lambda: all(peer.statuses() == [Status.OK] for peer in (one, two)))
    await one.control.send(two.id, b"to two")
    await two.control.send(one.id, b"to one")
    await seed.control.send(one.id, b"from seed")
    assert two.received == [(one.id, b"to two")]
    assert one.received == [(two.id, b"to one"), (seed.id, b"from seed")]
    await until(lambda: all(peer.control.table_size == 2 for peer in (seed, one, two)))


async def test_records_are_seen_by_all_and_by_oneself(make: Make) -> None:
    seed = await make("seed")
    # Alone, before anybody is there, a record counts and is visible.
    assert await seed.control.announce("run/peers", b"seed", ttl_s=240)
    assert await seed.control.lookup("run/peers") == [(seed.id, b"seed")]
    one, two = [await make(name, bootstrap=(seed.address,)) for name in ("one", "two")]
    await until(lambda: all(peer.control.joined for peer in (seed, one, two)))
    assert await one.control.announce("run/peers", b"one", ttl_s=240)
    expected = sorted([(seed.id, b"seed"), (one.id, b"one")])
    for daemon in (seed, one, two):
        assert await daemon.control.lookup("run/peers") == expected
    # A later value replaces the earlier one, even with a shorter life; a withdrawn one is gone.
    assert await one.control.announce("run/peers", b"one again", ttl_s=5)
    assert dict(await two.control.lookup("run/peers"))[one.id] == b"one again"
    await one.control.withdraw("run/peers")
    assert await two.control.lookup("run/peers") == [(seed.id, b"seed")]
    assert await two.control.lookup("run/nobody") == []


async def test_records_expire_and_are_bounded(make: Make) -> None:
    seed = await make("seed")
    await seed.control.announce("short", b"x", ttl_s=0.2)
    assert await seed.control.lookup("short") == [(seed.id, b"x")]
    await asyncio.sleep(0.25)
    assert await seed.control.lookup("short") == []
    with pytest.raises(Oversized):
        await seed.control.announce("large", bytes(RECORD_BYTES_MAX), ttl_s=240)


async def test_a_record_from_before_the_swarm_is_stored_again_after_joining(make: Make) -> None:
    port, identity = free_port(), Identity.load_or_create
    seed_key = identity((await make("other")).control._options.data_dir.parent / "seed-key")
    one = await make("one", bootstrap=(address_of(seed_key, port),))
    await one.control.announce("run/peers", b"early", ttl_s=240)
    seed = await make("seed", identity=seed_key, port=port)
    await until(lambda: one.statuses() == [Status.OK])
    expected = [(one.id, b"early")]
    await until_answer(lambda: seed.control.lookup("run/peers"), lambda found: found == expected)


async def test_dead_addresses_have_their_causes_and_heal(make: Make, tmp_path: Path) -> None:
    """S2 and S15: refused, black hole, wrong PeerID, no peer; joined as soon as one of them comes
    up.
    """
    late_key = Identity.load_or_create(tmp_path / "late-key")
    wrong_key = Identity.load_or_create(tmp_path / "wrong-key")
    stranger = await make("stranger")
    late_port = free_port()
    with socket.socket() as hole, socket.create_server(("127.0.0.1", 0)) as mute:
        # A full backlog swallows further connections, as a black hole does.
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        full = [socket.socket() for _ in range(4)]
        for sock in full:
            sock.setblocking(False)
            sock.connect_ex(hole.getsockname())
        bootstrap = (
            address_of(late_key, late_port),
            address_of(wrong_key, hole.getsockname()[1]),
            stranger.address.replace(stranger.id, wrong_key.peer_id),
            f"/dns4/nowhere.invalid/tcp/4001/p2p/{wrong_key.peer_id}",
        )
        one = await make("one", bootstrap=bootstrap)
        await until(
            lambda: (
                one.statuses()
                == [Status.REFUSED, Status.TIMEOUT, Status.WRONG_PEER, Status.UNRESOLVED]
            )
        )
        words = [str(status) for status in one.control.bootstrap_status()]
        assert words[0] == f"{bootstrap[0]}: refused"
        assert "found " + stranger.id in words[2]
        assert not one.control.joined
        await one.control.announce("still", b"works", ttl_s=240)
        late = await make("late", identity=late_key, port=late_port)
        await until(lambda: one.statuses()[0] is Status.OK, 10)
        await one.control.send(late.id, b"hello")
        for sock in full:
            sock.close()
        mute.close()


async def test_a_restarted_seed_is_found_again(make: Make, tmp_path: Path) -> None:
    """A seed without memory: everybody's next recheck puts it back into one swarm."""
    port = free_port()
    key = Identity.load_or_create(tmp_path / "seed-key")
    first = Daemon(tmp_path / "first", identity=key, port=port)
    await first.control.start()
    one = await make("one", bootstrap=(address_of(key, port),))
    await until(lambda: one.statuses() == [Status.OK])
    await first.control.stop()
    with pytest.raises(Unreachable):
        await one.control.send(key.peer_id, b"?")
    second = await make("second", identity=key, port=port)
    await until(lambda: second.control.table_size == 1, 40)
    await second.control.send(one.id, b"back")


@pytest.mark.parametrize("seed_at", [0, 4])
def test_five_that_start_together_are_one_swarm_under_uvloop(tmp_path: Path, seed_at: int) -> None:
    """S1: four daemons and their seed within 200 ms, the seed first or last."""

    async def scenario() -> None:
        port, key = free_port(), Identity.load_or_create(tmp_path / "seed-key")
        way = (address_of(key, port),)
        daemons = [Daemon(tmp_path / f"d{number}", bootstrap=way) for number in range(4)]
        daemons.insert(seed_at, Daemon(tmp_path / "seed", identity=key, port=port, bootstrap=way))
        for daemon in daemons:
            await daemon.control.start()
            await asyncio.sleep(0.01)
        await until(lambda: all(daemon.control.table_size == 4 for daemon in daemons))
        statuses = [daemon.statuses()[0] for daemon in daemons]
        assert statuses.pop(seed_at) is Status.SELF
        assert set(statuses) == {Status.OK}
        await asyncio.gather(*(daemon.control.stop() for daemon in daemons))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def stopped(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return True  # it has ended


async def test_sending_fails_by_name_and_in_time(make: Make, tmp_path: Path) -> None:
    seed = await make("seed")
    one = await make("one", bootstrap=(seed.address,))
    await until(lambda: one.control.joined)
    nobody = Identity.load_or_create(tmp_path / "nobody").peer_id
    with pytest.raises(Unreachable, match=nobody):
        await one.control.send(nobody, b"?")
    with pytest.raises(Unreachable, match="is no PeerID"):
        await one.control.send("../../etc", b"?")
    with pytest.raises(Oversized, match="1048577 bytes"):
        await one.control.send(seed.id, bytes(MESSAGE_BYTES_MAX + 1))
    await one.control.send(seed.id, bytes(MESSAGE_BYTES_MAX))
    assert len(seed.received[0][1]) == MESSAGE_BYTES_MAX
    seed.refuse = ValueError("not today")
    with pytest.raises(Unreachable, match=r"could not take it.*not today"):
        await one.control.send(seed.id, b"?")
    p2pd = p2pd_children(seed.control._options.data_dir)[0]
    os.kill(p2pd, signal.SIGSTOP)
    # A thread of it that runs on another processor may take one more message before it stops.
    threads = Path(f"/proc/{p2pd}/task")
    await until(lambda: all(stopped(thread) for thread in threads.iterdir()))
    with pytest.raises(Unreachable, match=r"no answer within 0\.3 s"):
        await one.control.send(seed.id, b"?", timeout_s=0.3)
    os.kill(p2pd, signal.SIGCONT)
    seed.refuse = None
    await one.control.send(seed.id, b"again")


async def test_p2pd_that_dies_is_started_again_on_its_port(make: Make) -> None:
    seed = await make("seed")
    one = await make("one", bootstrap=(seed.address,))
    await until(lambda: one.control.joined)
    before = one.address
    [child] = p2pd_children(one.control._options.data_dir)
    os.kill(child, signal.SIGKILL)
    await until(lambda: p2pd_children(one.control._options.data_dir) not in ([], [child]))
    await until(lambda: one.control.joined and one.control.table_size == 1)
    assert one.address == before
    await one.control.send(seed.id, b"alive")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await seed.control.send(one.id, b"found again")
                break
            except Unreachable:
                await asyncio.sleep(0.1)


async def test_a_copied_identity_is_noticed_and_a_stale_record_is_not(
    make: Make, tmp_path: Path
) -> None:
    """S3: the second holder of a key is told where the first one answers; after the first one's
    death the same key is accepted again although its record still stands.
    """
    key = Identity.load_or_create(tmp_path / "shared-key")
    seed = await make("seed")
    nothing = LinkCallbacks(lambda *a: None, lambda *a: None, lambda *a: None, lambda *a: None)
    pool = LinkPool(key, nothing, host="127.0.0.1")
    first = await make("first", identity=key, bootstrap=(seed.address,), pool=pool)
    await until_answer(lambda: seed.control.lookup(node_key(key.peer_id)), bool)
    other_pool = LinkPool(key, nothing, host="127.0.0.1")
    copy = await make("copy", identity=key, bootstrap=(seed.address,), pool=other_pool)
    await until(lambda: copy.conflicts)
    assert copy.conflicts[0] == (
        f"identity in use: {key.peer_id} also answers at 127.0.0.1:{pool.port}"
    )
    assert not first.conflicts
    await copy.control.stop()
    await first.control.stop()
    pool.close()
    again = await make("again", identity=key, bootstrap=(seed.address,), pool=other_pool)
    await until(lambda: again.statuses() == [Status.OK])
    await until_answer(
        lambda: seed.control.find_node(key.peer_id),
        lambda record: record is not None and record.instance == again.control._instance,
    )
    assert not again.conflicts
    other_pool.close()


async def test_reachability_is_proved_by_dialling_back(make: Make, tmp_path: Path) -> None:
    nothing = LinkCallbacks(lambda *a: None, lambda *a: None, lambda *a: None, lambda *a: None)
    keys = [Identity.load_or_create(tmp_path / name) for name in ("seed-key", "one-key")]
    pools = [LinkPool(key, nothing, host="127.0.0.1") for key in keys]
    seed = await make("seed", identity=keys[0], pool=pools[0])
    one = await make("one", identity=keys[1], pool=pools[1], bootstrap=(seed.address,))
    await until(lambda: one.control.joined and seed.control.joined)
    [result] = await one.control.ask_dial_back()
    assert result.reached
    assert (result.peer_id, result.address) == (seed.id, f"127.0.0.1:{pools[1].port}")
    assert await one.control.ask_dial_back() == []  # too soon: no answer, no verdict
    pools[0].close()
    [result] = await seed.control.ask_dial_back()
    assert result.cause == f"127.0.0.1:{pools[0].port}: refused"
    # Nobody is made to dial where the asker is not.
    assert one.control._dial_back is not None
    elsewhere = wire.pack(DialBackQuestion(("192.0.2.1:80", "localhost:80", "x")))
    answer = await one.control._dial_back.answer("12D3Other", elsewhere)
    causes = wire.unpack(DialBackAnswer, answer).causes
    assert "not connected from there" in causes[0]
    assert "only literal addresses" in causes[1]
    assert "is no address" in causes[2]
    pools[1].close()


async def test_a_second_daemon_on_one_data_directory_is_refused(make: Make, tmp_path: Path) -> None:
    await make("same")
    with pytest.raises(ConfigError, match="another daemon is using the data directory"):
        await Daemon(tmp_path / "same").control.start()


async def test_a_taken_port_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    seed = await make("seed")
    port = int(seed.address.split("/")[4])
    with pytest.raises(ConfigError, match=f"cannot listen on /ip4/127.0.0.1/tcp/{port}"):
        await Daemon(tmp_path / "late", port=port).control.start()
    assert p2pd_children(tmp_path / "late") == []


def test_a_bad_bootstrap_address_is_named(tmp_path: Path) -> None:
    key = Identity.load_or_create(tmp_path / "key").peer_id
    for text in ("nonsense", "/ip4/1.2.3.4/tcp/4001", f"/ip4/1.2.3.4/tcp/0/p2p/{key}", "/p2p/x"):
        with pytest.raises(ConfigError) as caught:
            Daemon(tmp_path / "one", bootstrap=(text,))
        assert text in str(caught.value)


async def test_nothing_is_left_in_the_file_system(make: Make, tmp_path: Path) -> None:
    before = set(os.listdir("/tmp"))
    one = Daemon(tmp_path / "one")
    await one.control.start()
    assert p2pd_children(tmp_path / "one")
    await one.control.stop()
    assert os.listdir(tmp_path / "one" / "p2pd") == ["lock"]
    assert p2pd_children(tmp_path / "one") == []
    assert not {name for name in set(os.listdir("/tmp")) - before if "hivemind" in name}


ORPHAN = """
import asyncio, os, signal, sys
from pathlib import Path
from moshpitd.net.control import Control, ControlOptions
from moshpitd.net.identity import Identity
from moshpitd.net.p2pd import P2pdOptions

async def main():
    folder = Path(sys.argv[1])
    options = ControlOptions(data_dir=folder, p2pd=P2pdOptions(listen=(sys.argv[2],)))
    await Control(Identity.load_or_create(folder / "identity"), options, lambda *a: None).start()
    print("started", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_after_a_kill_the_next_start_cleans_up_and_takes_the_port(tmp_path: Path) -> None:
    """S7: the daemon is killed while its p2pd is stopped, so that p2pd cannot notice and stays
    behind. A process that only looks similar is left alone.
    """
    folder, port = tmp_path / "data", free_port()
    folder.mkdir()
    command = [sys.executable, "-c", ORPHAN, str(folder), f"/ip4/127.0.0.1/tcp/{port}"]
    bystander = subprocess.Popen(  # noqa: ASYNC220  a bystander for the whole test
        ["sleep", "60"], executable="/bin/sleep", stdout=subprocess.DEVNULL
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"started\n"
        [orphan] = p2pd_children(folder)
        os.kill(orphan, signal.SIGSTOP)
        process.kill()
    assert p2pd_children(folder) == [orphan]
    (folder / "p2pd" / "p2pclient-old.sock").touch()  # no socket: not ours to remove
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "p2pd" / "p2pclient-older.sock"))
    stale.close()
    again = Daemon(folder, port=port)
    await again.control.start()
    [child] = p2pd_children(folder)
    assert child != orphan
    assert again.address == address_of(again.identity, port)
    assert "p2pclient-older.sock" not in os.listdir(folder / "p2pd")
    await again.control.stop()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


async def test_a_deep_data_directory_finds_its_sockets_elsewhere(
    make: Make, tmp_path: Path
) -> None:
    """A Unix socket's path holds 107 bytes."""
    deep = await make("/".join(["a-rather-long-folder-name"] * 5))
    assert deep.control._folder is not None
    assert str(deep.control._folder.path).startswith("/tmp/moshpitd-")
    assert deep.control._folder.path.stat().st_mode & 0o777 == 0o700
    os_path = deep.control._folder.path
    await deep.control.stop()
    assert os.listdir(os_path) == ["lock"]
    (os_path / "lock").unlink()
    os_path.rmdir()
