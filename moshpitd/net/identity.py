"""The one identity of a node: an Ed25519 key in a file, its PeerID, signatures made and checked
with it.

One rule: the secret leaves this file only as a signature or as the key pair that TLS needs; it is
never in a `repr`, a log line or an error.
"""

from __future__ import annotations

import functools
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from moshpitd.errors import ConfigError

# libp2p's PrivateKey message: field 1 (type) = 1 (Ed25519), field 2 (data) = seed and public key,
# 32 bytes each. go-libp2p demands this 64-byte form; py-libp2p writes the seed alone, so the file
# is written here. Both fields have one canonical spelling, which makes the file a prefix and the
# key.
FILE_PREFIX = bytes.fromhex("08011240")
SEED_ONLY_PREFIX = bytes.fromhex("08011220")
KEY_BYTES = 64
EXPECTED = (
    "libp2p's PrivateKey protobuf with an Ed25519 key in its 64-byte form (seed and public key)"
)
FILE_MODE = 0o600
# A longer file is not a key; the bound keeps a wrong path (a model, a device) from being read
# whole.
FILE_BYTES_MAX = 4096

# An Ed25519 PeerID is its own public key: multihash "identity", 36 bytes, then protobuf (type 1, 32
# bytes).
PEER_ID_PREFIX = bytes.fromhex("002408011220")
PEER_ID_BYTES = len(PEER_ID_PREFIX) + 32
PEER_ID_TEXT_MAX = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """The key of this node. `peer_id` is what p2pd, py-libp2p and every peer derive from the same
    key.
    """

    peer_id: str
    path: Path
    keypair: KeyPair = field(repr=False)

    @classmethod
    def load_or_create(cls, path: Path | str) -> Identity:
        """Read the key at `path`, or make one there with mode 0600. Two daemons that race get the
        same key.

        Raises ConfigError, naming the file and what was expected, for anything else that lies
        there.
        """
        path = Path(path)
        if not os.path.lexists(path):
            _create(path)
        return cls._load(path)

    @classmethod
    def _load(cls, path: Path) -> Identity:
        seed = _read_seed(path)
        keypair = create_new_key_pair(seed)
        return cls(
            peer_id=ID.from_pubkey(keypair.public_key).to_base58(), path=path, keypair=keypair
        )

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `data`."""
        return bytes(self.keypair.private_key.sign(data))


def is_peer_id(text: str) -> bool:
    """Whether `text` is the PeerID of an Ed25519 key, the only kind in this network."""
    return _public_bytes(text) is not None


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made by the key inside `peer_id`. Any input is allowed;
    garbage is False.
    """
    public = _public_bytes(peer_id)
    if public is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _public_bytes(peer_id: str) -> bytes | None:
    if len(peer_id) > PEER_ID_TEXT_MAX:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    if len(raw) != PEER_ID_BYTES or not raw.startswith(PEER_ID_PREFIX):
        return None
    # base58 has one text per value; a second spelling would make one peer look like two.
    if base58.b58encode(raw).decode() != peer_id:
        return None
    return raw[len(PEER_ID_PREFIX) :]


def _create(path: Path) -> None:
    keypair = create_new_key_pair()
    content = FILE_PREFIX + keypair.private_key.to_bytes() + keypair.public_key.to_bytes()
    # Written beside and linked into place: a reader never sees half a key, and of two daemons that
    # create at once the second finds the first one's file and uses it.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    except OSError as error:
        raise ConfigError(
            f"cannot write a new identity: {error.strerror or error}",
            file=str(path),
            key="identity",
            expected="a path in a directory that this user may write to",
        ) from error


def _read_seed(path: Path) -> bytes:
    def refuse(message: str, expected: str = EXPECTED) -> ConfigError:
        return ConfigError(message, file=str(path), key="identity", expected=expected)

    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refuse("this is not a regular file")
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise refuse(
            f"cannot read the identity: {error.strerror or error}", "a readable file"
        ) from error
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise refuse(
            f"other users may read this key (mode {mode:04o})", "mode 0600; run chmod 600 on it"
        )
    if len(raw) > FILE_BYTES_MAX:
        raise refuse(f"this is longer than {FILE_BYTES_MAX} bytes and no key")
    if raw.startswith(SEED_ONLY_PREFIX):
        raise refuse("the key has 32 bytes, the seed alone")
    if not raw.startswith(FILE_PREFIX) or len(raw) != len(FILE_PREFIX) + KEY_BYTES:
        raise refuse("this is no Ed25519 key of libp2p")
    seed, public = raw[len(FILE_PREFIX) :][:32], raw[-32:]
    if create_new_key_pair(seed).public_key.to_bytes() != public:
        raise refuse("the public half does not belong to the secret half")
    return seed
