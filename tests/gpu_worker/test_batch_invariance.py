"""With ``batch_invariant`` a row's logits are the same bits alone, among others, in a chunk and in a decode."""

from __future__ import annotations

import random

import pytest
import torch
from runner_harness import Harness, make_runner, slot_init
from tiny_models import VOCABULARY, TinyModels

from gpu_worker.layers.linear import EqualRows

SHAPES = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-odd": (
        "llama",
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 512},
    ),
    "llama-groups-of-3": (
        "llama",
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
    ),
    "qwen3-groups-of-7": (
        "qwen3",
        {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 128},
    ),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 0}),
}
LENGTHS = (330, 5, 17, 64, 130, 258, 2, 40)


def ids_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, VOCABULARY), k=length)


def decode_logits(harness: Harness, ids: list[int], first: int, slot: int) -> dict[int, torch.Tensor]:
    """Feeds the ids from ``first`` on one by one; the logits by position."""
    rows = {}
    blocks = harness.blocks_for(slot, len(ids))
    harness.step(
        new=[slot_init(slot, ids), slot_init(11, [1])],
        new_tokens=[*ids, 1],
        prefill=[(slot, 0, first)],
        sample=[(0, 11)],
        blocks=blocks,
    )
    assert harness.logits is not None
    rows[first - 1] = harness.logits[0]
    for position in range(first, len(ids)):
        harness.step(prefill=[(slot, position, 1)], sample=[(0, 11)])
        rows[position] = harness.logits[0]
    harness.step(released=[11])
    return rows


def together(harness: Harness, prompts: dict[int, list[int]], cut: int) -> dict[int, torch.Tensor]:
    """All prompts but their last ``cut`` ids in one step, then those one by one, in one batch; the last logits."""
    harness.step(
        new=[slot_init(slot, ids) for slot, ids in prompts.items()],
        new_tokens=[token for ids in prompts.values() for token in ids],
        prefill=[(slot, 0, len(ids) - cut) for slot, ids in prompts.items() if len(ids) > cut],
        blocks=[pair for slot, ids in prompts.items() for pair in harness.blocks_for(slot, len(ids))],
    )
    for left in range(cut, 0, -1):
        rows = [(slot, len(ids) - left, 1) for slot, ids in prompts.items()]
        harness.step(prefill=rows, sample=[(row, slot) for row, slot in enumerate(prompts)] if left == 1 else [])
    assert harness.logits is not None
    return dict(zip(prompts, harness.logits, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_in_any_company(tiny_models: TinyModels, shape: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    architecture, changes = SHAPES[shape]
    folder = tiny_models.folder(architecture, **changes)
    harness = Harness(make_runner(folder, dtype=dtype, batch_invariant=True, num_blocks_override=400))
    prompts = {slot: ids_of(length, slot) for slot, length in enumerate(LENGTHS)}

    expected = {}
    for slot, ids in prompts.items():
        harness.start({slot: ids})
        assert harness.logits is not None
        expected[slot] = harness.logits[0]
    harness.step(released=list(prompts))

    def check(slot: int, logits: torch.Tensor, where: str) -> None:
        assert torch.equal(logits, expected[slot]), f"prompt of {len(prompts[slot])}: {where}"

    harness.tables.clear()
    harness.next_block = 1
    harness.start(prompts)
    for slot, logits in zip(prompts, harness.logits, strict=True):
        check(slot, logits, "all prompts in one step")
    harness.step(released=list(prompts))

    harness.tables.clear()
    harness.next_block = 1
    for slot, logits in together(harness, prompts, cut=1).items():
        check(slot, logits, "the last id in a decode of all")
    harness.step(released=list(prompts))

    harness.tables.clear()
    harness.next_block = 1
    for slot in (2, 4):
        ids = prompts[slot]
        rows = decode_logits(harness, ids, max(1, len(ids) - 10), slot)
        check(slot, rows[len(ids) - 1], "ten decodes, alone")


def test_demo_shape_prefill_chunks(tiny_models: TinyModels) -> None:
    """Every position of a prompt, in chunks of several sizes, in bfloat16."""
    architecture, changes = SHAPES["llama-groups-of-3"]
    folder = tiny_models.folder(architecture, **changes)
    harness = Harness(make_runner(folder, dtype="bfloat16", batch_invariant=True))
    ids = ids_of(280, 1)
    seen: dict[int, torch.Tensor] = {}
    for slot, size in enumerate((280, 140, 20, 7)):
        new = [slot_init(slot, ids), slot_init(8, [1])]
        for start in range(0, len(ids), size):
            harness.step(
                new=new if start == 0 else [],
                new_tokens=[*ids, 1] if start == 0 else [],
                prefill=[(slot, start, min(size, len(ids) - start))],
                sample=[(0, 8)],
                blocks=harness.blocks_for(slot, len(ids)) if start == 0 else [],
            )
            assert harness.logits is not None
            position = min(start + size, len(ids)) - 1
            assert torch.equal(harness.logits[0], seen.setdefault(position, harness.logits[0]))
        harness.step(released=[8])


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
def test_equal_rows(rows: int) -> None:
    """All products are of one size, whatever the number of rows."""
    sizes = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return 2 * x[:, :3]

    x = torch.rand(rows, 5)
    assert torch.equal(EqualRows(layer, 16)(x), 2 * x[:, :3])
    assert set(sizes) <= {16 if rows else 0}
    assert len(sizes) == max(1, -(-rows // 16))
