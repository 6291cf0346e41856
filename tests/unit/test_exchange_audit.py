"""Audits in the data plane: parts made once more by a second member. One rule: an honest reducer is
never called wrong, and a lie several bounds high always is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moshpitd.core.effects import Bar, Check, Close, OpenAudit, PushAudit
from moshpitd.core.events import AuditArrived, Barred, Checked, Event
from moshpitd.core.messages import Group
from moshpitd.daemon.auditing import Auditor
from moshpitd.daemon.exchange import run_hash
from moshpitd.net.frames import FrameKind, Header
from moshpitd.tensors.codecs import CODECS, RAW
from moshpitd.tensors.deviation import USEFUL, Expected, Owed, auditable, rounding
from moshpitd.tensors.layout import Part
from moshpitd.tensors.mapped import bytes_of, untyped
from moshpitd.tensors.reduction import PartAccumulator
from tests.kit.planes import (
    RUN,
    Plane,
    close_round,
    group_of,
    layout_of,
    open_round,
    planes,
    play_round,
    set_generation,
    some_tensors,
)
from tests.unit.test_exchange import over_tcp

AUDITABLE = ["float32", "float16", "bfloat16", "int8", "int4", "minmax-uint8", "bagua-minmax-uint8"]


def audited_group(made: Sequence[Plane], codec: str = "float32", **options: object) -> Group:
    return replace(group_of(made, codec=codec, **options), audit_fraction=1.0)  # type: ignore[arg-type]


def auditor_of(plane: Plane, group: Group) -> Auditor:
    return plane.exchange._runs[RUN].rounds[group.group_id]._auditor


def audit(
    made: Sequence[Plane], group: Group, part: int, auditor: int, inside: Sequence[int]
) -> Checked:
    """As the core has one part checked."""
    plane = made[auditor]
    plane.exchange.handle(RUN, OpenAudit(group.group_id, (part,)))
    others = {i for i in inside if i != auditor}
    for i in others:
        made[i].exchange.handle(RUN, PushAudit(group.group_id, auditor, (part,)))
    while others:
        arrived = plane.wait(AuditArrived)
        assert arrived.group_id == group.group_id
        assert arrived.part == part
        others.remove(arrived.sender)
    return checked(plane, group, part)


def checked(plane: Plane, group: Group, part: int) -> Checked:
    plane.exchange.handle(RUN, Check(group.group_id, part))
    event: Event = plane.wait(Checked)
    assert isinstance(event, Checked)
    assert (event.group_id, event.part) == (group.group_id, part)
    return event


def audit_all(
    made: Sequence[Plane],
    group: Group,
    known: Sequence[dict[int, tuple[tuple[int, ...], int]]],
    reducers: Sequence[int],
) -> list[Checked]:
    """Every part by every member that does not reduce it: more auditors than there would be."""
    return [
        audit(made, group, part, auditor, known[auditor][part][0])
        for part, reducer in enumerate(reducers)
        for auditor in range(len(made))
        if auditor != reducer
    ]


def refill(plane: Plane, tensors: dict[str, Tensor]) -> None:
    plane.layout.gather(list(tensors.values()), plane.buckets["t"].data)


def lossy_part(made: Sequence[Plane], reducers: Sequence[int], of: int) -> Part:
    """A float32 part that member `of` reduces."""
    return next(
        part
        for part in made[0].layout.parts
        if part.dtype == "float32" and reducers[part.index] == of
    )


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Plane]]:
    with planes(3, layout_of(some_tensors(0)), tmp_path) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", some_tensors(number))
        yield made


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Reducers whose means are spoilt, in the same way for everybody; auditors make their own."""
    honest = PartAccumulator.take

    def tell(spoil: Callable[[Tensor], Tensor]) -> None:
        def take(self: PartAccumulator) -> Tensor:
            mean = honest(self)
            return spoil(mean) if not active[0] else mean

        active = [False]
        verdict = Auditor._verdict

        def judged(self: Auditor, *given: object) -> tuple[bool, str]:
            active[0] = True  # the auditor's accumulator is of the same class
            try:
                return verdict(self, *given)  # type: ignore[arg-type]
            finally:
                active[0] = False

        monkeypatch.setattr(PartAccumulator, "take", take)
        monkeypatch.setattr(Auditor, "_verdict", judged)

    return tell


