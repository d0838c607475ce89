"""Log-probabilities over several tiles of the vocabulary, beside features that change the logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from core_engine.beam_search import MOST_RECORDED
from gpu_worker.kernels.logprobs import COLUMNS, TILE
from gpu_worker.kernels.sampling_layout import MOST_LOGPROBS, RESULT
from gpu_worker.sampling.cuda_sampler import NONE, pack
from shared.logprobs import unpack
from shared.sampling import MAX_BEAM_WIDTH, MAX_LOGPROBS
from tests.kernels.sampling_pair import Pair, make_logits, make_request


def test_there_is_room_for_what_a_search_needs() -> None:
    assert COLUMNS >= MOST_LOGPROBS >= MOST_RECORDED >= MAX_BEAM_WIDTH + 2
    assert MOST_LOGPROBS >= MAX_LOGPROBS


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


@pytest.mark.parametrize("vocab_size", [33, TILE + 5, 3 * TILE + 77])
def test_as_many_as_beam_search_asks_for(vocab_size: int, device: torch.device) -> None:
    """Greedy rows with all the tokens that there is room for, beside rows with fewer; ties in the order of the ids."""
    pair = Pair(5, vocab_size, device)
    wanted_counts = [MOST_LOGPROBS, None, 21, MOST_LOGPROBS, 20]
    for slot, count in enumerate(wanted_counts):
        request = make_request(slot, 0, temperature=0.0, max_tokens=None)
        params = dataclasses.replace(request.params, logprobs=count)  # more than a request may ask for itself
        pair.add_all([dataclasses.replace(request, params=params)])
    logits = make_logits(5, vocab_size, seed=vocab_size)
    logits[3] = logits[3].round()
    slots = [3, 1, 0, 4, 2]
    (tokens, found), (wanted_tokens, wanted) = pair.sample(logits, slots), pair.expected(logits, slots)
    assert tokens == wanted_tokens
    assert [row for row, _ in found] == [row for row, _ in wanted] == [0, 2, 3, 4]
    for (row, one), (_, other) in zip(found, wanted, strict=True):
        a, b = unpack(one), unpack(other)
        assert len(a.top) == wanted_counts[slots[row]]
        assert [entry.token_id for entry in a.top] == [entry.token_id for entry in b.top]
        np.testing.assert_allclose([e.logprob for e in a.top], [e.logprob for e in b.top], atol=2e-5)
        order = torch.sort(logits[row], descending=True, stable=True).indices[: len(a.top)]
        assert [entry.token_id for entry in a.top] == order.tolist()


def test_pack_leaves_out_rows_that_want_nothing() -> None:
    entries = MOST_LOGPROBS + 1
    results = np.zeros((4, RESULT), np.int32)
    results[:, 0] = [5, 6, 7, 8]
    results[:, 1 : 1 + entries] = np.arange(entries)
    results[:, 1 + entries :] = (-np.arange(entries, dtype=np.float32)).view(np.int32)
    records = pack(results, np.array([2, NONE, 0, MOST_LOGPROBS]))
    assert [row for row, _ in records] == [0, 2, 3]
    first, last, full = (unpack(record) for _, record in records)
    assert [(entry.token_id, entry.logprob) for entry in full.top] == [(i, -i) for i in range(1, entries)]
    assert (first.rank, first.token.token_id, first.token.logprob) == (5, 0, 0.0)
    assert [(entry.token_id, entry.logprob) for entry in first.top] == [(1, -1.0), (2, -2.0)]
    assert (last.rank, last.top) == (7, [])
    assert pack(results, np.full(3, NONE)) == []
