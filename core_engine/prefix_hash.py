"""Chain hashes of full KV blocks: equal digests name equal prefixes."""

from __future__ import annotations

import hashlib


def root_digest(salt: str = "") -> bytes:
    """The parent of a sequence's first block. A salt goes in here and so reaches every digest of the chain.

    Fields are tagged and the salt's length is bounded by the digest, so no salt can be confused with another kind of
    input.
    """
    return hashlib.sha256(b"headrace/prefix/1\0salt\0" + salt.encode()).digest()


def block_digest(parent: bytes, ids: bytes) -> bytes:
    """sha256 over the parent's digest (32 bytes) and the block's token ids (raw int32)."""
    return hashlib.sha256(parent + ids).digest()
