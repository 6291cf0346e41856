"""What a daemon must have for itself before it opens anything: files, identity, socket, ports.

One rule: taken or refused in one sentence that names the owner, and released by the kernel when we
die, so that a killed daemon never blocks its own restart.

Locks are flocks on files beside the thing, not pid files: a pid file outlives a `kill -9` and then
names whoever has that pid now. The pid inside is only for the sentence.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from moshpitd.daemon.addresses import Address, parse_host_port, parse_multiaddr
from moshpitd.daemon.settings import Settings
from moshpitd.errors import ConfigError

# Buckets of so many parts must fit at start: with less, no model can be averaged here.
USUAL_PART_BYTES = 1 << 20  # of a model of 64 MiB (tensors.layout, which would bring torch along)
MIN_BUFFER_PARTS = 4

Wanted: TypeAlias = tuple[str, Address, socket.SocketKind]
_SOCKET_WAIT_S = 1.0


@dataclass(slots=True)
class Lock:
    """An exclusive claim. Invariant: while `_descriptor` is open, nobody else holds `path`."""

    path: Path
    _descriptor: int

    @classmethod
    def take(cls, path: Path, *, what: str, key: str, expected: str) -> Lock:
        """Lock `path`, made if missing. Raises `ConfigError` that names the pid of the holder."""
        while True:
            try:
                descriptor = os.open(
                    path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError as error:
                raise _unusable(path, error, key=key) from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                os.close(descriptor)
                raise ConfigError(
                    f"{what} in use by the daemon with pid {holder or 'unknown'}",
                    key=key,
                    expected=expected,
                ) from None
            if _same_file(descriptor, path):
                break
            # The holder before us removed the file between our open and our flock.
            os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(path, descriptor)

    def release(self) -> None:
        """Remove the file, then let go; in this order, or a successor's file would be removed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(descriptor)


