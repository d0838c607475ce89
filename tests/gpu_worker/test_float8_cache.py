"""A KV cache of float8: scales from checkpoints, and outputs near those of a full one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import Harness, make_runner, slot_init, worker_config
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from tiny_models import ARCHITECTURES, TinyModels, with_kv_scales

from gpu_worker.attention.base import UNSCALED, AttentionShape, KVScales, Spans
from gpu_worker.attention.torch_paged import TorchPagedAttention
from gpu_worker.device import select_cache_dtype
from gpu_worker.model_loading import same_model
from shared.errors import StartupError
from shared.model_source import resolve_model

LENGTHS = {0: 40, 1: 17, 2: 3}
PROMPTS = {slot: [(37 * index + 11 * slot) % 300 + 20 for index in range(n)] for slot, n in LENGTHS.items()}
NEAR = 0.2
"""What rounding to three bits of mantissa may change: with eight of them (bfloat16) it is 0.01 in these models, whose
random weights are large."""
CPU = torch.device("cpu")


@pytest.fixture
def scaled(tiny_models: TinyModels, tmp_path: Path) -> Callable[..., Path]:
    """``scaled({name: scale})``: a checkpoint with these tensors in each of its three layers."""

    def make(scales: dict[str, torch.Tensor], architecture: str = "llama") -> Path:
        return with_kv_scales(tiny_models.folder(architecture), tmp_path / "scaled", scales)

    return make


def scales_of(folder: Path, dtype: str = "fp8") -> list[KVScales]:
    model: Any = make_runner(folder, kv_cache_dtype=dtype).model
    return [layer.attention.scales for layer in model.layers]


def logits_of(folder: Path, **changes: Any) -> torch.Tensor:
    """Of prompts, whose tokens are read from the cache, and of decode steps with the same tokens behind them."""
    harness = Harness(make_runner(folder, **changes))
    harness.start(PROMPTS, room=4)
    assert harness.logits is not None
    found = [harness.logits]
    for token in (50, 60, 70):
        slots = list(PROMPTS)
        state = harness.runner.state
        for slot in slots:
            state.token_ids.view(harness.runner.num_slots, -1)[slot, int(state.num_tokens[slot]) - 1] = token
        harness.decode(slots, 0)
        found.append(harness.logits)
    return torch.cat(found)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a row of logits relative to its norm, on average."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())


# -- names and values of scales --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale")],
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_names(scaled: Callable[..., Path], key: str, value: str, shape: tuple[int, ...]) -> None:
    folder = scaled({key: torch.full(shape, 0.5), value: torch.full(shape, 2.0, dtype=torch.bfloat16)})
    with capture_logs() as logs:
        assert scales_of(folder) == [KVScales(0.5, 2.0)] * 3
    assert not [entry for entry in logs if entry["log_level"] == "warning"]


def test_one_scale_for_both(scaled: Callable[..., Path]) -> None:
    assert scales_of(scaled({"kv_scale": torch.tensor([0.25])})) == [KVScales(0.25, 0.25)] * 3


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_another_cache_needs_no_scales(scaled: Callable[..., Path], dtype: str) -> None:
    assert scales_of(scaled({"k_scale": torch.tensor(math.nan)}), dtype) == [UNSCALED] * 3


@pytest.mark.parametrize("scales", [{}, {"k_scale": torch.tensor(4.0)}], ids=["none", "keys only"])
def test_missing_scales_are_one_and_warned_about_once(scaled: Callable[..., Path], scales: dict[str, Any]) -> None:
    folder = scaled(scales)
    with capture_logs() as logs:
        assert scales_of(folder) == [KVScales(4.0 if scales else 1.0, 1.0)] * 3
    [warning] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "scales" in warning["event"]
    assert warning["layers"] == 3


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *[(math.nan, "nan"), (math.inf, "inf"), (0.0, "0.0"), (-1.0, "-1.0")],
        ([1.0, 2.0], r"\[2\]"),
    ],
)
def test_a_scale_that_is_none_is_named(scaled: Callable[..., Path], value: Any, words: str) -> None:
    folder = scaled({"k_proj.k_scale": torch.tensor(1.0), "v_proj.v_scale": torch.tensor(value)})
    with pytest.raises(StartupError, match=rf"model\.layers\.0\.self_attn\.v_proj\.v_scale.*{words}"):
        make_runner(folder, kv_cache_dtype="fp8")


def test_scales_in_shards(scaled: Callable[..., Path]) -> None:
    folder = scaled({"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)})
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(tensors.items()):
        shards[list(shards)[index % 2]][name] = tensor
    for file, content in shards.items():
        save_file(content, folder / file)
    weight_map = {name: file for file, content in shards.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert scales_of(folder) == [KVScales(0.5, 0.25)] * 3


def test_gguf_and_random_weights_have_none(tiny_models: TinyModels) -> None:
    shape = tiny_models.folder("llama") / "config.json"
    demo = resolve_model("demo").path
    assert {*scales_of(demo)} == {UNSCALED}
    runner: Any = make_runner(shape, kv_cache_dtype="fp8", load_format="dummy")
    assert {layer.attention.scales for layer in runner.model.layers} == {UNSCALED}


# -- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_near_those_of_a_full_cache(tiny_models: TinyModels, architecture: str) -> None:
    folder = tiny_models.folder(architecture)
    expected = logits_of(folder)
    found = logits_of(folder, kv_cache_dtype="fp8")
    assert 0.0 < error(found, expected) < NEAR
    assert torch.equal(logits_of(folder, kv_cache_dtype="fp8_e4m3"), found)


@pytest.mark.parametrize("value", [0.25, 4.0])
def test_scales_change_little(scaled: Callable[..., Path], tiny_models: TinyModels, value: float) -> None:
    """They are powers of two, which only move the range."""
    folder = scaled({"k_scale": torch.tensor(value), "v_scale": torch.tensor(value)})
    assert error(logits_of(folder, kv_cache_dtype="fp8"), logits_of(tiny_models.folder("llama"))) < NEAR


@pytest.mark.parametrize("wrong", [KVScales(1.0, 4.0), KVScales(4.0, 1.0)], ids=["keys", "values"])
@pytest.mark.parametrize("method", ["attend", "rotate_and_write"])
def test_a_scale_that_is_lost_shows(
    scaled: Callable[..., Path],
    tiny_models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    wrong: KVScales,
) -> None:
    folder = scaled({"k_scale": torch.tensor(4.0), "v_scale": torch.tensor(4.0)})
    right = getattr(TorchPagedAttention, method)
    monkeypatch.setattr(TorchPagedAttention, method, lambda *arguments: right(*arguments[:-1], wrong))
    assert error(logits_of(folder, kv_cache_dtype="fp8"), logits_of(tiny_models.folder("llama"))) > 2 * NEAR


@pytest.mark.parametrize(("cache", "limit"), [("float32", 1e-5), ("float16", 0.005), ("bfloat16", 0.03)])
def test_another_dtype_than_the_model(tiny_models: TinyModels, cache: str, limit: float) -> None:
    folder = tiny_models.folder("qwen3")
    expected = logits_of(folder)
    assert error(logits_of(folder, kv_cache_dtype=cache), expected) < limit
    found = logits_of(folder, dtype="bfloat16", kv_cache_dtype=cache)
    assert error(found, logits_of(folder, dtype="bfloat16")) < 0.03


def test_a_prefix_that_is_cached_and_chunks_give_the_same(tiny_models: TinyModels) -> None:
    folder, prompt = tiny_models.folder("llama"), PROMPTS[0]
    fresh = Harness(make_runner(folder, kv_cache_dtype="fp8")).generate(prompt, 12)
    harness = Harness(make_runner(folder, kv_cache_dtype="fp8"))
    harness.start({0: prompt})
    harness.tables[1] = list(harness.tables[0][:2])
    shared = [(1, block) for block in harness.tables[1]]
    blocks = [*shared, *harness.blocks_for(1, len(prompt))]
    hit = harness.step(
        new=[slot_init(1, prompt, start=32)], new_tokens=prompt, prefill=[(1, 32, 8)], sample=[(0, 1)], blocks=blocks
    )
    while len(hit) < 12:
        hit += harness.decode([1], len(prompt) + len(hit))
    assert hit == fresh
    blocks = harness.blocks_for(2, len(prompt))
    harness.step(new=[slot_init(2, prompt)], new_tokens=prompt, prefill=[(2, 0, 13)], blocks=blocks)
    chunked = harness.step(prefill=[(2, 13, 27)], sample=[(0, 2)])
    while len(chunked) < 12:
        chunked += harness.decode([2], len(prompt) + len(chunked))
    assert chunked == fresh


def test_blocks_are_copied(tiny_models: TinyModels) -> None:
    harness = Harness(make_runner(tiny_models.folder("llama"), kv_cache_dtype="fp8"))
    harness.start({0: PROMPTS[0]})
    harness.step(copies=[(1, 9)])
    cache = harness.runner.cache.tensor.view(torch.uint8)
    assert cache[:, 1].any()
    assert torch.equal(cache[:, 9], cache[:, 1])


class Layer:
    """One layer's cache with a token in each of its 16 places."""

    def __init__(self, dtype: torch.dtype) -> None:
        shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
        self.backend = TorchPagedAttention(
            shape, CPU, dtype=torch.float32, cache_dtype=dtype, max_rows=1, max_context=16
        )
        self.cache = torch.zeros(self.backend.cache_shape(1), dtype=dtype)
        positions = torch.arange(16)
        spans = Spans(slots=np.zeros(1, np.int64), counts=np.array([16]), contexts=np.array([16]))
        self.metadata = self.backend.prepare(spans, torch.zeros(1, 1, dtype=torch.int32), positions, positions)

    def write(self, qkv: torch.Tensor, scales: KVScales) -> torch.Tensor:
        """The query; without a rotation."""
        cos, sin = torch.ones(16, 1, 32), torch.zeros(16, 1, 32)
        return self.backend.rotate_and_write(qkv.clone(), None, cos, sin, self.cache, self.metadata, scales)

    def read(self, query: torch.Tensor, scales: KVScales) -> torch.Tensor:
        return self.backend.attend(query, self.cache, self.metadata, 0.2, None, scales)


