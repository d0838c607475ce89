"""Defaults that depend on the model, the device and each other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from core_engine.chunking import ChunkTarget
from core_engine.core import EngineCore
from core_engine.engine_config import EngineConfig, load_engine_config, scheduler_for
from core_engine.eviction import POLICIES
from shared.config import Settings
from shared.errors import StartupError
from shared.messages import Epoch

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [7, 3],
    "torch_dtype": "bfloat16",
}


def load(folder: Path, **settings: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    return load_engine_config(Settings(model=str(folder), **settings))


@pytest.mark.parametrize(("device", "budget"), [("cpu", 2048), ("cuda", 8192), ("cuda:1", 8192), ("auto", 8192)])
def test_token_budget_by_device(tmp_path: Path, device: str, budget: int) -> None:
    config = load(tmp_path, device=device)
    assert config.core.scheduler.max_num_batched_tokens == budget
    assert config.core.scheduler.max_prefill_tokens == budget
    assert config.worker.max_num_batched_tokens == budget


def test_the_worker_is_told_the_dtype_of_the_kv_cache(tmp_path: Path) -> None:
    assert load(tmp_path).worker.kv_cache_dtype == "auto"
    assert load(tmp_path, kv_cache_dtype="fp8").worker.kv_cache_dtype == "fp8"


def test_the_worker_is_told_the_size_of_the_host_pool(tmp_path: Path) -> None:
    assert load(tmp_path).worker.host_bytes == 0
    assert load(tmp_path, swap_space=0.5, kv_offloading_size=1).worker.host_bytes == 3 * 2**29


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_the_eviction_policy_reaches_the_block_pool(tmp_path: Path, policy: str) -> None:
    core = EngineCore(load(tmp_path, prefix_cache_policy=policy).core)
    core.begin_epoch("w", Epoch(1, 1), 10)
    assert type(core.replicas[0].kv.pool._hashed) is POLICIES[policy]


def test_every_eviction_policy_can_be_set() -> None:
    field = next(field for field in dataclasses.fields(Settings) if field.name == "prefix_cache_policy")
    assert set(field.metadata["choices"]) == set(POLICIES)


def test_an_unknown_device_is_known_once_the_worker_is_ready() -> None:
    settings = Settings(device="auto")
    assert scheduler_for(settings, 4096, "auto").max_num_batched_tokens == 8192
    assert scheduler_for(settings, 4096, "cpu").max_num_batched_tokens == 2048
    assert scheduler_for(Settings(max_num_batched_tokens=77), 4096, "cpu").max_num_batched_tokens == 77


def test_whole_prompts_need_room_for_the_longest() -> None:
    whole = Settings(enable_chunked_prefill=False)
    assert scheduler_for(whole, 4096, "cpu").max_num_batched_tokens == 4096
    assert scheduler_for(whole, 1024, "cpu").max_num_batched_tokens == 2048
    with pytest.raises(StartupError, match="--max-num-batched-tokens 512 < max_model_len 1024"):
        scheduler_for(Settings(enable_chunked_prefill=False, max_num_batched_tokens=512), 1024, "cpu")
    with pytest.raises(StartupError, match="--max-prefill-tokens 512 < max_model_len 1024"):
        scheduler_for(Settings(enable_chunked_prefill=False, max_prefill_tokens=512), 1024, "cpu")


@pytest.mark.parametrize(("device", "seqs"), [("cpu", 256), ("cuda", 1024), ("auto", 1024)])
def test_sequences_by_device(tmp_path: Path, device: str, seqs: int) -> None:
    """The slots of workers are fixed before one has said what its device is."""
    config = load(tmp_path, device=device)
    assert config.core.scheduler.max_num_seqs == seqs
    assert config.worker.num_slots == config.core.num_slots == seqs + seqs // 16
    assert scheduler_for(Settings(device="auto"), 4096, "cpu").max_num_seqs == 256
    assert scheduler_for(Settings(max_num_seqs=7), 4096, device).max_num_seqs == 7


def test_target_by_device() -> None:
    def target(device: str, **settings: Any) -> ChunkTarget | None:
        return scheduler_for(Settings(**settings), 1024, device).chunk_target

    assert target("cpu") is None
    assert target("cuda:0") == ChunkTarget.on("cuda", 0.040, is_default=True)
    assert target("cuda:0", target_itl_ms=25.0) == ChunkTarget.on("cuda", 0.025)
    assert target("cpu", target_itl_ms=100.0) == ChunkTarget.on("cpu", 0.1)
    assert target("cuda", target_itl_ms=0.0) is None
    assert target("cuda", enable_chunked_prefill=False) is None
    with pytest.raises(StartupError, match="--target-itl-ms cuts prompts into chunks"):
        target("cuda", enable_chunked_prefill=False, target_itl_ms=25.0)


def test_model_and_settings(tmp_path: Path) -> None:
    config = load(tmp_path, max_model_len=1000, max_num_seqs=32, num_gpu_blocks_override=50, max_prefill_tokens=100)
    assert config.eos_ids == (3, 7)
    assert (config.card.vocab_size, config.card.max_model_len) == (1000, 1000)
    assert config.core.scheduler.max_prefill_tokens == 100
    assert config.core.num_slots == config.worker.num_slots > 32
    assert config.worker.num_blocks_override == 50
    assert load(tmp_path).card.max_model_len == 4096
    with pytest.raises(StartupError, match="--max-model-len 5000 is more than the model's 4096 positions"):
        load(tmp_path, max_model_len=5000)


def vocabulary(folder: Path, tokens: int, added: int | None = None) -> None:
    """A tokenizer.json with ids below ``tokens``, and one that was added."""
    content = {
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(tokens)}, "merges": []},
        "added_tokens": [] if added is None else [{"id": added, "content": "<end>"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_logits_without_a_token_are_told_to_workers(tmp_path: Path) -> None:
    assert load(tmp_path).worker.num_token_ids is None
    for tokens, added, expected in ((900, None, 900), (900, 960, 961), (900, 999, None), (1000, None, None)):
        vocabulary(tmp_path, tokens, added)
        assert load(tmp_path).worker.num_token_ids == expected
    vocabulary(tmp_path, 1000, 1001)
    assert load(tmp_path).worker.num_token_ids is None
    assert load_engine_config(Settings(model="demo")).worker.num_token_ids is None
