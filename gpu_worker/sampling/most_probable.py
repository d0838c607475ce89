"""The first tokens of each row in order: the largest logit first, the lowest id first among equals."""

from __future__ import annotations

import torch

BLOCK = 32
_LOW = 2**32 - 1


def most_probable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest logits of each row, in order, and their ids.

    Only the ``count`` blocks of ids that come first by their largest logit can hold one of them, so that the vocabulary
    is looked at once, for the largest of each block.

    Args:
        logits: [rows, vocabulary] float32, no NaN.
        count: at most the vocabulary.

    Returns:
        [rows, count] float32 and [rows, count] int64.
    """
    vocab_size, device = logits.shape[1], logits.device
    ids = torch.arange(vocab_size, device=device)
    blocks = vocab_size // BLOCK
    if 2 * count < blocks:
        whole = blocks * BLOCK
        largest = logits[:, :whole].view(len(logits), blocks, BLOCK).amax(-1)
        found = _first(largest, ids[:blocks], count)[:, :, None] * BLOCK + ids[:BLOCK]
        rest = ids[whole:].expand(len(logits), -1)
        places = torch.cat([found.flatten(1), rest], 1)
        ids = _first(logits.gather(1, places), places, count)
    else:
        ids = _first(logits, ids, count)
    return logits.gather(1, ids), ids


def _first(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] ids of the largest ``values`` [rows, size], in order.

    A value and its id make one integer: topk leaves open which of two equal values comes first.
    """
    keys = (sortable(values).long() << 32) + (_LOW - ids)
    return _LOW - (keys.topk(count, -1).values & _LOW)


def sortable(values: torch.Tensor) -> torch.Tensor:
    """float32 as int32 in the same order; both zeros are equal. ``unsortable`` is the inverse."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def unsortable(keys: torch.Tensor) -> torch.Tensor:
    """int32 of ``sortable`` as float32."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
