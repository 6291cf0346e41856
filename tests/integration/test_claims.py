"""Locks, sockets, directories and ports, with real files and real processes.

S3 (one machine's half) and "Bad input": each refusal is a `ConfigError` that names what is in the
way.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moshpitd.daemon import claims
from moshpitd.daemon.claims import Claims, Lock, PeerName, check_buffers, claim, claim_socket
from moshpitd.daemon.settings import Settings
from moshpitd.errors import ConfigError

HOLD = """
import sys
from pathlib import Path
from moshpitd.daemon.claims import claim
from moshpitd.daemon.settings import Settings
held = claim(Settings.load(environ={}, flags=eval(sys.argv[1])))
held.take_peer_id(sys.argv[2], identity=Path("identity.key"))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: its name and a socket's would not fit into sun_path together.
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        yield Path(name)


def flags_for(place: Path, **changed: object) -> dict[str, object]:
    return {
        "node.data_dir": str(place / "node"),
        "node.buffers_dir": str(place / "buffers"),
        "node.socket": str(place / "node" / "s.sock"),
        "network.listen": ["/ip4/127.0.0.1/tcp/0"],
        "network.link_listen": "127.0.0.1:0",
        "http.port": 0,
    } | {key.replace("__", "."): value for key, value in changed.items()}


def settings_for(place: Path, **changed: object) -> Settings:
    return Settings.load(environ={}, flags=flags_for(place, **changed))


def refused(settings: Settings) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        claim(settings)
    return caught.value


class Holder:
    """Another process that claims the same things."""

    def __init__(self, place: Path, peer_id: str = "12D3KooWOther") -> None:
        argv = [sys.executable, "-c", HOLD, repr(flags_for(place)), peer_id]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate()


@pytest.fixture
def holder(place: Path) -> Iterator[Holder]:
    holder = Holder(place)
    yield holder
    holder.end()


def test_a_second_daemon_on_the_data_directory_is_refused_with_the_pid(
    place: Path, holder: Holder
) -> None:
    error = refused(settings_for(place))
    assert f"in use by the daemon with pid {holder.process.pid}" in str(error)
    assert error.key == "node.data_dir"


def test_a_second_daemon_on_the_socket_is_refused_with_the_pid(place: Path, holder: Holder) -> None:
    error = refused(settings_for(place, node__data_dir=str(place / "other")))
    assert error.key == "node.socket"
    assert f"pid {holder.process.pid}" in str(error)
    assert "--socket" in error.expected
    # Nothing is left held: the other directory can be claimed at once.
    other = settings_for(
        place, node__data_dir=str(place / "other"), node__socket=str(place / "other" / "s")
    )
    claim(other).release()


def test_one_identity_file_for_two_data_directories_is_refused(place: Path) -> None:
    shared = str(place / "keys" / "shared.key")
    first = claim(settings_for(place, node__identity=shared))
    second = settings_for(
        place,
        node__identity=shared,
        node__data_dir=str(place / "two"),
        node__socket=str(place / "two" / "s"),
    )
    error = refused(second)
    assert error.key == "node.identity"
    assert f"pid {os.getpid()}" in str(error)
    first.release()
    claim(second).release()


def test_after_kill_9_the_same_claims_are_free_at_once(place: Path, holder: Holder) -> None:
    holder.end(signal.SIGKILL)
    mine = claim(settings_for(place))
    mine.take_peer_id("12D3KooWOther", identity=Path("identity.key"))
    mine.release()
    mine.release()
    assert [path.name for path in (place / "node").iterdir()] == []


def test_a_copied_identity_is_refused_on_this_machine(place: Path, holder: Holder) -> None:
    mine = Claims()
    with pytest.raises(ConfigError, match="identity in use") as caught:
        mine.take_peer_id("12D3KooWOther", identity=place / "identity.key")
    assert f"pid {holder.process.pid}" in str(caught.value)
    assert caught.value.file == str(place / "identity.key")
    mine.take_peer_id("12D3KooWAnother", identity=place / "identity.key")
    mine.release()
    PeerName.take("12D3KooWAnother", identity=place).release()


