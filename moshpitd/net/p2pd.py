"""The p2pd child process: started in a folder of its own, watched, and cleaned up after.

One rule: nothing is signalled or removed that was not verified to be ours. The proof is the folder:
it is private to this user, locked by this daemon, and every p2pd of ours names it on its command
line. So nothing has to be written down before the child starts, and no moment is left in which a
kill -9 leaves something that the next start cannot recognise.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import select
import signal
import socket
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hivemind.p2p.p2p_daemon
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.utils.logging import use_hivemind_log_handler

from moshpitd.errors import ConfigError

log = logging.getLogger(__name__)

# sun_path holds 107 bytes and a zero; the longest name that hivemind puts into the folder.
SUN_PATH_BYTES = 107
SOCKET_NAME_BYTES = len("/p2pclient-xxxxxxxxxxxx.sock")
KILL_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class P2pdOptions:
    """How p2pd shall listen. Addresses are multiaddrs; `announce` empty means what p2pd finds
    out.
    """

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    nat_port_map: bool = False
    start_timeout_s: float = 15.0


class P2pdFolder:
    """A locked private folder for the sockets of p2pd. Holding one means: no other daemon of this
    data directory lives, so whatever the folder names is an orphan or our own child.
    """

    def __init__(self, data_dir: Path) -> None:
        self.path = _private_folder(data_dir)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"another daemon is using the data directory {data_dir}",
                key="data_dir",
                expected="one data directory per daemon",
            ) from None

    def clean(self) -> None:
        """End orphaned p2pd processes of this folder and remove their sockets."""
        for pid in _processes_of(self.path):
            _end(pid, self.path)
        for name in os.listdir(self.path):
            path = self.path / name
            if name.endswith(".sock") and stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Unlock. The folder stays: removing it would race with the next start."""
        os.close(self._lock)


