"""The network room: libp2p identity, control messages, the directory, bulk links and the wire
encoding.

One rule: the lines below run before anything of hivemind is imported. hivemind and py-libp2p both
register a file `crypto.pb` in protobuf's global pool, and the second one to do so fails. Their
messages are the same (libp2p's `PrivateKey` and `PublicKey`), so hivemind is handed py-libp2p's.
"""

from __future__ import annotations

import sys

import libp2p.crypto.pb.crypto_pb2

sys.modules.setdefault("hivemind.proto.crypto_pb2", libp2p.crypto.pb.crypto_pb2)
