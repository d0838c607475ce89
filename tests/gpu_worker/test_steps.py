"""Slots, block tables and the checks on a Step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import Harness, make_runner, make_step, slot_init
from tiny_models import VOCABULARY, TinyModels

from gpu_worker.attention.base import AttentionShape
from gpu_worker.attention.registry import make_backend
from gpu_worker.block_tables import BlockTables
from gpu_worker.kv_cache import KVCache
from gpu_worker.runner import ModelRunner
from gpu_worker.step_checks import StepError
from shared.sampling import SamplingParams

PROMPT = random.Random(8).choices(range(5, VOCABULARY), k=20)


@pytest.fixture
def runner(tiny_models: TinyModels) -> ModelRunner:
    return make_runner(tiny_models.folder("llama"))


def tables(num_slots: int = 4) -> BlockTables:
    return BlockTables(num_slots, 64, 16, torch.device("cpu"))


def test_kv_bytes_of_a_13b_model() -> None:
    """40 layers, 5120 wide, half precision: 819,200 bytes a token."""
    cpu = torch.device("cpu")
    shape = AttentionShape(num_heads=40, num_kv_heads=40, head_dim=128, block_size=16)
    half = torch.float16
    backend = make_backend(shape, cpu, dtype=half, cache_dtype=half, max_rows=1, max_context=16)
    cache = KVCache(40, backend, torch.float16, cpu, total_bytes=0, num_blocks=2)
    assert cache.block_bytes == 16 * 819_200


class TestBlockTables:
    def test_slot_mapping_example(self) -> None:
        table = tables()
        table.append(np.array([2, 2, 2]), np.array([7, 2, 9]))
        assert table.slot_mapping(torch.tensor([2]), torch.tensor([35])).tolist() == [147]

    def test_appends_in_order_and_interleaved(self) -> None:
        table = tables()
        table.append(np.array([1, 0, 1]), np.array([5, 6, 7]))
        table.append(np.array([0, 1, 0]), np.array([8, 9, 10]))
        assert table.tensor[:2].tolist() == [[6, 8, 10, 0], [5, 7, 9, 0]]
        assert table.counts.tolist() == [3, 3, 0, 0]
        table.clear(np.array([1]))
        assert table.tensor[:2].tolist() == [[6, 8, 10, 0], [0, 0, 0, 0]]

    def test_positions_without_a_block_go_to_the_null_block(self) -> None:
        table = tables()
        table.append(np.array([3]), np.array([4]))
        mapping = table.slot_mapping(torch.tensor([3, 3]), torch.tensor([15, 16]))
        assert mapping.tolist() == [79, 0]

    def test_blocks_beyond_int32_slots(self) -> None:
        table = tables()
        table.append(np.array([0]), np.array([2**31 - 1]))
        assert table.slot_mapping(torch.tensor([0]), torch.tensor([3])).tolist() == [(2**31 - 1) * 16 + 3]


def started(runner: ModelRunner) -> Harness:
    harness = Harness(runner)
    harness.start({0: PROMPT})
    return harness


NEW = {"new_tokens": PROMPT, "blocks": [(1, 9), (1, 10)]}
BAD_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "decode slot": ({"decode": [12]}, "slot of a decode row 12 is not in 0..11"),
    "negative slot": ({"decode": [-1]}, "slot of a decode row -1"),
    "idle slot": ({"decode": [3]}, "the slot of a decode row holds no request: slot 3"),
    "prefill slot": ({"prefill": [(99, 0, 1)]}, "slot of a prefill row 99"),
    "prefill beyond the ids": ({"prefill": [(0, 10, 12)]}, "not within the known tokens of its slot: slot 0"),
    "prefill before 0": ({"prefill": [(0, -1, 1)]}, "not within the known tokens"),
    "empty prefill": ({"prefill": [(0, 0, 0)]}, "not within the known tokens"),
    "sample row": ({"decode": [0], "sample": [(1, 0)]}, "forward row of a sample 1 is not in 0..0"),
    "sample slot": ({"decode": [0], "sample": [(0, 5)]}, "the slot of a sample row holds no request: slot 5"),
    "two tokens": ({"decode": [0], "sample": [(0, 0), (0, 0)]}, "a slot takes two tokens in one step"),
    "block": ({"blocks": [(0, 200)]}, "block 200 is not in 0..199"),
    "slot of a block": ({"blocks": [(-2, 3)]}, "slot of a block -2"),
    "copy": ({"copies": [(1, 777)]}, "copied block 777"),
    "copy into the null block": ({"copies": [(1, 0)]}, "copied block 0"),
    "two copies into one block": ({"copies": [(1, 3), (2, 3)]}, "two blocks are copied into one"),
    "copies that depend on each other": ({"copies": [(1, 3), (3, 4)]}, "both copied and copied into: block 3"),
    "released": ({"released": [40]}, "released slot 40"),
    "released and used": ({"released": [0], "decode": [0]}, "holds no request: slot 0"),
    "new in a busy slot": ({"new": [slot_init(0, PROMPT)], **NEW}, "slot 0 holds another request"),
    "new slot": ({"new": [slot_init(12, PROMPT)], **NEW}, "slot 12 is not in 0..11"),
    "too few ids": ({"new": [slot_init(1, [*PROMPT, 3])], **NEW}, "have 21 tokens, but 20 ids came"),
    "no ids": ({"new": [slot_init(1, [])]}, "num_tokens 0"),
    "limit": ({"new": [slot_init(1, PROMPT, limit=513)], **NEW}, "limit 513"),
    "prompt_len": ({"new": [slot_init(1, PROMPT, prompt_len=21)], **NEW}, "prompt_len 21"),
    "token id": ({"new": [slot_init(1, [1, VOCABULARY])], "new_tokens": [1, VOCABULARY]}, f"token id {VOCABULARY}"),
    "stop id": (
        {"new": [slot_init(1, PROMPT, SamplingParams(stop_token_ids=[VOCABULARY]))], **NEW},
        "a stop or end id is not in",
    ),
    "biased id": (
        {"new": [slot_init(1, PROMPT, SamplingParams(logit_bias=[(VOCABULARY, 1.0)]))], **NEW},
        f"an id in logit_bias is not in 0..{VOCABULARY - 1}",
    ),
    "allowed id": (
        {"new": [slot_init(1, PROMPT, SamplingParams(allowed_token_ids=[0, -1]))], **NEW},
        "an id in allowed_token_ids is not in",
    ),
    "banned id": (
        {"new": [slot_init(1, PROMPT, SamplingParams(bad_words_token_ids=[[3], [4, VOCABULARY]]))], **NEW},
        "an id in bad_words_token_ids is not in",
    ),
    "empty bad word": (
        {"new": [slot_init(1, PROMPT, SamplingParams(bad_words_token_ids=[[3], []]))], **NEW},
        "bad_words_token_ids holds an empty list",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_index_is_named_and_changes_nothing(runner: ModelRunner, name: str) -> None:
    parts, text = BAD_STEPS[name]
    harness = started(runner)
    before = (runner.state.active.copy(), runner.tables.tensor.clone(), runner.state.num_tokens.clone())
    with pytest.raises(StepError) as caught:
        runner.launch(make_step(2, **parts))
    assert text in str(caught.value)
    after = (runner.state.active, runner.tables.tensor, runner.state.num_tokens)
    assert np.array_equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])
    assert len(harness.decode([0], 22)) == 1


def test_more_blocks_than_a_table_has_room_for(runner: ModelRunner) -> None:
    started(runner)
    with pytest.raises(StepError, match="slot 0 has no room for another block"):
        runner.launch(make_step(2, blocks=[(0, 3)] * 31))


def test_the_limit_holds_on_the_device(runner: ModelRunner) -> None:
    """Overrun rows compute, but no token is written at or beyond the limit."""
    harness = Harness(runner)
    harness.step(
        new=[slot_init(0, PROMPT, limit=22)],
        new_tokens=PROMPT,
        prefill=[(0, 0, 20)],
        sample=[(0, 0)],
        blocks=harness.blocks_for(0, 22),
    )
    for _ in range(4):
        assert len(harness.decode([0], 22)) == 1
    assert runner.state.num_tokens[0] == 22
    assert runner.state.host_tokens[0] == 22


def test_released_slot_taken_in_the_same_step(runner: ModelRunner) -> None:
    harness = started(runner)
    expected = Harness(make_like(runner)).generate(PROMPT[:7], 5, slot=0)
    output = harness.step(
        released=[0],
        new=[slot_init(0, PROMPT[:7])],
        new_tokens=PROMPT[:7],
        prefill=[(0, 0, 7)],
        sample=[(0, 0)],
        blocks=[(0, 60)],
    )
    while len(output) < 5:
        output += harness.decode([0], 0)
    assert output == expected


def make_like(runner: ModelRunner) -> ModelRunner:
    return ModelRunner(
        runner.config, runner.model, runner.backend, runner.cache, block_size=16, num_slots=12, max_model_len=512
    )


def test_several_choices_sample_from_one_row(runner: ModelRunner) -> None:
    """Two choices with a seed and one greedy, forked from one prompt in the step that computes it."""
    harness = Harness(runner)
    hot = SamplingParams(temperature=5.0, seed=11)
    new = [slot_init(0, PROMPT), slot_init(1, PROMPT, hot), slot_init(2, PROMPT, hot, choice=1)]
    tokens = harness.step(
        new=new,
        new_tokens=PROMPT * 3,
        prefill=[(0, 0, 20)],
        sample=[(0, 0), (0, 1), (0, 2)],
        blocks=harness.blocks_for(0, 20),
    )
    assert harness.logits is not None
    assert len(harness.logits) == 3
    assert torch.equal(harness.logits[0], harness.logits[2])
    assert len(set(tokens)) == 3


def test_a_step_without_rows(runner: ModelRunner) -> None:
    harness = started(runner)
    assert harness.step() == []
    assert harness.step(released=[0]) == []


def test_reset_empties_all_slots(runner: ModelRunner) -> None:
    first = Harness(runner).generate(PROMPT, 6)
    runner.reset()
    assert Harness(make_like(runner)).generate(PROMPT, 6) == first


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64])
def test_block_sizes(tiny_models: TinyModels, block_size: int) -> None:
    folder = tiny_models.folder("llama")
    usual = Harness(make_runner(folder)).generate(PROMPT, 30)
    other = make_runner(folder, block_size=block_size, num_blocks_override=100)
    assert Harness(other).generate(PROMPT, 30) == usual


def test_cache_is_sized_by_bytes(tiny_models: TinyModels) -> None:
    runner = make_runner(tiny_models.folder("llama"), num_blocks_override=None, kv_cache_bytes=2**20)
    per_token = 2 * 3 * 2 * 16 * 4
    assert runner.cache.block_bytes == 16 * per_token
    assert runner.cache.num_blocks == 2**20 // (16 * per_token)