def test_a_lock_survives_the_deletion_of_its_predecessors_file(place: Path) -> None:
    words = {"what": "x", "key": "k", "expected": "e"}
    first = Lock.take(place / "lock", **words)
    with pytest.raises(ConfigError, match=f"x in use by the daemon with pid {os.getpid()}"):
        Lock.take(place / "lock", **words)
    first.release()
    second = Lock.take(place / "lock", **words)
    first.release()  # twice: must not touch the successor's file
    assert (place / "lock").exists()
    second.release()
    assert not (place / "lock").exists()


def test_a_stale_socket_is_removed(place: Path) -> None:
    path = place / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    lock = claim_socket(path)
    assert not path.exists()
    lock.release()


def test_a_socket_that_somebody_listens_on_is_not(place: Path) -> None:
    path = place / "s.sock"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen(1)
        with pytest.raises(ConfigError, match=f"in use by the process with pid {os.getpid()}"):
            claim_socket(path)
    assert path.exists()
    claim_socket(path).release()


def test_a_file_in_the_socket_s_place_is_never_removed(place: Path) -> None:
    path = place / "s.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        claim_socket(path)
    assert path.read_text() == "precious"


def test_directories_are_made_for_this_user_only(place: Path) -> None:
    claim(settings_for(place)).release()
    assert stat.S_IMODE((place / "node").stat().st_mode) == 0o700


def test_a_data_directory_that_is_a_file(place: Path) -> None:
    (place / "node").write_text("")
    error = refused(settings_for(place, node__socket=str(place / "s.sock")))
    assert error.key == "node.data_dir"
    assert str(place / "node") in str(error)


@pytest.mark.parametrize("key", ["node.data_dir", "node.buffers_dir", "node.socket"])
def test_a_place_that_cannot_be_written_to(key: str, place: Path) -> None:
    # /proc refuses everybody, root too; a mode would not stop the root of a container.
    where = "/proc/moshpitd" + ("/s.sock" if key == "node.socket" else "")
    error = refused(settings_for(place, **{key: where}))
    assert error.key == key
    assert "/proc/moshpitd" in str(error)
    assert error.expected == "a place that this user may write to"


def test_a_directory_that_somebody_else_prepared_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.chmod(0o1777)  # as /tmp is
    (place / "node").mkdir()
    monkeypatch.setattr(claims.os, "getuid", lambda: os.geteuid() + 4711)
    if os.geteuid() == 0:
        os.chown(place / "node", 12345, 12345)
    error = refused(settings_for(place))
    assert "belongs to user" in str(error)


def test_a_full_or_far_too_small_buffer_directory(place: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_buffers(place, room=1 << 60)
    assert caught.value.key == "node.buffers_dir"
    assert "bytes free" in str(caught.value)
    assert "--shm-size" in caught.value.expected
    check_buffers(place, room=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network.listen", ["/ip4/127.0.0.1/tcp/{port}"]),
        ("network.link_listen", "127.0.0.1:{port}"),
        ("http.port", "{port}"),
    ],
)
def test_a_port_in_use_names_port_and_key(place: Path, key: str, value: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted: object
        if isinstance(value, list):
            wanted = [text.format(port=port) for text in value]
        else:
            wanted = port if key == "http.port" else str(value).format(port=port)
        settings = settings_for(place, **{key: wanted})
        error = refused(settings)
        assert error.key == key
        assert f"port {port} is in use" in str(error)
    claim(settings).release()


def test_a_port_that_two_settings_want(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    error = refused(
        settings_for(
            place,
            network__listen=[f"/ip4/0.0.0.0/tcp/{port}"],
            network__link_listen=f"127.0.0.1:{port}",
        )
    )
    assert error.key == "network.link_listen"
    assert f"port {port} is also network.listen" in str(error)


def test_an_address_that_is_not_this_machine_s(place: Path) -> None:
    error = refused(settings_for(place, network__link_listen="8.8.8.8:31338"))
    assert error.key == "network.link_listen"
    assert "8.8.8.8:31338" in str(error)
