"""Checkpoints: shards, tied weights, what is missing, GGUF."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from runner_harness import Harness, make_runner, reference_greedy, reference_logits
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, TinyModels

from gpu_worker.device import select_device, select_dtype
from gpu_worker.loading.gguf_weights import GgufWeights
from gpu_worker.models.llama import LlamaForCausalLM
from gpu_worker.models.qwen3 import Qwen3ForCausalLM
from shared.errors import StartupError
from shared.model_config import load_model_config
from shared.model_source import ModelSource

PROMPT = random.Random(1).choices(range(5, VOCABULARY), k=30)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def rewrite_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def greedy(folder: Path, **changes: Any) -> list[int]:
    return Harness(make_runner(folder, **changes)).generate(PROMPT, 24)


class TestSafetensors:
    def test_shards(self, tiny_models: TinyModels) -> None:
        whole, sharded = tiny_models.folder("llama"), tiny_models.folder("llama", shard_bytes=120_000)
        assert len(list(sharded.glob("*.safetensors"))) > 2
        assert greedy(sharded) == greedy(whole) == reference_greedy(sharded, PROMPT, 24)

    def test_only_indexed_files_are_read(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama", shard_bytes=120_000), tmp_path / "m")
        expected = greedy(folder)
        for name in (SINGLE, "consolidated.safetensors"):
            (folder / name).write_bytes(b"not a safetensors file")
        assert greedy(folder) == expected

    def test_a_missing_shard_is_named(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama", shard_bytes=120_000), tmp_path / "m")
        gone = sorted(folder.glob("*.safetensors"))[1]
        gone.unlink()
        with pytest.raises(StartupError, match=gone.name):
            greedy(folder)

    def test_no_weights_at_all(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama"), tmp_path / "m")
        (folder / SINGLE).unlink()
        with pytest.raises(StartupError, match=SINGLE):
            greedy(folder)

    def test_a_missing_tensor_is_named(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("qwen3"), tmp_path / "m")
        name = "model.layers.2.self_attn.k_norm.weight"
        rewrite(folder, lambda tensors: tensors.__delitem__(name))
        with pytest.raises(StartupError, match=name.replace(".", r"\.")):
            greedy(folder)

    @pytest.mark.parametrize("where", ["index", "shard"])
    def test_a_tensor_missing_in_index_or_shard(self, tiny_models: TinyModels, tmp_path: Path, where: str) -> None:
        folder = copy_of(tiny_models.folder("llama", shard_bytes=120_000), tmp_path / "m")
        index = json.loads((folder / INDEX).read_text())
        name = "model.layers.1.mlp.down_proj.weight"
        if where == "index":
            del index["weight_map"][name]
        else:
            files = sorted(set(index["weight_map"].values()))
            index["weight_map"][name] = next(f for f in files if f != index["weight_map"][name])
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(StartupError, match=name.replace(".", r"\.")):
            greedy(folder)

    def test_a_tensor_of_another_shape(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama"), tmp_path / "m")
        rewrite_json(folder / "config.json", intermediate_size=80)
        with pytest.raises(StartupError, match=r"mlp\.gate_proj\.weight.*\[96, 64\].*\[80, 64\]"):
            greedy(folder)

    def test_a_broken_file(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama"), tmp_path / "m")
        (folder / SINGLE).write_bytes(b"\xff" * 100)
        with pytest.raises(StartupError, match="cannot read the weights"):
            greedy(folder)

    def test_tied_with_a_stored_head_ignores_it(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        tied = tiny_models.folder("llama", tie_word_embeddings=True)
        folder = copy_of(tied, tmp_path / "m")
        noise = torch.randn(VOCABULARY, 64)
        rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": noise}))
        assert greedy(folder) == greedy(tied) == reference_greedy(tied, PROMPT, 24)

    def test_untied_without_a_head_is_refused(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama", tie_word_embeddings=True), tmp_path / "m")
        rewrite_json(folder / "config.json", tie_word_embeddings=False)
        with pytest.raises(StartupError, match=r"lm_head\.weight"):
            greedy(folder)


class TestConfiguration:
    def test_an_unknown_architecture_is_named(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama"), tmp_path / "m")
        rewrite_json(folder / "config.json", model_type="mamba9")
        with pytest.raises(StartupError, match=r"'mamba9' is not supported; there are llama, qwen2, qwen3"):
            greedy(folder)

    def test_an_unknown_rope_type_is_named(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama"), tmp_path / "m")
        rewrite_json(folder / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
        with pytest.raises(StartupError, match="rope type 'spiral' is not supported"):
            greedy(folder)

    def test_both_spellings_of_a_rope_scaling(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        scaled = tiny_models.folder("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
        folder = copy_of(scaled, tmp_path / "m")
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"]
        config |= {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
        (folder / "config.json").write_text(json.dumps(config))
        assert greedy(folder) == greedy(scaled) != greedy(tiny_models.folder("llama"))

    def test_a_rope_scaling_that_lacks_a_parameter(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama"), tmp_path / "m")
        rewrite_json(folder / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4})
        with pytest.raises(StartupError, match="'linear' lacks 'factor'"):
            greedy(folder)

    def test_dtype(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = copy_of(tiny_models.folder("llama"), tmp_path / "m")
        cpu = select_device("auto")
        for stored, asked, expected in [
            ("float32", "auto", torch.float32),
            ("bfloat16", "auto", torch.bfloat16),
            ("float16", "auto", torch.bfloat16),
            ("float32", "half", torch.bfloat16),
            ("bfloat16", "float", torch.float32),
        ]:
            rewrite_json(folder / "config.json", dtype=stored)
            config = load_model_config(ModelSource(folder, "folder", "m"))
            assert select_dtype(asked, config, cpu) == expected
        with pytest.raises(StartupError, match="int8"):
            select_dtype("int8", config, cpu)
        with pytest.raises(StartupError, match="--device tpu"):
            select_device("tpu")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there_is_refused_in_words(self) -> None:
        with pytest.raises(StartupError, match="finds no usable GPU"):
            select_device("cuda")

    def test_dummy_weights(self, tiny_models: TinyModels) -> None:
        folder = tiny_models.folder("llama")
        one, again = greedy(folder, load_format="dummy", seed=1), greedy(folder, load_format="dummy", seed=1)
        assert one == again != greedy(folder, load_format="dummy", seed=2)

    def test_a_cache_without_room(self, tiny_models: TinyModels) -> None:
        folder = tiny_models.folder("llama")
        with pytest.raises(StartupError, match="--kv-cache-bytes"):
            make_runner(folder, num_blocks_override=None, kv_cache_bytes=20_000)
        runner = make_runner(folder, num_blocks_override=None, kv_cache_bytes=10 * runner_block_bytes(folder))
        assert runner.cache.num_blocks == 10


def runner_block_bytes(folder: Path) -> int:
    return make_runner(folder).cache.block_bytes


def write_gguf(path: Path, folder: Path, kinds: dict[str, Quant], default: Quant = Quant.F32) -> None:
    """The checkpoint in ``folder`` as a GGUF file; ``kinds`` by the end of a tensor's GGUF name."""
    config = load_model_config(ModelSource(folder, "folder", "m"))
    names = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[config.architecture].gguf_names
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / SINGLE).items():
        stored, interleaved = names.find(name)
        values = tensor.numpy()
        if interleaved:
            heads = len(values) // config.head_dim
            split = values.reshape(heads, 2, config.head_dim // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        kind = next((k for end, k in kinds.items() if stored.endswith(end)), default)
        if values.ndim == 1:
            kind = Quant.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGguf:
    KINDS: ClassVar[dict[str, Quant]] = {
        "attn_q.weight": Quant.Q8_0,
        "attn_k.weight": Quant.Q4_1,
        "attn_v.weight": Quant.Q5_0,
        "attn_output.weight": Quant.Q5_1,
        "ffn_gate.weight": Quant.Q4_0,
        "ffn_up.weight": Quant.F16,
        "ffn_down.weight": Quant.BF16,
        "token_embd.weight": Quant.Q8_0,
    }

    @pytest.mark.parametrize("architecture", ["llama", "qwen3"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_quantized_file(self, tiny_models: TinyModels, tmp_path: Path, architecture: str, tied: bool) -> None:
        # transformers reads no head size from GGUF, and takes 128 for qwen3.
        own = {"head_dim": 128} if architecture == "qwen3" else {}
        folder = tiny_models.folder(architecture, tie_word_embeddings=tied, **own)
        path = tmp_path / "m.gguf"
        write_gguf(path, folder, self.KINDS)
        harness = Harness(make_runner(path))
        output = harness.generate(PROMPT, 24)
        expected = reference_logits(path, PROMPT + output[:-1])
        assert output == expected[len(PROMPT) - 1 :].argmax(-1).tolist()
        assert harness.logits is not None
        assert (harness.logits[0] - expected[-1]).abs().max() < 1e-4

    def test_unquantized_file_gives_the_ids_of_the_checkpoint(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        folder = tiny_models.folder("llama")
        path = tmp_path / "m.gguf"
        write_gguf(path, folder, {})
        assert greedy(path) == greedy(folder)

    def test_a_missing_tensor_is_named(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path, tiny_models.folder("llama"), {})
        data = path.read_bytes()
        path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight"))
        with pytest.raises(StartupError, match=r"blk\.1\.ffn_up\.weight \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
            greedy(path)

    def test_a_type_that_nobody_can_read_is_named(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path, tiny_models.folder("llama"), {})
        weights = GgufWeights(path, 16)
        weights.names = LlamaForCausalLM.gguf_names
        tensor = weights.tensors["blk.0.attn_v.weight"]
        with pytest.raises(StartupError, match=r"blk\.0\.attn_v\.weight .* the type Q8_K"):
            weights._dequantize(type(tensor)(tensor.name, tensor.shape, 15, tensor.offset, tensor.nbytes))
        weights.close()