def test_numbers_are_divided_and_rounded_once_and_multiplied() -> None:
    qkv = torch.randn(16, 8 * 32, generator=torch.Generator().manual_seed(1)) * 3
    scales, stored, exact = KVScales(0.3, 0.07), Layer(torch.float8_e4m3fn), Layer(torch.float32)
    query = stored.write(qkv, scales)
    heads = qkv.view(16, 8, 32).transpose(0, 1)
    for index, scale in enumerate(scales):
        expected = (heads[4 + 2 * index : 6 + 2 * index] / scale).to(torch.float8_e4m3fn).float()
        assert torch.equal(stored.cache[0, index].float(), expected)
        exact.cache[0, index] = expected * scale
    torch.testing.assert_close(stored.read(query, scales), exact.read(query, UNSCALED), rtol=1e-5, atol=1e-5)


def test_what_is_too_large_becomes_the_largest_number() -> None:
    layer = Layer(torch.float8_e4m3fn)
    layer.write(torch.tensor([1e6, -1e6, 500.0, 448.0]).repeat(16, 64), KVScales(1.0, 0.5))
    assert layer.cache[0, :, 0, 0, :4].tolist() == [[448.0, -448.0, 448.0, 448.0]] * 2


# -- memory and configuration ----------------------------------------------------------------------------------------


def test_the_same_memory_holds_twice_the_tokens_of_bfloat16(tiny_models: TinyModels) -> None:
    def blocks(dtype: str) -> int:
        size = {"kv_cache_bytes": 2**20, "num_blocks_override": None}
        return make_runner(tiny_models.folder("llama"), kv_cache_dtype=dtype, **size).cache.num_blocks

    assert blocks("fp8") // 2 == blocks("bfloat16") == blocks("auto") * 2


def test_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(StartupError, match=r"int4 is not supported; there are auto, .*fp8"):
        select_cache_dtype("int4", torch.bfloat16, CPU)


def test_another_dtype_loads_the_model_again(tmp_path: Path) -> None:
    one = worker_config(tmp_path)
    assert same_model(one, worker_config(tmp_path, num_slots=3))
    assert not same_model(one, worker_config(tmp_path, kv_cache_dtype="fp8"))