# -- honest rounds --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", AUDITABLE)
def test_honest_reducers_are_right_round_after_round(codec: str, three: list[Plane]) -> None:
    """With error feedback, changing reducers, weights, and values that shrink to a tenth each
    round: then what is owed from before is larger than the step of the codec."""
    for turn in range(5):
        order = [three[(turn + i) % 3] for i in range(3)]
        for number, plane in enumerate(order):
            tensors = some_tensors(turn * 10 + number)
            refill(plane, {n: t * 0.1**turn if t.dtype == torch.float32 else t
                           for n, t in tensors.items()})  # fmt: skip
        group = audited_group(order, codec, weights=[1.0, 2.5, 3.0])
        reducers = open_round(order, group)
        known = play_round(order, group, reducers)
        found = audit_all(order, group, known, reducers)
        assert [event for event in found if not event.right] == []
        assert len(found) == 2 * len(reducers)
        close_round(order, group)
    assert all(plane.exchange.dropped == {} for plane in three)


def test_what_is_owed_from_larger_values_is_remembered(three: list[Plane]) -> None:
    """The same rounds with auditors that forget: so the test above can fail."""
    wrong = 0
    for turn in range(3):
        for number, plane in enumerate(three):
            refill(plane, {n: t * 0.01**turn if t.dtype == torch.float32 else t
                           for n, t in some_tensors(number).items()})  # fmt: skip
            plane.exchange._runs[RUN].owed = Owed()
        group = audited_group(three, "int8")
        reducers = open_round(three, group)
        known = play_round(three, group, reducers)
        wrong += sum(not event.right for event in audit_all(three, group, known, reducers))
        close_round(three, group)
    assert wrong > 0


def test_a_codec_less_lossy_than_the_last_one_still_pays_what_is_owed(three: list[Plane]) -> None:
    for codec in ("int4", "float32", "int8", "float16"):
        for number, plane in enumerate(three):
            refill(plane, some_tensors(number))
        group = audited_group(three, codec)
        reducers = open_round(three, group)
        known = play_round(three, group, reducers)
        assert all(event.right for event in audit_all(three, group, known, reducers)), codec
        close_round(three, group)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_over_real_links(codec: str, tmp_path: Path) -> None:
    with planes(3, layout_of(some_tensors(0)), tmp_path, over_tcp) as made:
        for number, plane in enumerate(made):
            plane.trainer("t", some_tensors(number))
        group = audited_group(made, codec)
        reducers = open_round(made, group)
        known = play_round(made, group, reducers)
        assert all(event.right for event in audit_all(made, group, known, reducers))
        close_round(made, group)


def test_who_was_not_inside_is_not_asked_and_not_heard(three: list[Plane]) -> None:
    group = audited_group(three, weights=[1, 0, 3])
    reducers = open_round(three, group)
    known = play_round(three, group, reducers)
    part = reducers.index(0)
    three[1].exchange.handle(RUN, OpenAudit(group.group_id, (part,)))  # a newcomer may audit
    assert known[1][part][0] == (0, 2)
    found = audit(three, group, part, 1, (0, 2))
    assert found.right
    part = reducers.index(2)
    assert audit(three, group, part, 0, known[0][part][0]).right
    three[1].exchange.handle(RUN, PushAudit(group.group_id, 0, (part,)))
    assert three[1].exchange.dropped == {"nothing_to_audit": 1}
    close_round(three, group)


