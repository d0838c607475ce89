"""Greedy rows and draws with a temperature: the tokens of the CPU's sampler, whatever the other rows are."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.sampling_argmax import BLOCK, ArgmaxState, sample_argmax
from tests.kernels.sampling_pair import Pair, make_logits, make_request

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.0, 2.5)


@pytest.mark.parametrize("vocab_size", [1, 5, 1024, BLOCK - 1, BLOCK + 3, 3 * BLOCK + 700])
def test_tokens_are_those_of_the_cpu(vocab_size: int, device: torch.device) -> None:
    slots = 14
    pair = Pair(slots, vocab_size, device)
    pair.add_all(
        [
            make_request(slot, slot % 3, temperature=TEMPERATURES[slot % len(TEMPERATURES)], seed=slot * 7919 - 50)
            for slot in range(slots)
        ]
    )
    rows = [slot for slot in range(slots) if slot != 5][::-1]
    logits = make_logits(len(rows), vocab_size, seed=vocab_size)
    assert pair.sample(logits, rows, "plain")[0] == pair.expected(logits, rows)[0]


def test_thousands_of_draws_are_those_of_the_cpu(device: torch.device) -> None:
    """Each row of a step is another seed and another position of a slot. (The interpreter has time for hundreds.)"""
    slots, vocab_size = 128, 97
    steps = 64 if device.type == "cuda" else 1
    pair = Pair(slots, vocab_size, device)
    pair.add_all([make_request(slot, seed=slot**5, temperature=0.5 + slot / 100) for slot in range(slots)])
    rows = list(range(slots))
    for step in range(steps):
        pair.state.num_tokens[:slots] = torch.arange(slots) % 7 + 12 + step
        logits = make_logits(slots, vocab_size, seed=step, scale=1.0)
        assert pair.sample(logits, rows, "plain")[0] == pair.expected(logits, rows)[0]


def test_equal_logits_go_to_the_lowest_id(device: torch.device) -> None:
    pair = Pair(2, 3 * BLOCK, device)
    logits = torch.zeros(4, 3 * BLOCK)
    logits[0, [9, 8, BLOCK + 1]] = 4.0
    logits[1, [3 * BLOCK - 1, 2 * BLOCK + 5, 2 * BLOCK + 6]] = 4.0
    logits[2] = -torch.inf
    logits[3, ::2] = -0.0
    pair.kernels.add([make_request(0, temperature=0.0)])
    # The padding slot may come twice.
    assert pair.sample(logits, [0, 1, 2, 2], "plain")[0] == [8, 2 * BLOCK + 5, 0, 0]


def test_ids_without_a_token_are_never_drawn(device: torch.device) -> None:
    pair = Pair(8, BLOCK + 100, device, num_tokens=BLOCK + 3)
    pair.add_all([make_request(slot, temperature=slot % 2 * 1.0, seed=slot) for slot in range(8)])
    logits = make_logits(8, BLOCK + 100, seed=0)
    logits[:, BLOCK + 3 :] = 100.0
    rows = list(range(8))
    tokens = pair.sample(logits, rows, "plain")[0]
    assert tokens == pair.expected(logits, rows)[0] == pair.sample(logits, rows, "full")[0]
    assert max(tokens) < BLOCK + 3


def test_a_row_gives_the_same_alone_and_in_either_variant(device: torch.device) -> None:
    pair = Pair(6, 5000, device)
    pair.add_all([make_request(slot, temperature=0.9, seed=slot) for slot in range(6)])
    logits = make_logits(6, 5000, seed=3)
    together = pair.sample(logits, list(range(6)), "full")[0]
    alone = [pair.sample(logits[slot : slot + 1], [slot], "plain")[0][0] for slot in range(6)]
    assert together == alone


def test_rows_may_lie_apart_and_state_is_left_as_it_was(device: torch.device) -> None:
    pair = Pair(3, 1000, device)
    wide = make_logits(3, 1024, seed=1).to(device)
    state = ArgmaxState(8, device)
    best = state.best.clone()
    args = (
        torch.arange(3, dtype=torch.int32, device=device),
        pair.kernels.params.records,
        pair.state.num_tokens.to(device),
    )
    tokens = sample_argmax(wide[:, 8:1008], *args, 1000, state)
    assert tokens.tolist() == wide[:, 8:1008].argmax(-1).tolist()
    assert torch.equal(state.best, best)
    assert not state.done.any()
    assert len(sample_argmax(wide[:0], *args, 1000, state)) == 0
