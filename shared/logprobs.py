"""Log-probability records: what is reported about one token, as bytes that hops carry without looking inside.

A *token record* (worker to tokenizer) is ``int32 rank, int32 ids[k + 1], float32 logprobs[k + 1]``, little-endian:
first the token itself, then the k most probable ones, best first (the token itself may be among them). Rank 1 is the
most probable token. The log-probabilities are natural logarithms of the softmax of the model's own logits, before any
sampling parameter.

A *text record* (tokenizer to gateway) is the msgpack array of a token record and the text of each of its tokens as
bytes, nil where an id has no text.
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from shared.errors import ProtocolError
from shared.messages import Int32


class TokenLogprob(NamedTuple):
    """One token at one position."""

    token_id: int
    logprob: float
    text: bytes | None
    """The token's own bytes; None: it has no text, or the record is a token record."""


class Logprobs(NamedTuple):
    """One position, unpacked."""

    rank: int
    token: TokenLogprob
    top: list[TokenLogprob]
    """The most probable tokens, best first."""


def pack_records(ranks: Int32, ids: Int32, logprobs: npt.NDArray[np.float32]) -> list[bytes]:
    """Token records of many positions.

    Args:
        ranks: [positions].
        ids: [positions, k + 1] the token, then the k most probable ones.
        logprobs: [positions, k + 1].
    """
    columns = (ranks[:, None], ids, logprobs.astype("<f4", copy=False).view("<i4"))
    packed = np.ascontiguousarray(np.concatenate(columns, axis=1), "<i4")
    return [row.tobytes() for row in packed]


def token_ids_of(record: bytes) -> list[int]:
    """The ids of a token record: the token itself, then the most probable ones.

    Raises:
        ProtocolError: it is not a token record.
    """
    count = _entries(record)
    ids: list[int] = np.frombuffer(record, "<i4", count, 4).tolist()
    return ids


def to_text_record(record: bytes, texts: list[bytes | None]) -> bytes:
    """Add to a token record the text of each of its tokens, in the order of ``token_ids_of``."""
    packed: bytes = msgpack.packb([record, texts])
    return packed


def unpack(record: bytes) -> Logprobs:
    """A token record.

    Raises:
        ProtocolError: it is none.
    """
    return _unpack(record, [None] * _entries(record))


def unpack_text(record: bytes) -> Logprobs:
    """A text record.

    Raises:
        ProtocolError: it is none.
    """
    try:
        numbers, texts = msgpack.unpackb(record)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a log-probability record is damaged: {error}") from error
    return _unpack(numbers, texts)


def _unpack(record: bytes, texts: list[bytes | None]) -> Logprobs:
    count = _entries(record)
    ids = np.frombuffer(record, "<i4", count, 4).tolist()
    values = np.frombuffer(record, "<f4", count, 4 * (count + 1)).tolist()
    entries = [TokenLogprob(*entry) for entry in zip(ids, values, texts, strict=True)]
    return Logprobs(int.from_bytes(record[:4], "little", signed=True), entries[0], entries[1:])


def _entries(record: bytes) -> int:
    count, rest = divmod(len(record) - 4, 8)
    if rest or count < 1:
        raise ProtocolError(f"a log-probability record of {len(record)} bytes")
    return count
