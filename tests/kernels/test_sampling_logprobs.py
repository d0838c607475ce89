"""Log-probabilities over several tiles of the vocabulary, beside features that change the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.kernels.logprobs import TILE
from gpu_worker.sampling.cuda_sampler import NONE, pack
from shared.logprobs import unpack
from tests.kernels.sampling_pair import Pair, make_logits


@pytest.mark.parametrize("vocab_size", [33, TILE, 2 * TILE + 77])
@pytest.mark.parametrize("rounded", [False, True])
def test_records_are_those_of_the_cpu(vocab_size: int, rounded: bool, device: torch.device) -> None:
    """Of the logits as they were, ids without a token included."""
    pair = Pair(4, vocab_size, device, num_tokens=vocab_size - 3)
    pair.add(0, logprobs=20, temperature=2.0, repetition_penalty=2.0)
    pair.add(1, temperature=0.5)
    pair.add(2, logprobs=3, allowed_token_ids=[4, vocab_size - 4])
    pair.add(3, logprobs=0, temperature=0.0)
    logits = make_logits(4, vocab_size, seed=vocab_size)
    if rounded:
        logits = logits.round()
    logits[:, -2:] = 30.0
    slots = [2, 0, 1, 3]
    (tokens, found), (wanted_tokens, wanted) = pair.sample(logits, slots), pair.expected(logits, slots)
    assert tokens == wanted_tokens
    assert [row for row, _ in found] == [row for row, _ in wanted] == [0, 1, 3]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        a, b = unpack(one), unpack(other)
        assert [a.token.token_id, *(entry.token_id for entry in a.top)] == [
            b.token.token_id,
            *(entry.token_id for entry in b.top),
        ]
        np.testing.assert_allclose([e.logprob for e in a.top], [e.logprob for e in b.top], atol=2e-5)
        np.testing.assert_allclose(a.token.logprob, b.token.logprob, atol=2e-5)
        assert abs(a.rank - b.rank) <= b.rank // 1000


def test_pack_leaves_out_rows_that_want_nothing() -> None:
    results = np.zeros((3, 43), np.int32)
    results[:, 0] = [5, 6, 7]
    results[:, 1:22] = np.arange(21)
    results[:, 22:] = (-np.arange(21, dtype=np.float32)).view(np.int32)
    records = pack(results, np.array([2, NONE, 0]))
    assert [row for row, _ in records] == [0, 2]
    first, last = unpack(records[0][1]), unpack(records[1][1])
    assert (first.rank, first.token.token_id, first.token.logprob) == (5, 0, 0.0)
    assert [(entry.token_id, entry.logprob) for entry in first.top] == [(1, -1.0), (2, -2.0)]
    assert (last.rank, last.top) == (7, [])
    assert pack(results, np.full(3, NONE)) == []