# -- lies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "share"),
    [("float32", 1e-5), ("float32", 0.01), ("float16", 0.01), ("int8", 0.03), ("bfloat16", 0.03)],
)
def test_a_consistent_lie_is_found(
    codec: str,
    share: float,
    three: list[Plane],
    lies: Callable[[Callable[[Tensor], Tensor]], None],
) -> None:
    """One value per part moved by a share of the part's largest: all members hold the same bits."""

    def moved(mean: Tensor) -> Tensor:
        if mean.dtype == torch.float32:
            mean[mean.numel() // 2] += share * mean.abs().max()
        return mean

    for turn in range(2):  # also when something may be owed
        for number, plane in enumerate(three):
            refill(plane, some_tensors(10 * turn + number))
        if turn:
            lies(moved)
        group = audited_group(three, codec)
        reducers = open_round(three, group)
        known = play_round(three, group, reducers)
        assert all(part == known[0] for part in known)
        for event in audit_all(three, group, known, reducers):
            lied = turn > 0 and three[0].layout.parts[event.part].dtype == "float32"
            assert event.right is not lied, event
            assert "differs by" in event.detail
            assert "allowed" in event.detail
        close_round(three, group)


def test_lies_in_the_other_dtypes_are_found(
    three: list[Plane], lies: Callable[[Callable[[Tensor], Tensor]], None]
) -> None:
    def moved(mean: Tensor) -> Tensor:
        if mean.dtype == torch.bool:
            mean.logical_not_()
        elif mean.dtype == torch.int64:
            mean[0] += 1
        else:
            mean[0] += 0.05 * mean.abs().max()
        return mean

    lies(moved)
    group = audited_group(three, "top-k")  # float32 cannot be judged; the others travel as they are
    reducers = open_round(three, group)
    known = play_round(three, group, reducers)
    for event in audit_all(three, group, known, reducers):
        dtype = three[0].layout.parts[event.part].dtype
        assert event.right is (dtype == "float32"), (dtype, event)
    close_round(three, group)


def test_an_exposed_lie_of_large_values_does_not_widen_later_bounds(three: list[Plane]) -> None:
    """What was found wrong kept local values, so nobody may owe its rounding."""
    group = audited_group(three, "int8")
    reducers = open_round(three, group)
    play_round(three, group, reducers)
    part = three[0].layout.parts[next(p.index for p in three[0].layout.parts
                                      if p.dtype == "float32")]  # fmt: skip
    for plane in three:
        plane.exchange.handle(RUN, Close(group.group_id, without=(part.index,)))
        known = plane.exchange._runs[RUN].owed
        assert known.of(part, 1024) is None
        assert any(
            known.of(p, 1024) is not None for p in plane.layout.parts if p.dtype == "float32"
        )


@pytest.mark.parametrize("codec", ["top-k", "rand-k", "sign-l1", "sign-rms", "qsgd", "nuqsgd",
                                   "natural"])  # fmt: skip
def test_a_codec_without_a_useful_bound_is_right_and_says_so(
    codec: str, three: list[Plane], lies: Callable[[Callable[[Tensor], Tensor]], None]
) -> None:
    group = audited_group(three, codec)
    reducers = open_round(three, group)
    known = play_round(three, group, reducers)
    part = next(p.index for p in three[0].layout.parts if p.dtype == "float32")
    auditor = next(i for i in range(3) if i != reducers[part])
    found = audit(three, group, part, auditor, known[auditor][part][0])
    assert found.right
    assert f"codec {codec} cannot be audited" in found.detail
    close_round(three, group)


# -- what may be wrong with an audit itself -------------------------------------------------------


def test_what_cannot_be_used_ends_the_audit_without_blame(three: list[Plane]) -> None:
    """The core is told that it came, so that it does not wait; but nobody is called a liar."""
    group = audited_group(three, "int8")
    reducers = open_round(three, group)
    play_round(three, group, reducers)
    part = lossy_part(three, reducers, 1)
    plane = three[0]
    good = torch.zeros(part.numel)
    cases: list[tuple[bytes, int, str]] = [
        (b"short", RAW.code, "5 bytes, expected"),
        (bytes(bytes_of(good)), 9, "codec 9, expected 3 or 0"),
        (bytes(bytes_of(good.fill_(float("nan")))), RAW.code, "not_finite"),
    ]
    for payload, code, words in cases:
        plane.exchange.handle(RUN, OpenAudit(group.group_id, (part.index,)))
        send(three[2], plane, group, part.index, payload, code)
        assert plane.wait(AuditArrived) == AuditArrived(group.group_id, part.index, 2)
        found = checked(plane, group, part.index)
        assert found.right
        assert "cannot be audited" in found.detail
        assert words in found.detail
    close_round(three, group)


def send(source: Plane, to: Plane, group: Group, part: int, payload: bytes, code: int) -> None:
    header = Header(
        FrameKind.AUDIT, run_hash(RUN), group.group_id, part,
        codec=code, length=len(payload),
    )  # fmt: skip
    to.exchange.on_frame(source.peer_id, header, memoryview(bytearray(payload)))


def test_audits_that_nobody_asked_for_are_dropped(three: list[Plane]) -> None:
    plain = group_of(three)
    group = audited_group(three, weights=[1, 1, 0])
    payload = bytes(three[0].layout.parts[0].nbytes)
    for current in (plain, group):
        reducers = open_round(three, current)
        play_round(three, current, reducers)
        send(three[1], three[0], current, 0, payload, RAW.code)
        assert three[0].exchange.dropped.pop("audit_unasked") == 1
        if current is plain:
            close_round(three, plain)
    plane = three[0]
    plane.exchange.handle(RUN, OpenAudit(group.group_id, (0,)))
    send(three[2], plane, group, 0, payload, RAW.code)  # not inside
    assert plane.exchange.dropped.pop("audit_unasked") == 1
    for _ in range(2):
        send(three[1], plane, group, 0, payload, RAW.code)
    assert plane.exchange.dropped == {"repeated": 1}
    arrived = [e for e in plane.quiet() if isinstance(e, AuditArrived)]
    assert arrived == [AuditArrived(group.group_id, 0, 1)]
    close_round(three, group)


def test_a_contribution_that_is_missing_is_no_proof(three: list[Plane]) -> None:
    group = audited_group(three)
    reducers = open_round(three, group)
    play_round(three, group, reducers)
    three[0].exchange.handle(RUN, OpenAudit(group.group_id, (1,)))
    found = checked(three[0], group, 1)
    assert found.right
    assert "nothing of members [1, 2]" in found.detail
    close_round(three, group)


def test_a_bucket_that_was_taken_back_is_no_proof(three: list[Plane]) -> None:
    group = audited_group(three)
    reducers = open_round(three, group)
    known = play_round(three, group, reducers)
    set_generation(three[0].buckets["t"], 4)
    found = audit(three, group, 1, 0, known[0][1][0])
    assert found.right
    assert "took the bucket back" in found.detail
    close_round(three, group)


def test_a_liar_among_the_contributors_makes_the_reducer_look_wrong_and_no_more(
    three: list[Plane],
) -> None:
    """It is one member's word against another's, and a part that keeps local values."""
    group = audited_group(three)
    reducers = open_round(three, group)
    play_round(three, group, reducers)
    part = lossy_part(three, reducers, 1)
    plane = three[0]
    plane.exchange.handle(RUN, OpenAudit(group.group_id, (part.index,)))
    three[1].exchange.handle(RUN, PushAudit(group.group_id, 0, (part.index,)))
    assert plane.wait(AuditArrived).sender == 1
    send(three[2], plane, group, part.index, bytes(part.nbytes), RAW.code)
    assert plane.wait(AuditArrived).sender == 2
    assert not checked(plane, group, part.index).right
    close_round(three, group)


# -- what is kept ---------------------------------------------------------------------------------


def test_what_is_kept_is_a_bucket_and_goes_with_the_round(three: list[Plane]) -> None:
    layout = three[0].layout
    for codec, width in (("float32", 4), ("float16", 2), ("int8", 1)):
        group = audited_group(three, codec)
        reducers = open_round(three, group)
        auditors = [auditor_of(plane, group) for plane in three]
        play_round(three, group, reducers)
        for me, auditor in enumerate(auditors):
            sizes = sum(
                part.nbytes
                if reducers[part.index] == me
                else CODECS[codec].payload_bytes(part.numel, "float32")
                if part.dtype == "float32"
                else part.nbytes
                for part in layout.parts
            )
            assert auditor.nbytes == sizes
            assert width == 4 or sizes < layout.nbytes
        close_round(three, group)
        assert all(auditor.nbytes == 0 for auditor in auditors)


@pytest.mark.parametrize("how", ["no audits", "no bound"])
def test_nothing_is_kept_that_nobody_can_ask_for(how: str, three: list[Plane]) -> None:
    group = group_of(three) if how == "no audits" else audited_group(three, "top-k")
    reducers = open_round(three, group)
    auditors = [auditor_of(plane, group) for plane in three]
    play_round(three, group, reducers)
    wide = {part.index for part in three[0].layout.parts if part.dtype == "float32"}
    for auditor in auditors:
        assert not wide & auditor._kept.keys()
        assert (auditor.nbytes == 0) is (how == "no audits")
    close_round(three, group)


def test_a_lingering_round_keeps_nothing_once_the_next_begins(three: list[Plane]) -> None:
    group = audited_group(three)
    play_round(three, group, open_round(three, group))
    before = auditor_of(three[0], group)
    assert before.nbytes > 0
    following = audited_group(three)
    open_round(three, following)
    assert before.nbytes == 0
    close_round(three, following)
    close_round(three, group)


def test_after_a_takeover_what_was_sent_coded_may_have_been_added_raw(three: list[Plane]) -> None:
    """Or the other way round: what was kept last is what goes to the auditor."""
    group = audited_group(three, "int4")
    reducers = open_round(three, group)
    known = play_round(three, group, reducers)
    part = lossy_part(three, reducers, 1)
    _, coded = auditor_of(three[2], group)._kept[part.index]
    raw = torch.empty(part.numel)
    CODECS["int4"].decode(coded, raw)
    auditor_of(three[2], group).keep(part, RAW, untyped(raw))
    assert audit(three, group, part.index, 0, known[0][part.index][0]).right
    close_round(three, group)


@pytest.mark.parametrize("exact", [True, False])
def test_what_was_not_added_as_it_came_here_is_allowed_for(exact: bool, three: list[Plane]) -> None:
    part = lossy_part(three, [0] * len(three[0].layout.parts), 0)
    values = torch.ones(part.numel)
    allowed = []
    for weight in (0.0, 1.0, 3.0):
        expected = Expected(part, CODECS["int8"])
        expected.add(values, 1.0, exact=True)
        if weight:
            expected.add(values, weight, exact=exact)
        allowed.append(expected.differs(values, values, total_weight=1.0 + weight, owed=Owed())[-1])
    once = CODECS["int8"].error_bound(1.0)
    assert allowed[0] == pytest.approx(2 * once, rel=0.02)
    for bound, share in zip(allowed[1:], (0.5, 0.75), strict=True):
        assert bound == pytest.approx((2 + (0 if exact else share)) * once, rel=0.02)


def test_a_bar_does_not_end_an_audit(three: list[Plane]) -> None:
    group = audited_group(three, "int8")
    reducers = open_round(three, group)
    known = play_round(three, group, reducers)
    three[0].exchange.handle(RUN, Bar(group.group_id, 1, (1,)))
    three[0].wait(Barred)
    assert audit(three, group, 1, 0, known[0][1][0]).right
    close_round(three, group)


# -- the bounds -----------------------------------------------------------------------------------


def test_which_codecs_can_be_audited() -> None:
    assert [name for name, codec in CODECS.items() if auditable(codec)] == AUDITABLE


@pytest.mark.parametrize("codec", AUDITABLE)
def test_the_bound_of_a_codec_is_a_straight_line(codec: str) -> None:
    """Which `rounding` takes for granted; and it is counted from what is left after coding."""
    chosen = CODECS[codec]
    magnitudes = torch.tensor([0.0, 1e-6, 0.3, 1.0, 17.0, 1e6], dtype=torch.float64)
    exact = [chosen.error_bound(before) for before in magnitudes.tolist()]
    assert all(bound <= USEFUL * max(before, 1e-6) for before, bound in
               zip(magnitudes.tolist()[2:], exact[2:], strict=True))  # fmt: skip
    after = (magnitudes - torch.tensor(exact, dtype=torch.float64)).clamp(min=0)
    assert (rounding(chosen, after) >= torch.tensor(exact, dtype=torch.float64)).all()
