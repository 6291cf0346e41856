"""What attach, average and sync do to a model, against a daemon without a swarm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moshpitd.client import PartialAverage, Progress, Session, TrainerError, attach
from tests.kit.fake_daemon import FakeDaemon, Round, progress, result, until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path).start()
    yield fake
    fake.stop()


def session_of(daemon: FakeDaemon, tensors: Any, **options: Any) -> Session:
    return attach("test", tensors=tensors, socket=daemon.socket, **options)


def test_average_replaces_the_values_in_place(daemon: FakeDaemon) -> None:
    weights = torch.full((3, 4), 8.0)
    with session_of(daemon, {"w": weights}) as session:
        outcome = session.average(weight=3)
    assert torch.equal(weights, torch.full((3, 4), 6.0))  # (3 * 8 + 1 * 0) / 4
    assert (outcome.status, outcome.participants, outcome.total_weight) == ("complete", 2, 4.0)
    assert outcome.contributors == ("12D3KooWFake", "12D3KooWOther")
    assert session.version == outcome.version == 1


def test_a_model_gives_parameters_and_buffers_and_a_tied_tensor_once(daemon: FakeDaemon) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    with attach("test", model=model, socket=daemon.socket):
        names = [tensor.name for tensor in daemon.only_trainer().request.tensors]
    assert names == [
        "0.weight",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
        "2.bias",
    ]


def test_buffers_that_were_replaced_are_found_again(daemon: FakeDaemon) -> None:
    model = nn.BatchNorm1d(2)
    with attach("test", model=model, socket=daemon.socket) as session:
        model.register_buffer("running_mean", torch.full((2,), 4.0))  # as model.to(...) does
        session.average(weight=1)
    assert torch.equal(model.running_mean, torch.full((2,), 2.0))


@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_of_every_kind_survive_the_round_trip(daemon: FakeDaemon, in_place: bool) -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.tensor([1.0 + 1e-12], dtype=torch.float64),
        "count": torch.tensor(7, dtype=torch.int64),
        "mask": torch.tensor([True, False]),
    }
    if not in_place:  # where a view of other memory is refused
        tensors["turned"] = torch.arange(6.0).view(2, 3).t()
    before = {name: tensor.clone() for name, tensor in tensors.items()}

    def unchanged(call: Round) -> Iterator[Any]:
        for name, view in call.views().items():
            assert torch.equal(view, before[name]), name
            view.add_(view) if view.dtype != torch.bool else view.logical_not_()
        yield result(version=1)

    daemon.answer = unchanged
    with session_of(daemon, tensors, in_place=in_place) as session:
        session.average()
    for name, tensor in tensors.items():
        want = ~before[name] if tensor.dtype == torch.bool else 2 * before[name]
        assert torch.equal(tensor, want), name
        assert tensor.shape == before[name].shape


def test_a_list_keeps_its_order(daemon: FakeDaemon) -> None:
    tensors = [torch.full((1,), float(i)) for i in range(12)]
    with session_of(daemon, tensors):
        names = [tensor.name for tensor in daemon.only_trainer().request.tensors]
    assert names == sorted(names)
    assert names[0] == "00"


def test_progress_reaches_the_hook(daemon: FakeDaemon) -> None:
    seen: list[Progress] = []
    with session_of(daemon, [torch.ones(3)]) as session:
        session.average(progress=seen.append)
    assert [event.phase for event in seen] == ["matchmaking", "exchange"]
    assert (seen[1].group_size, seen[1].parts_done, seen[1].parts) == (2, 1, 1)


def test_an_error_in_the_hook_ends_the_call(daemon: FakeDaemon) -> None:
    rounds: list[Round] = []

    def slow(call: Round) -> Iterator[Any]:
        rounds.append(call)
        yield progress("matchmaking")
        call.cancelled.wait(10)

    def broken(_: Progress) -> None:
        raise ZeroDivisionError

    daemon.answer = slow
    values = torch.ones(3)
    with session_of(daemon, [values]) as session:
        with pytest.raises(ZeroDivisionError):
            session.average(progress=broken)
        assert rounds[0].cancelled.wait(10)
        assert torch.equal(values, torch.ones(3))
        assert session.attached  # our own mistake costs no attachment


def partial(accepted: bool) -> Any:
    def answer(call: Round) -> Iterator[Any]:
        for view in call.views().values():
            view.fill_(5.0)
        yield result("partial", accepted=accepted, reason="link_lost", group_size=4, version=1)

    return answer


def test_an_accepted_partial_result_is_taken(daemon: FakeDaemon) -> None:
    values = torch.ones(3)
    daemon.answer = partial(accepted=True)
    with session_of(daemon, [values]) as session:
        outcome = session.average(on_partial="accept")
        assert session.version == 1
    assert (outcome.status, outcome.reason) == ("partial", "link_lost")
    assert torch.equal(values, torch.full((3,), 5.0))


def test_a_skipped_one_leaves_model_and_version_alone(daemon: FakeDaemon) -> None:
    values = torch.ones(3)
    daemon.answer = partial(accepted=False)
    with session_of(daemon, [values]) as session:
        outcome = session.average(on_partial="skip")
        assert session.version == 0
    assert not outcome.accepted
    assert torch.equal(values, torch.ones(3))


def test_raise_raises_with_the_result(daemon: FakeDaemon) -> None:
    values = torch.ones(3)
    daemon.answer = partial(accepted=False)
    with session_of(daemon, [values]) as session, pytest.raises(PartialAverage) as caught:
        session.average(on_partial="raise")
    assert caught.value.result.group_size == 4
    assert caught.value.reason == "partial"
    assert torch.equal(values, torch.ones(3))


def test_a_delta_is_added(daemon: FakeDaemon) -> None:
    values, count = torch.tensor([1.0, 2.0]), torch.tensor(4)
    mask = torch.tensor([False, True])

    def late(call: Round) -> Iterator[Any]:
        views = call.views()
        views["values"].copy_(torch.tensor([0.5, 0.0]))
        views["count"].fill_(3)
        views["mask"].copy_(torch.tensor([True, False]))
        yield result(delta=True, version=9)

    daemon.answer = late
    with session_of(daemon, {"values": values, "count": count, "mask": mask}) as session:
        session.average()
    assert torch.equal(values, torch.tensor([1.5, 2.0]))
    assert (count.item(), mask.tolist()) == (7, [True, True])


def test_a_newcomer_loads_the_swarm_state_at_attach(daemon: FakeDaemon) -> None:
    values = torch.zeros(3)

    def snapshot(call: Round) -> Iterator[Any]:
        call.trainer.state = b"step 40"
        for view in call.views().values():
            view.fill_(7.0)
        yield result("alone", loaded_snapshot=True, version=12)

    daemon.sync_answer = snapshot
    with session_of(daemon, [values]) as session:
        assert torch.equal(values, torch.full((3,), 7.0))
        assert session.synced is not None
        assert session.synced.loaded_snapshot
        assert session.version == 12
        assert session.get_state() == b"step 40"
        session.put_state(b"step 41")
        assert session.get_state() == b"step 41"


def test_a_sync_that_finds_the_trainer_current_says_whose_parameters_it_has(
    daemon: FakeDaemon,
) -> None:
    daemon.sync_answer = lambda call: iter([result("complete", accepted=False, participants=0)])
    with session_of(daemon, [torch.ones(1)]) as session:
        assert session.state_dict()["founder"] == "12D3KooWFake"
        assert session.version == 0


def test_a_loaded_snapshot_is_taken_even_when_its_round_failed(daemon: FakeDaemon) -> None:
    values = torch.zeros(3)

    def loaded_then_failed(call: Round) -> Iterator[Any]:
        for view in call.views().values():
            view.fill_(7.0)
        yield result("failed", accepted=False, loaded_snapshot=True, reason="timeout", version=12)

    daemon.answer = loaded_then_failed
    with session_of(daemon, [values]) as session:
        session.average()
        assert session.version == 12
    assert torch.equal(values, torch.full((3,), 7.0))


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 1.5, 2**32 + 1, "3", None])
def test_bad_weights_are_refused_before_any_traffic(daemon: FakeDaemon, weight: Any) -> None:
    with session_of(daemon, [torch.ones(1)], sync=False) as session:
        with pytest.raises(TrainerError, match=r"expected an integer 0\.\.2\^32") as caught:
            session.average(weight=weight)
        assert caught.value.reason == "weight_out_of_range"
    assert daemon.calls == []


def test_whole_numbers_of_any_type_are_weights(daemon: FakeDaemon) -> None:
    with session_of(daemon, [torch.ones(1)], sync=False) as session:
        for weight in (0, 30.0, torch.tensor(20), 2**32):
            session.average(weight=weight)
    assert [call.weight for call in daemon.calls] == [0, 30, 20, 2**32]


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"rounds": "all"},
        {"min_participants": 0},
        {"on_partial": "maybe"},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
    ],
)
def test_bad_options_are_refused_before_any_traffic(daemon: FakeDaemon, options: Any) -> None:
    word = next(iter(options))
    session = session_of(daemon, [torch.ones(1)], sync=False)
    with session, pytest.raises(TrainerError, match=f"{word} "):
        session.average(**options)
    assert daemon.calls == []


def test_options_travel(daemon: FakeDaemon) -> None:
    with session_of(daemon, [torch.ones(1)], sync=False) as session:
        session.average(weight=2, rounds="sweep", min_participants=3, on_partial="skip")
        session.average(rounds=2, timeout_s=5)
    sweep, two = daemon.calls
    assert (sweep.rounds, sweep.min_participants, sweep.on_partial) == (0, 3, "skip")
    assert (two.rounds, two.timeout_s, two.weight) == (2, 5.0, 1)
    assert two.generation == sweep.generation + 2


def test_a_nan_is_refused_with_the_tensors_name(daemon: FakeDaemon) -> None:
    tensors = {"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])}
    with session_of(daemon, tensors, sync=False) as session:
        with pytest.raises(TrainerError, match="'bad'") as caught:
            session.average()
        assert caught.value.reason == "not_finite"
        tensors["bad"].zero_()
        assert session.average().status == "complete"


def test_another_schema_is_refused_with_the_first_difference(daemon: FakeDaemon) -> None:
    with session_of(daemon, {"a": torch.ones(3)}), pytest.raises(TrainerError) as caught:
        session_of(daemon, {"a": torch.ones(4)})
    assert "'a' is float32 [3] here but float32 [4] there" in str(caught.value)
    assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "schema_differs")


def test_dtypes_without_a_mean_are_refused_before_any_traffic(tmp_path: Path) -> None:
    nowhere = tmp_path / "none.sock"
    with pytest.raises(TrainerError, match="'z' has dtype complex64"):
        attach("test", tensors={"z": torch.zeros(1, dtype=torch.complex64)}, socket=nowhere)
    with pytest.raises(TrainerError, match="either model= or tensors="):
        attach("test", socket=nowhere)
    with pytest.raises(TrainerError, match="no tensors"):
        attach("test", tensors=[], socket=nowhere)
    with pytest.raises(TrainerError, match=r"tensors\['0'\] is a float"):
        attach("test", tensors=[1.0], socket=nowhere)  # type: ignore[list-item]


def test_a_changed_tensor_is_named(daemon: FakeDaemon) -> None:
    model = nn.Linear(2, 2)
    with attach("test", model=model, socket=daemon.socket) as session:
        model.bias = nn.Parameter(torch.zeros(3))
        with pytest.raises(TrainerError, match=r"changed since attach: .*'bias'") as caught:
            session.average()
    assert caught.value.reason == "schema_changed"


def test_a_checkpoint_says_what_it_holds(daemon: FakeDaemon) -> None:
    with session_of(daemon, [torch.ones(1)]) as session:
        session.average()
        state = session.state_dict()
    assert state["run"] == "test"
    assert state["version"] == 1
    assert state["founder"] == "12D3KooWFake"

    with session_of(daemon, [torch.ones(1)], state=state) as session:
        request = daemon.only_trainer().request
        assert (request.version, request.founder) == (1, "12D3KooWFake")
        assert session.state_dict() == state

    with session_of(daemon, [torch.ones(1)], version=5) as session:
        assert daemon.only_trainer().request.version == 5
        first = daemon.only_trainer()
        session.load_state_dict(state)  # after attach: the daemon has to hear of it
        until(lambda: first.gone.is_set(), what="the old attachment ends")
        assert session.wait_attached(10)
        assert session.version == 1
        with pytest.raises(TrainerError, match="a checkpoint of run 'other'"):
            session.load_state_dict({**state, "run": "other"})


def test_the_context_manager_detaches(daemon: FakeDaemon) -> None:
    with session_of(daemon, [torch.ones(1)]) as session:
        assert session.attached
        assert session.peer_id == "12D3KooWFake"
        path = daemon.only_trainer().path
    assert not session.attached
    assert len(daemon.detached) == 1
    assert not path.exists()
    session.close()  # twice is fine


def test_two_threads_take_turns(daemon: FakeDaemon) -> None:
    inside = threading.Semaphore(1)

    def exclusive(call: Round) -> Iterator[Any]:
        assert inside.acquire(blocking=False)
        inside.release()
        yield result(version=1)

    daemon.answer = exclusive
    errors: list[Exception] = []
    with session_of(daemon, [torch.ones(1)]) as session:

        def work() -> None:
            try:
                for _ in range(5):
                    session.average()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert errors == []
    assert len(daemon.calls) == 16  # and one sync