class P2pd:
    """A running p2pd and hivemind's client of it."""

    def __init__(self, p2p: P2P) -> None:
        self.p2p = p2p
        self.client: Any = p2p._client
        self.peer_id: str = p2p.peer_id.to_base58()
        self._calls = self.client.control
        self._pending = _TolerantCalls(self._calls._pending_calls)
        self._calls._pending_calls = self._pending

    @classmethod
    async def start(cls, folder: P2pdFolder, identity_path: Path, options: P2pdOptions) -> P2pd:
        """Start p2pd with the identity in `identity_path`. Raises ConfigError naming what it could
        not use.
        """
        for address in options.listen:
            _require_free_port(address)
        quiet_libraries()
        # hivemind puts its sockets into /tmp, for everybody to connect to and with names that
        # nobody knows after a crash. The prefix is an attribute of the class, so a class of our own
        # moves them.
        kind: Any = type("LocalP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder.path}/"})
        try:
            p2p = await kind.create(
                identity_path=str(identity_path),
                host_maddrs=list(options.listen),
                announce_maddrs=list(options.announce) or None,
                nat_port_map=options.nat_port_map,
                startup_timeout=options.start_timeout_s,
                # No initial_peers: p2pd would exit when none answers. Bootstrapping is our own
                # task. hivemind's own check of the identity reads RSA keys only; Control has its
                # own.
                check_if_identity_free=False,
            )
        except (P2PDaemonError, ValueError) as error:
            raise ConfigError(
                f"p2pd does not start: {error}",
                key="control.listen",
                expected="multiaddrs of this host such as /ip4/0.0.0.0/tcp/4001",
            ) from error
        return cls(p2p)

    async def ended(self) -> str:
        """Wait until p2pd, or the connection to it, is gone; returns what happened."""
        child = asyncio.ensure_future(self.p2p._child.wait())
        tasks = {child, self._calls._read_task, self._calls._write_task}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            child.cancel()
        code = self.p2p._child.returncode
        return "the connection to p2pd broke" if code is None else f"p2pd exited with code {code}"

    def forget_finished_calls(self) -> None:
        """hivemind keeps the task of every incoming call that its caller cancelled; drop the
        finished.
        """
        tasks = self._calls._handler_tasks
        for call in [call for call, task in tasks.items() if task.done()]:
            del tasks[call]

    @property
    def alive(self) -> bool:
        tasks = (self._calls._read_task, self._calls._write_task)
        return self.p2p._child.returncode is None and not any(task.done() for task in tasks)

    async def stop(self) -> None:
        """End p2pd and wait for it, by force after 3 s."""
        self._pending.end()
        process = self.p2p._child
        try:
            await asyncio.wait_for(self.p2p.shutdown(), KILL_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for task in (self._calls._read_task, self._calls._write_task, self.p2p._listen_task):
            if task is not None:
                # Retrieved here, or asyncio reports the broken connection when the task is
                # collected.
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


class _TolerantCalls(dict[Any, Any]):
    """hivemind's pending calls, without its race. When an answer arrives in the same turn of the
    loop as the caller's timeout, hivemind sets a result on a cancelled future; the
    InvalidStateError ends its reader task, and every later call of this process waits for ever.
    After `end`, calls fail at once instead of waiting for an answer that nobody will give.
    """

    ended = False

    def __getitem__(self, key: Any) -> _TolerantFuture:
        return _TolerantFuture(super().__getitem__(key))

    def __setitem__(self, key: Any, future: asyncio.Future[Any]) -> None:
        if self.ended:
            raise P2PDaemonError("p2pd is gone")
        super().__setitem__(key, future)

    def end(self) -> None:
        self.ended = True
        for future in list(self.values()):
            if not future.done():
                future.set_exception(P2PDaemonError("p2pd is gone"))


class _TolerantFuture:
    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Any:
        return self._future.__await__()

    def set_result(self, result: Any) -> None:
        if not self._future.done():
            self._future.set_result(result)

    def set_exception(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class _Forward(logging.Handler):
    """Hands a library's warnings to our logger, so that one configuration and one format hold."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, "%s: %s", record.name, record.getMessage())


def quiet_libraries() -> None:
    """Route what hivemind and libp2p log to our logger, from WARNING on. Idempotent."""
    use_hivemind_log_handler("nowhere")
    # hivemind renames the level WARNING to WARN for the whole process; the old name is put back.
    logging.addLevelName(logging.WARNING, "WARNING")
    if "GOLOG_LOG_LEVEL" not in os.environ and "HIVEMIND_LOGLEVEL" not in os.environ:
        # p2pd logs every failed dial as JSON that hivemind then parses; errors are enough.
        cast(Any, hivemind.p2p.p2p_daemon).loglevel = "ERROR"
    for name in ("hivemind", "libp2p"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        if not any(isinstance(handler, _Forward) for handler in logger.handlers):
            logger.addHandler(_Forward())


def _private_folder(data_dir: Path) -> Path:
    path = data_dir.absolute() / "p2pd"
    if len(os.fsencode(path)) + SOCKET_NAME_BYTES > SUN_PATH_BYTES:
        # Too deep for a socket. The name is a function of the data directory, so the next start
        # finds it.
        digest = hashlib.blake2b(os.fsencode(data_dir.absolute()), digest_size=8).hexdigest()
        path = Path(tempfile.gettempdir()) / f"moshpitd-{os.getuid()}-{digest}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path}: {error.strerror or error}",
            key="data_dir",
            expected="a directory that this user may write to",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to somebody else", key="data_dir")
    path.chmod(0o700)
    return path


def _processes_of(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_ours(name, folder)]


def _is_ours(pid: str, folder: Path) -> bool:
    """Whether this process is a p2pd of this user that listens inside `folder`."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    mark = b"-listen=/unix" + os.fsencode(folder) + b"/"
    return os.path.basename(words[0]) == b"p2pd" and any(word.startswith(mark) for word in words)


def _end(pid: int, folder: Path) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # Checked again through a handle that cannot come to mean another process.
        if not _is_ours(str(pid), folder):
            return
        log.warning(
            "ending p2pd %d, which an earlier daemon of this data directory left behind", pid
        )
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        for number, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, KILL_TIMEOUT_S)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if poller.poll(patience_s * 1000):
                return
    finally:
        os.close(handle)


def _require_free_port(multiaddr: str) -> None:
    """go-libp2p listens with SO_REUSEPORT: a second daemon on the same port would start without an
    error and the kernel would deal connections out between the two. So the port is tried here
    first.
    """
    words = multiaddr.strip("/").split("/")
    if len(words) < 4 or words[0] not in ("ip4", "ip6") or words[2] != "tcp":
        return
    if not words[3].isdigit() or not 0 < int(words[3]) < 65536:
        return
    family = socket.AF_INET if words[0] == "ip4" else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((words[1], int(words[3])))
            sock.listen(1)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {multiaddr}: {error.strerror or error}",
                key="control.listen",
                expected="an address of this host and a free port",
            ) from error


def port_of(multiaddrs: Sequence[str]) -> int | None:
    """The first TCP port among multiaddrs."""
    for multiaddr in multiaddrs:
        words = multiaddr.strip("/").split("/")
        for name, value in itertools.pairwise(words):
            if name == "tcp" and value.isdigit():
                return int(value)
    return None
