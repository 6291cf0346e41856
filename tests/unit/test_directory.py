"""A record holds under the PeerID that signed it, for as long as it said, and any bytes are safe to
check.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moshpitd.net  # noqa: F401  the shim has to run before hivemind
from moshpitd.net.directory import CLOCK_TOLERANCE_S, RECORD_BYTES_MAX, TTL_MAX_S, SignedRecords
from moshpitd.net.identity import Identity

from hivemind.dht.validation import DHTRecord  # isort: skip
from hivemind.utils import MSGPackSerializer  # isort: skip

NOW = 1_000_000.0


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder: Path = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / name) for name in ("a", "b")]


def signed(identity: Identity, value: object = b"value", subkey: object = None) -> DHTRecord:
    record = DHTRecord(
        b"key-hash",
        MSGPackSerializer.dumps(identity.peer_id if subkey is None else subkey),
        MSGPackSerializer.dumps(value),
        NOW + 300,
    )
    return replace(record, value=SignedRecords(identity, lambda: NOW).sign_value(record))


def test_a_signed_record_holds_everywhere_and_is_stripped(identities: list[Identity]) -> None:
    records = SignedRecords(identities[1], lambda: NOW)
    record = signed(identities[0])
    assert records.validate(record)
    assert MSGPackSerializer.loads(records.strip_value(record)) == b"value"


def test_nothing_of_it_can_be_changed(identities: list[Identity]) -> None:
    records = SignedRecords(identities[1], lambda: NOW)
    record = signed(identities[0])
    other = MSGPackSerializer.dumps(identities[1].peer_id)
    for changed in (
        replace(record, key=b"another-key"),
        replace(record, subkey=other),
        replace(record, expiration_time=record.expiration_time + 1),
        replace(record, value=MSGPackSerializer.dumps(b"valuE") + record.value[-64:]),
        replace(record, value=record.value[:-1]),
        replace(record, value=MSGPackSerializer.dumps(b"value")),
        replace(record, value=b""),
    ):
        assert not records.validate(changed)


def test_only_bytes_under_a_peer_id(identities: list[Identity]) -> None:
    records = SignedRecords(identities[1], lambda: NOW)
    assert not records.validate(signed(identities[0], value={"a": 1}))
    assert not records.validate(signed(identities[0], value="text"))
    assert not records.validate(signed(identities[0], subkey=5))
    assert not records.validate(signed(identities[0], subkey=identities[1].peer_id))


def test_size_and_lifetime_are_bounded(identities: list[Identity]) -> None:
    assert not SignedRecords(identities[1], lambda: NOW).validate(
        signed(identities[0], value=bytes(RECORD_BYTES_MAX + 1))
    )
    early = NOW + 300 - TTL_MAX_S - CLOCK_TOLERANCE_S - 1
    assert not SignedRecords(identities[1], lambda: early).validate(signed(identities[0]))


@given(st.binary(max_size=60), st.binary(max_size=200), st.floats())
def test_any_bytes(subkey: bytes, value: bytes, expiry: float) -> None:
    records = SignedRecords(ANY, lambda: NOW)
    assert not records.validate(DHTRecord(b"key", subkey, value, expiry))


class _Nobody:
    peer_id = ""


ANY: Identity = _Nobody()  # type: ignore[assignment]
