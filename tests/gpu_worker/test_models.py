"""Logits and greedy ids of the native models against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import Harness, make_runner, reference_greedy, reference_logits, slot_init
from tiny_models import ARCHITECTURES, VOCABULARY, TinyModels

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}
TOLERANCE = 1e-4


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, VOCABULARY), k=length)


def chunks_of(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(size, length - start)) for start in range(0, length, size)]


def logits_at_chunk_ends(harness: Harness, ids: list[int], size: int, slot: int = 0) -> dict[int, torch.Tensor]:
    """The logits after each chunk, by the position of its last token. The sampled tokens go to a slot of their own."""
    rows = {}
    for start, count in chunks_of(len(ids), size):
        first = start == 0
        new = [slot_init(slot, ids), slot_init(11, [1])] if first else []
        harness.step(
            new=new,
            new_tokens=[*ids, 1] if first else [],
            prefill=[(slot, start, count)],
            sample=[(0, 11)],
            blocks=harness.blocks_for(slot, len(ids)) if first else [],
        )
        assert harness.logits is not None
        rows[start + count - 1] = harness.logits[0]
    harness.step(released=[11])
    return rows


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_prefill_chunks_and_decode(tiny_models: TinyModels, variant: str) -> None:
    architecture, changes = VARIANTS[variant]
    folder = tiny_models.folder(architecture, **changes)
    ids = prompt(300)
    expected = reference_logits(folder, ids)
    harness = Harness(make_runner(folder))
    for slot, size in enumerate((300, 128, 37, 7)):
        for position, logits in logits_at_chunk_ends(harness, ids, size, slot).items():
            assert_close(logits, expected[position])
    output = harness.generate(ids[:60], 8, slot=10)
    whole = reference_logits(folder, ids[:60] + output[:-1])
    assert harness.logits is not None
    assert_close(harness.logits[0], whole[-1])
    assert output == whole[59:].argmax(-1).tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_with_neighbours(tiny_models: TinyModels, architecture: str) -> None:
    """Eight requests join at different times and decode together; each one's ids are those of transformers alone."""
    folder = tiny_models.folder(architecture)
    prompts = {slot: prompt(5 + 9 * slot, seed=slot) for slot in range(8)}
    harness = Harness(make_runner(folder))
    outputs: dict[int, list[int]] = {}
    for slot, ids in prompts.items():
        running = list(outputs)
        blocks = harness.blocks_for(slot, len(ids) + 64)
        tokens = harness.step(
            new=[slot_init(slot, ids)],
            new_tokens=ids,
            prefill=[(slot, 0, len(ids))],
            decode=running,
            sample=[(row, taken) for row, taken in enumerate([slot, *running])],
            blocks=blocks,
        )
        for taken, token in zip([slot, *running], tokens, strict=True):
            outputs.setdefault(taken, []).append(token)
    while running := [slot for slot, output in outputs.items() if len(output) < 64]:
        for slot, token in zip(running, harness.decode(running, 0), strict=True):
            outputs[slot].append(token)
    for slot, ids in prompts.items():
        assert outputs[slot] == reference_greedy(folder, ids, 64)
        assert len(set(outputs[slot])) >= 20


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefix_hit_reads_shared_blocks(tiny_models: TinyModels, architecture: str) -> None:
    """A request that starts behind 32 cached tokens gives the logits of one that computes all of them."""
    folder = tiny_models.folder(architecture)
    harness = Harness(make_runner(folder))
    shared, tail = prompt(32), prompt(9, seed=2)
    harness.start({0: shared + prompt(5, seed=1)})
    blocks = harness.tables[0][:2]
    ids = shared + tail
    harness.tables[1] = list(blocks)
    more = harness.blocks_for(1, len(ids))
    harness.step(
        new=[slot_init(1, ids, start=32)],
        new_tokens=ids,
        prefill=[(1, 32, len(tail))],
        sample=[(0, 1)],
        blocks=[(1, block) for block in blocks] + more,
    )
    assert harness.logits is not None
    assert_close(harness.logits[0], reference_logits(folder, ids)[-1])


