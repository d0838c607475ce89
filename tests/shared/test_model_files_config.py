from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shared.errors import StartupError
from shared.gguf_header import GGML_TYPES, GgufStrings, read_gguf_header
from shared.model_config import (
    ModelConfig,
    load_model_config,
    model_digest,
    resolve_max_model_len,
)
from shared.model_source import ModelSource, resolve_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def folder(path: Path, **files: Any) -> ModelSource:
    path.mkdir(exist_ok=True)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return ModelSource(path, "folder", str(path))


def write_gguf(path: Path, architecture: str = "llama", **options: Any) -> Path:
    """A small model file with F32, F16 and Q8_0 tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_token_list(options.get("tokens", ["a", "Ġb", "<|eot_id|>", "龜"]))
    writer.add_token_types(options.get("types", [1, 1, 3, 1]))
    writer.add_eos_token_id(0)
    writer.add_array("test.flags", [True, False])
    writer.add_array("test.floats", [1.5, -2.0])
    writer.add_tensor("token_embd.weight", np.arange(4 * 64, dtype=np.float32).reshape(4, 64))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((64, 64), np.float16))
    quantized = gguf.quantize(np.ones((32, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_k.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name, values in options.get("tensors", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for number, (name, block, size) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, size)


def test_header_equals_the_gguf_packages_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert header.data_offset == reader.data_offset
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.offset, ours.nbytes, ours.ggml_type) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert list(ours.shape) == [int(n) for n in reversed(tensor.shape)]
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufStrings)
    assert list(tokens) == ["a", "Ġb", "<|eot_id|>", "龜"]
    assert (len(tokens), tokens[1], tokens[-2:]) == (4, "Ġb", ["<|eot_id|>", "龜"])
    assert header.metadata["test.flags"].tolist() == [True, False]
    assert header.metadata["test.floats"].tolist() == [1.5, -2.0]
    assert header.metadata["llama.rope.freq_base"] == 500000.0


def test_damaged_gguf_files_are_refused_in_words(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    for text, data in {
        "GGUF": b"nope" + whole[4:],
        "version 1": whole[:4] + struct.pack("<I", 1) + whole[8:],
        "cut short": whole[:100],
        "download complete": whole[:-64],
        "cannot read": b"",
    }.items():
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(StartupError, match=text):
            read_gguf_header(path)
    for length in range(4, 1500, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(StartupError):
            read_gguf_header(path)


def test_demo_model() -> None:
    source = resolve_model("demo")
    config = load_model_config(source)
    assert dataclasses.asdict(config) | {"raw": {}} == {
        "architecture": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
        "checkpoint_dtype": "float16",
        "raw": {},
    }
    assert len(model_digest(config, source)) == 64


def test_gguf_flags_come_from_its_tensors(tmp_path: Path) -> None:
    tensors = {
        "output.weight": np.ones((4, 64), np.float32),
        "blk.0.attn_q.bias": np.ones(64, np.float32),
        "blk.0.attn_q_norm.weight": np.ones(16, np.float32),
        "rope_freqs.weight": np.array([1, 1, 2, 4, 8, 8, 8, 8], np.float32),
    }
    config = load_model_config(ModelSource(write_gguf(tmp_path / "m.gguf", "qwen3", tensors=tensors), "gguf", "m"))
    assert (config.architecture, config.head_dim, config.vocab_size) == ("qwen3", 16, 4)
    assert not config.tie_word_embeddings
    assert config.attention_bias
    assert config.qk_norm
    assert config.rope_scaling == {"rope_type": "factors", "factors": [1, 1, 2, 4, 8, 8, 8, 8]}
    assert config.eos_token_ids == (0, 2)


def test_config_json_of_both_transformers_versions(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = folder(tmp_path / "old", config=LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = folder(
        tmp_path / "new", config=LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    )
    plain = folder(tmp_path / "plain", config=LLAMA | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}})
    for source in (old, new):
        config = load_model_config(source)
        assert config.rope_theta == 5e5
        assert config.rope_scaling == {"rope_type": "llama3", **scaling}
    assert load_model_config(plain).rope_theta == 7.0
    assert load_model_config(plain).rope_scaling is None
    assert load_model_config(plain).checkpoint_dtype == "bfloat16"
    assert load_model_config(plain).head_dim == 16


def test_transformers_own_files(tmp_path: Path) -> None:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    for kind, biased, normed in ((LlamaConfig, False, False), (Qwen2Config, True, False), (Qwen3Config, False, True)):
        kind(**size, num_key_value_heads=2, vocab_size=300, tie_word_embeddings=True).save_pretrained(tmp_path)
        config = load_model_config(ModelSource(tmp_path, "folder", "m"))
        assert (config.attention_bias, config.qk_norm) == (biased, normed)
        assert config.tie_word_embeddings
        assert config.sliding_window is None
        assert config.num_kv_heads == 2


def test_eos_is_the_union_of_all_files(tmp_path: Path) -> None:
    source = folder(
        tmp_path,
        config=LLAMA | {"eos_token_id": [7, 2]},
        generation_config={"eos_token_id": [2, 9]},
        tokenizer_config={"eos_token": {"content": "<|eot|>"}},
        tokenizer={"added_tokens": [{"id": 11, "content": "<|eot|>"}]},
    )
    assert load_model_config(source).eos_token_ids == (2, 7, 9, 11)
    folder(tmp_path, tokenizer_config={"eos_token": "</s>", "added_tokens_decoder": {"5": {"content": "</s>"}}})
    assert load_model_config(source).eos_token_ids == (2, 5, 7, 9)


def test_text_config_of_a_larger_model(tmp_path: Path) -> None:
    outer = {"model_type": "llava", "eos_token_id": 3, "text_config": LLAMA, "tie_word_embeddings": True}
    config = load_model_config(folder(tmp_path, config=outer))
    assert (config.architecture, config.vocab_size, config.eos_token_ids) == ("llama", 512, (2, 3))
    assert config.tie_word_embeddings


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    source = folder(tmp_path, config={k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})
    with pytest.raises(StartupError, match="lacks num_hidden_layers"):
        load_model_config(source)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json"):
        load_model_config(source)


def test_digest_depends_on_shape_and_vocabulary(tmp_path: Path) -> None:
    source = folder(tmp_path, config=LLAMA, tokenizer={"added_tokens": []})
    config = load_model_config(source)
    first = model_digest(config, source)
    assert first == model_digest(config, source)
    assert first != model_digest(dataclasses.replace(config, num_layers=3), source)
    folder(tmp_path, tokenizer={"added_tokens": [1]})
    assert first != model_digest(config, source)


def test_a_configuration_alone(tmp_path: Path) -> None:
    """Nothing beside the file counts: neither its end tokens nor its vocabulary."""
    folder(tmp_path, config=LLAMA)
    alone = load_model_config(resolve_model(str(tmp_path / "config.json")))
    assert alone == load_model_config(resolve_model(str(tmp_path)))
    digest = model_digest(alone, resolve_model(str(tmp_path / "config.json")))
    folder(tmp_path, generation_config={"eos_token_id": [7]}, tokenizer={"added_tokens": []})
    source = resolve_model(str(tmp_path / "config.json"))
    assert load_model_config(source).eos_token_ids == (2,)
    assert load_model_config(resolve_model(str(tmp_path))).eos_token_ids == (2, 7)
    assert model_digest(load_model_config(source), source) == digest
    (tmp_path / "m.json").write_text("{}")
    with pytest.raises(StartupError, match=r"m\.json lacks hidden_size"):
        load_model_config(resolve_model(str(tmp_path / "m.json")))


def sized(**changes: Any) -> ModelConfig:
    return dataclasses.replace(load_model_config(resolve_model("demo")), **changes)


def test_max_model_len() -> None:
    assert resolve_max_model_len(sized(), None) == 8192
    assert resolve_max_model_len(sized(), 100) == 100
    with pytest.raises(StartupError, match="9000 is more than the model's 8192"):
        resolve_max_model_len(sized(), 9000)
