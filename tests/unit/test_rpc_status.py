"""The table between our errors and gRPC's: over a real call, both ways, and what gRPC says by
itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from moshpitd.daemon.api import Servicer
from moshpitd.errors import DaemonUnavailable, TrainerError
from moshpitd.rpc.calls import Calls
from moshpitd.rpc.channel import aio_channel, default_socket
from moshpitd.rpc.status import CODES, MAX_DETAILS, DaemonDraining, refusal, to_status
from moshpitd.rpc.stubs import messages, services
from tests.kit.fake_daemon import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


def attach_error(daemon: FakeDaemon, error: TrainerError) -> Exception:
    daemon.refuse_attach = error
    calls = Calls(daemon.socket)
    try:
        calls.attach(messages.AttachRequest(run="test"), 5.0)
    except Exception as caught:
        return caught
    finally:
        calls.close()
    raise AssertionError("not refused")


@pytest.mark.parametrize("reason", sorted(CODES))
def test_every_reason_comes_back_as_it_went(daemon: FakeDaemon, reason: str) -> None:
    caught = attach_error(daemon, refusal(reason, "tensor 'wähler' · 3 ≠ 4"))
    if CODES[reason] == "UNAVAILABLE":
        assert isinstance(caught, DaemonDraining)
        return
    assert isinstance(caught, TrainerError)
    assert (caught.code, caught.reason) == (CODES[reason], reason)
    assert caught.message == "tensor 'wähler' · 3 ≠ 4"
    assert hasattr(grpc.StatusCode, CODES[reason])


def test_a_reason_that_is_not_in_the_table_travels_too(daemon: FakeDaemon) -> None:
    caught = attach_error(daemon, TrainerError("no", code="OUT_OF_RANGE", reason="new_word"))
    assert isinstance(caught, TrainerError)
    assert (caught.code, caught.reason) == ("OUT_OF_RANGE", "new_word")


def test_an_endless_sentence_is_cut() -> None:
    assert len(to_status(TrainerError("ä" * 10_000, reason="x")).details) == MAX_DETAILS


def test_nobody_listens(tmp_path: Path) -> None:
    calls = Calls(tmp_path / "none.sock")
    with pytest.raises(DaemonUnavailable, match=r"none\.sock: UNAVAILABLE"):
        calls.status()
    calls.close()


def test_a_bug_in_the_daemon_is_not_the_trainers_fault(daemon: FakeDaemon) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    daemon._bucket = broken  # type: ignore[method-assign]
    calls = Calls(daemon.socket)
    with pytest.raises(DaemonUnavailable, match="UNKNOWN"):
        calls.attach(messages.AttachRequest(run="test"), 5.0)
    calls.close()


def test_another_program_on_the_socket_is_named(daemon: FakeDaemon) -> None:
    calls = Calls(daemon.socket)
    with pytest.raises(TrainerError) as caught:
        calls.status()  # the fake has no Status, as a daemon of another age might
    assert caught.value.reason == "api_differs"
    calls.close()


def test_every_method_of_the_daemon_turns_refusals_into_statuses() -> None:
    """One that does not answers UNKNOWN, without the reason that a client looks at."""
    methods = {name: one for name, one in vars(Servicer).items() if name[0].isupper()}
    assert {"Attach", "GetResiduals", "StorePull"} <= methods.keys()
    assert [name for name, one in methods.items() if not hasattr(one, "__wrapped__")] == []


async def test_the_aio_channel_reaches_the_same_daemon(daemon: FakeDaemon) -> None:
    async with aio_channel(daemon.socket) as channel:
        reply = await services.DaemonStub(channel).Attach(messages.AttachRequest(run="test"))
    assert reply.trainer in daemon.trainers


def test_64_mib_of_state_pass(daemon: FakeDaemon) -> None:
    calls = Calls(daemon.socket)
    trainer = calls.attach(messages.AttachRequest(run="test"), 5.0).trainer
    state = bytes(64 << 20)
    calls.put_state(trainer, state, 30.0)
    assert calls.get_state(trainer, 30.0) == state
    calls.close()


def test_where_the_socket_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSHPITD_SOCKET", "/somewhere/else.sock")
    assert str(default_socket()) == "/somewhere/else.sock"
    monkeypatch.delenv("MOSHPITD_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert str(default_socket()) == "/run/user/7/moshpitd/moshpitd.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(default_socket()).startswith("/tmp/moshpitd-")