def test_copied_blocks(tiny_models: TinyModels) -> None:
    """A fork writes into its own copy of a partial block; both go on as if alone."""
    folder = tiny_models.folder("llama")
    harness = Harness(make_runner(folder))
    ids = prompt(24)
    first = harness.start({0: ids}, room=8)
    forked = [*ids, 99]
    harness.step(
        new=[slot_init(1, forked, start=24)],
        new_tokens=forked,
        prefill=[(1, 24, 1)],
        sample=[(0, 1)],
        blocks=[(1, harness.tables[0][0]), (1, 50)],
        copies=[(harness.tables[0][1], 50)],
    )
    assert harness.logits is not None
    assert_close(harness.logits[0], reference_logits(folder, forked)[-1])
    harness.decode([0], 26)
    assert_close(harness.logits[0], reference_logits(folder, ids + first)[-1])


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rope_scaling_below_and_above_the_original_length(
    tiny_models: TinyModels, architecture: str, rope: str
) -> None:
    positions = 64 if rope == "dynamic" else 512
    folder = tiny_models.folder(
        architecture, rope_parameters={**ROPES[rope], "rope_theta": 10000.0}, max_position_embeddings=positions
    )
    harness = Harness(make_runner(folder))
    for slot, length in enumerate((40, 64, 65, 300)):
        ids = prompt(length)
        expected = reference_logits(folder, ids)
        for position, logits in logits_at_chunk_ends(harness, ids, 37, slot=slot).items():
            assert_close(logits, expected[position])


def test_decode_across_the_original_length_of_dynamic_rope(tiny_models: TinyModels) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = tiny_models.folder("llama", rope_parameters=rope, max_position_embeddings=64)
    ids = prompt(50)
    assert Harness(make_runner(folder)).generate(ids, 40) == reference_greedy(folder, ids, 40)


@pytest.mark.parametrize("length", [63, 64, 65, 300])
def test_sliding_window(tiny_models: TinyModels, length: int) -> None:
    folder = tiny_models.folder("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    ids = prompt(length)
    expected = reference_logits(folder, ids)
    harness = Harness(make_runner(folder))
    for slot, size in enumerate((length, 50)):
        for position, logits in logits_at_chunk_ends(harness, ids, size, slot).items():
            assert_close(logits, expected[position])
    assert harness.generate(ids, 20, slot=5) == reference_greedy(folder, ids, 20)


def test_a_window_that_is_switched_off_changes_nothing(tiny_models: TinyModels) -> None:
    off = tiny_models.folder("qwen2", use_sliding_window=False, sliding_window=16, max_window_layers=0)
    ids = prompt(80)
    rows = logits_at_chunk_ends(Harness(make_runner(off)), ids, 80)
    assert_close(rows[79], reference_logits(tiny_models.folder("qwen2"), ids)[-1])


class TestMutants:
    """What must not go unnoticed: the ids change when something is broken on purpose."""

    PROMPT = prompt(40, seed=3)

    def outputs(self, folder: Path, break_it: Any) -> tuple[list[int], list[int]]:
        right = Harness(make_runner(folder)).generate(self.PROMPT, 64)
        assert len(set(right)) >= 20
        harness = Harness(make_runner(folder))
        broken = harness.start({0: self.PROMPT})
        break_it(harness)
        while len(broken) < 64:
            broken += harness.decode([0], 40 + len(broken))
        return right, broken

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_corrupted_block(self, tiny_models: TinyModels, architecture: str) -> None:
        def corrupt(harness: Harness) -> None:
            cache = harness.runner.cache.tensor
            cache[:, harness.tables[0][1]] = cache[:, harness.tables[0][1]].roll(1, -1)

        right, broken = self.outputs(tiny_models.folder(architecture), corrupt)
        assert right != broken

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_shifted_position(self, tiny_models: TinyModels, architecture: str) -> None:
        def shift(harness: Harness) -> None:
            table = harness.runner.rotary
            harness.runner.rotary = lambda positions, lengths: table(positions + 1, lengths)

        right, broken = self.outputs(tiny_models.folder(architecture), shift)
        assert right != broken

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_a_skipped_layer(self, tiny_models: TinyModels, architecture: str) -> None:
        def skip(harness: Harness) -> None:
            del harness.runner.model.layers[1]  # type: ignore[attr-defined]

        right, broken = self.outputs(tiny_models.folder(architecture), skip)
        assert right != broken