@dataclass(slots=True)
class PeerName:
    """A machine-wide claim on a PeerID, for an identity file that was copied to another directory.

    An abstract Unix socket: the kernel frees the name when we die, it leaves no file, and it is
    separate in every network namespace, that is, in every container with an address of its own.
    """

    _listener: socket.socket | None

    @classmethod
    def take(cls, peer_id: str, *, identity: Path) -> PeerName:
        """Raises `ConfigError` "identity in use" with the pid. Does nothing outside Linux."""
        if not sys.platform.startswith("linux"):
            return cls(None)
        name = f"\0moshpitd-identity-{peer_id}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(name)
            listener.listen(8)
            return cls(listener)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                return cls(None)
        owner = _listening(name)
        if owner is None or owner.uid not in (os.getuid(), 0):
            # Names are free for all: a stranger's claim must not keep this daemon from starting.
            return cls(None)
        raise ConfigError(
            f"identity in use: the daemon with pid {owner.pid} on this machine is {peer_id} too",
            file=str(identity),
            key="node.identity",
            expected="a key of this node's own; remove a copied file and a new key is made",
        )

    def release(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


@dataclass(slots=True)
class Claims:
    """Everything that one daemon holds. `release` is safe to call twice."""

    locks: list[Lock] = field(default_factory=list)
    names: list[PeerName] = field(default_factory=list)

    def take_peer_id(self, peer_id: str, *, identity: Path) -> None:
        """To be called once the identity is loaded, before the network hears of it."""
        self.names.append(PeerName.take(peer_id, identity=identity))

    def release(self) -> None:
        for name in self.names:
            name.release()
        for lock in reversed(self.locks):
            lock.release()
        self.names, self.locks = [], []


def claim(settings: Settings) -> Claims:
    """Take the data directory, the identity file and the socket; the ports are checked only.

    A stale socket is removed. Raises `ConfigError`, with nothing held.
    """
    paths = settings.paths()
    claims = Claims()
    try:
        own_directory(paths.data_dir, key="node.data_dir")
        claims.locks.append(
            Lock.take(
                paths.data_dir / "lock",
                what=f"data directory {paths.data_dir}",
                key="node.data_dir",
                expected="a directory of this daemon's own",
            )
        )
        if paths.identity.parent != paths.data_dir:
            own_directory(paths.identity.parent, key="node.identity", private=False)
            claims.locks.append(
                Lock.take(
                    paths.identity.with_name(paths.identity.name + ".lock"),
                    what=f"identity {paths.identity}",
                    key="node.identity",
                    expected="a key file of this daemon's own",
                )
            )
        part_bytes = settings.averaging.part_bytes or USUAL_PART_BYTES
        check_buffers(paths.buffers_dir, room=MIN_BUFFER_PARTS * part_bytes)
        claims.locks.append(claim_socket(paths.socket))
        check_ports(settings)
    except BaseException:
        claims.release()
        raise
    return claims


def claim_socket(path: Path) -> Lock:
    """The right to bind `path`. A socket file that nobody listens on is removed, nothing else."""
    key, expected = "node.socket", "a path that no other daemon uses (--socket)"
    own_directory(path.parent, key=key)
    lock = Lock.take(
        path.with_name(path.name + ".lock"), what=f"socket {path}", key=key, expected=expected
    )
    try:
        status = path.lstat()
    except FileNotFoundError:
        return lock
    try:
        if not stat.S_ISSOCK(status.st_mode):
            raise ConfigError(f"{path} exists and is not a socket", key=key, expected=expected)
        owner = _listening(str(path))
        if owner is not None:
            # Somebody without our lock: another program, or a daemon whose lock file was deleted.
            raise ConfigError(
                f"socket {path} in use by the process with pid {owner.pid}",
                key=key,
                expected=expected,
            )
        path.unlink(missing_ok=True)
    except BaseException:
        lock.release()
        raise
    return lock


def own_directory(path: Path, *, key: str, private: bool = True) -> None:
    """Make `path` (mode 0700) if missing; make sure that we can write there and, in a place like
    /tmp, that nobody else prepared it for us."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise _unusable(path, error, key=key) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a directory", key=key, expected="a directory")
    shared_parent = path.parent.stat().st_mode & stat.S_ISVTX
    if private and shared_parent and status.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}", key=key, expected=f"user {os.getuid()}"
        )
    probe = path / f".moshpitd-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as error:
        raise _unusable(path, error, key=key) from None


def check_buffers(directory: Path, *, room: int) -> None:
    """The buffer directory can be written to and has `room` bytes: if not, the start says so."""
    own_directory(directory, key="node.buffers_dir", private=False)
    volume = os.statvfs(directory)
    free = volume.f_bavail * volume.f_frsize
    if volume.f_blocks and free < room:  # an unlimited tmpfs reports no blocks at all
        raise ConfigError(
            f"{directory} has {free:,} bytes free",
            key="node.buffers_dir",
            expected=f"at least {room:,}: enlarge it (docker run --shm-size) or name another place",
        )


def check_ports(settings: Settings) -> None:
    """Every port that will be opened is free now. Raises `ConfigError` naming port and key.

    A check and no claim: who opens it later still has to cope. It is here because p2pd, a child
    process, says "exit status 1" where this says which port.
    """
    wanted: list[Wanted] = []
    for text in settings.network.listen:
        address = parse_multiaddr(text)
        kind = socket.SOCK_DGRAM if "/udp/" in text else socket.SOCK_STREAM
        wanted.append(("network.listen", address, kind))
    links = parse_host_port(settings.network.link_listen)
    wanted.append(("network.link_listen", links, socket.SOCK_STREAM))
    if settings.http.port:
        page = Address("", settings.http.host, settings.http.port)
        wanted.append(("http.port", page, socket.SOCK_STREAM))
    for index, (key, address, kind) in enumerate(wanted):
        for other, taken, other_kind in wanted[:index]:
            # Each would pass the check alone, and the second to open would fail.
            if other_kind == kind and _collide(taken, address):
                raise ConfigError(
                    f"port {address.port} is also {other}", key=key, expected="a port of its own"
                )
        _check_port(key, address, kind)


def _collide(one: Address, two: Address) -> bool:
    hosts = {one.host, two.host}
    return one.port == two.port != 0 and (len(hosts) == 1 or bool(hosts & {"0.0.0.0", "::"}))


def _check_port(key: str, address: Address, kind: socket.SocketKind) -> None:
    try:
        family, *_, where = socket.getaddrinfo(address.host, address.port, type=kind)[0]
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                # As every server does: connections of a daemon that just died must not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
            if kind == socket.SOCK_STREAM:
                probe.listen(1)  # on Linux two sockets may bind with REUSEADDR; only one may listen
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        place = f"{address.host}:{address.port}"
        raise ConfigError(
            f"port {address.port} is in use ({place})" if in_use else f"{place}: {_cause(error)}",
            key=key,
            expected="a free port" if in_use else "an address and port that this machine may open",
        ) from None


@dataclass(frozen=True, slots=True)
class _Owner:
    pid: int
    uid: int


def _listening(name: str) -> _Owner | None:
    """Who listens on this Unix socket, as the kernel has it; None when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_SOCKET_WAIT_S)
        try:
            probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError:
            # Alive but full, or not ours to ask: in use, by we cannot say whom.
            return _Owner(0, os.getuid())
        if not hasattr(socket, "SO_PEERCRED"):
            return _Owner(0, os.getuid())
        pid, uid, _gid = struct.unpack(
            "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return _Owner(pid, uid)


def _same_file(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _unusable(path: Path, error: OSError, *, key: str) -> ConfigError:
    return ConfigError(
        f"{path}: {_cause(error)}", key=key, expected="a place that this user may write to"
    )


def _cause(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
