"""One key file, one PeerID, on every side that reads it; anything else is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import libp2p.crypto.pb.crypto_pb2 as crypto_pb2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair

from moshpitd.errors import ConfigError
from moshpitd.net.identity import Identity, is_peer_id, verify


def test_created_once_with_a_private_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    first = Identity.load_or_create(path)
    second = Identity.load_or_create(str(path))
    assert first.peer_id == second.peer_id
    assert first.peer_id.startswith("12D3KooW")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_file_is_the_64_byte_form(tmp_path: Path) -> None:
    path = tmp_path / "key"
    identity = Identity.load_or_create(path)
    message = crypto_pb2.PrivateKey.FromString(path.read_bytes())
    assert message.key_type == crypto_pb2.KeyType.Ed25519
    assert message.data[32:] == identity.keypair.public_key.to_bytes()


def test_repr_holds_no_secret(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "key")
    assert "keypair" not in repr(identity)
    assert identity.keypair.private_key.to_bytes().hex() not in repr(identity)


def test_signature_holds_for_its_key_and_data_only(tmp_path: Path) -> None:
    one, other = (Identity.load_or_create(tmp_path / name) for name in ("one", "other"))
    signature = one.sign(b"record")
    assert verify(one.peer_id, b"record", signature)
    assert not verify(one.peer_id, b"recorD", signature)
    assert not verify(other.peer_id, b"record", signature)
    assert not verify(one.peer_id, b"record", signature[:-1])


@given(st.text(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_verify_takes_anything(peer_id: str, data: bytes, signature: bytes) -> None:
    assert not verify(peer_id, data, signature)
    assert not is_peer_id(peer_id)


def message_of(data: bytes, key_type: int = 1) -> bytes:
    return bytes(crypto_pb2.PrivateKey(key_type=key_type, data=data).SerializeToString())


KEYPAIR = create_new_key_pair(bytes(range(32)))  # always the same: it is in names of tests
SEED, PUBLIC = KEYPAIR.private_key.to_bytes(), KEYPAIR.public_key.to_bytes()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no Ed25519 key of libp2p"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----", "no Ed25519 key of libp2p"),
        (message_of(SEED), "32 bytes"),
        (message_of(SEED + PUBLIC, key_type=0), "no Ed25519 key"),
        (message_of(SEED + bytes(32)), "does not belong"),
        (bytes(10_000), "longer than"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=word) as caught:
        Identity.load_or_create(path)
    assert caught.value.file == str(path)
    assert "64-byte" in caught.value.expected


def test_readable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        Identity.load_or_create(path)


def test_directory_and_dangling_link_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Identity.load_or_create(tmp_path)
    link = tmp_path / "link"
    os.symlink(tmp_path / "nowhere", link)
    with pytest.raises(ConfigError, match="cannot read"):
        Identity.load_or_create(link)


def test_unwritable_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write a new identity"):
        Identity.load_or_create(tmp_path / "file" / "key")
