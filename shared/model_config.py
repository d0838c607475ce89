"""The numbers of a model: from config.json (transformers 4 and 5) or from GGUF metadata, in one shape."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from shared.errors import StartupError
from shared.gguf_header import GGML_TYPES, GgufHeader, GgufStrings, read_gguf_header
from shared.model_source import ModelSource

_TIED_BY_DEFAULT = ("gemma", "gpt2", "cohere")
"""Model types (by prefix) whose config.json leaves ``tie_word_embeddings`` out because true is their default."""

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn in well-known chat formats; GGUF files often name only one end token."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a causal language model. Names are transformers' where it has the value."""

    architecture: str
    """``llama``, ``qwen2``, ``qwen3``, or another model_type of transformers."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Width of the logits."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """transformers' rope parameters with ``rope_type`` (never ``default``) and without ``rope_theta``. From GGUF also
    ``{"rope_type": "factors", "factors": [head_dim / 2 floats]}``: inverse frequencies are divided by them."""
    tie_word_embeddings: bool
    attention_bias: bool
    """The projections of q, k and v have a bias (with ``llama`` that of the output, too)."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each head of q and k before RoPE."""
    sliding_window: int | None
    """None when switched off."""
    eos_token_ids: tuple[int, ...]
    """All ids that end a text, ascending: the union of configuration, generation configuration and tokenizer."""
    bos_token_id: int | None
    checkpoint_dtype: str
    """``bfloat16``, ``float16`` or ``float32``; ``float16`` for quantized GGUF files, whose scales are that."""
    raw: dict[str, Any] = dataclasses.field(repr=False)
    """config.json, or the scalars of the GGUF metadata."""


def load_model_config(source: ModelSource) -> ModelConfig:
    """Read the configuration of ``source``.

    Raises:
        StartupError: a file cannot be read, or lacks a number that every model has.
    """
    if source.kind == "gguf":
        return _from_gguf(source.path, read_gguf_header(source.path))
    if source.kind == "config":
        return _from_json(source.path, None)
    return _from_json(source.path / "config.json", source.path)


def model_digest(config: ModelConfig, source: ModelSource) -> str:
    """SHA-256 (hex) over the architecture and the vocabulary: equal for processes that may work together."""
    shape = {name: value for name, value in vars(config).items() if name != "raw"}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    if source.kind == "gguf":
        tokens = read_gguf_header(source.path).metadata.get("tokenizer.ggml.tokens")
        digest.update(tokens.raw if isinstance(tokens, GgufStrings) else b"")
    elif source.kind == "folder" and (file := source.path / "tokenizer.json").is_file():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def resolve_max_model_len(config: ModelConfig, asked: int | None) -> int:
    """Longest prompt + output: what was asked for, or all that the model's positions allow.

    Raises:
        StartupError: more was asked for than the model has positions.
    """
    if asked is None:
        return config.max_position_embeddings
    if asked > config.max_position_embeddings:
        raise StartupError(
            f"--max-model-len {asked} is more than the model's {config.max_position_embeddings} positions; lower it"
        )
    return asked


# -- config.json -----------------------------------------------------------------------------------------------------


def _from_json(file: Path, folder: Path | None) -> ModelConfig:
    """``file`` is a config.json; the files beside it in ``folder`` name more end tokens."""
    raw = _read_json(file)
    text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw

    def number(*names: str) -> int:
        for name in names:
            if text.get(name) is not None:
                return int(text[name])
        raise StartupError(f"{file} lacks {names[0]}")

    architecture = str(text.get("model_type", ""))
    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    rope = _rope_of(text)
    eps = next((text[n] for n in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if n in text), 1e-6)
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    windowed = text.get("use_sliding_window", architecture not in ("qwen2", "qwen3"))
    bos = _first_id(text.get("bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden),
        num_layers=number("num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocab_size=number("vocab_size"),
        max_position_embeddings=number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        rms_norm_eps=float(eps),
        rope_theta=float(rope.pop("rope_theta", 10000.0)),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        tie_word_embeddings=architecture.startswith(_TIED_BY_DEFAULT) if tied is None else bool(tied),
        attention_bias=bool(text.get("attention_bias", architecture == "qwen2")),
        mlp_bias=bool(text.get("mlp_bias", False)),
        qk_norm=bool(text.get("use_qk_norm", architecture.startswith(("qwen3", "gemma3")))),
        sliding_window=int(text["sliding_window"]) if windowed and text.get("sliding_window") else None,
        eos_token_ids=_eos_ids(folder, raw, text),
        bos_token_id=bos,
        checkpoint_dtype=str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch."),
        raw=raw,
    )


def _rope_of(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of either transformers version as one flat mapping, with ``rope_type`` and ``rope_theta``."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if text.get("rope_theta") is not None:
        rope.setdefault("rope_theta", text["rope_theta"])
    return rope


def _eos_ids(folder: Path | None, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    generation = _read_json(folder / "generation_config.json", optional=True) if folder else {}
    for config in (*configs, generation):
        value = config.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(int(i) for i in found | (_tokenizer_eos(folder) if folder else set())))


def _tokenizer_eos(folder: Path) -> set[int]:
    tokenizer = _read_json(folder / "tokenizer_config.json", optional=True)
    token = tokenizer.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = _added_tokens(folder, tokenizer) if content else {}
    return {added[content]} if content in added else set()


def _added_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, int]:
    listed = tokenizer_config.get("added_tokens_decoder")
    if listed:
        return {entry["content"]: int(token_id) for token_id, entry in listed.items()}
    entries = _read_json(folder / "tokenizer.json", optional=True).get("added_tokens") or []
    return {entry["content"]: int(entry["id"]) for entry in entries}


def _first_id(value: Any) -> int | None:
    if isinstance(value, list):
        return int(value[0]) if value else None
    return None if value is None else int(value)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value


# -- GGUF ------------------------------------------------------------------------------------------------------------


def _from_gguf(path: Path, header: GgufHeader) -> ModelConfig:
    metadata, tensors = header.metadata, header.tensors
    architecture = str(metadata.get("general.architecture", ""))

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise StartupError(f"the GGUF file {path} lacks {architecture}.{key}")
        return found

    hidden, heads = int(value("embedding_length")), int(value("attention.head_count"))
    head_dim = int(value("attention.key_length", hidden // heads))
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"the GGUF file {path} lacks the tensor token_embd.weight")
    window = int(value("attention.sliding_window", 0))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=int(value("feed_forward_length")),
        num_layers=int(value("block_count")),
        num_heads=heads,
        num_kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=_short_float(value("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_rope_scaling(path, header, architecture),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=window or None,
        eos_token_ids=_gguf_eos_ids(metadata),
        bos_token_id=_first_id(metadata.get("tokenizer.ggml.bos_token_id")),
        checkpoint_dtype=_gguf_dtype(header),
        raw={key: item for key, item in metadata.items() if isinstance(item, int | float | str)},
    )


def _short_float(value: float) -> float:
    """A float32 as the decimal that its author wrote: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _gguf_rope_scaling(path: Path, header: GgufHeader, architecture: str) -> dict[str, Any] | None:
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        with open(path, "rb") as file:
            file.seek(factors.offset)
            values = np.frombuffer(file.read(factors.nbytes), np.float32)
        return {"rope_type": "factors", "factors": [float(v) for v in values]}
    prefix = f"{architecture}.rope.scaling."
    kind = header.metadata.get(prefix + "type", "none")
    if kind in ("none", ""):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(header.metadata.get(prefix + "factor", 1.0))}
    original = header.metadata.get(prefix + "original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found = {int(i) for i in named if i is not None}
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, GgufStrings) and types is not None:
        found.update(_control_tokens(tokens, types, _END_OF_TURN))
    return tuple(sorted(found))


def _control_tokens(tokens: GgufStrings, types: np.typing.NDArray[np.int32], wanted: Iterable[str]) -> list[int]:
    control = 3
    names = set(wanted)
    return [int(i) for i in np.flatnonzero(np.asarray(types) == control) if tokens[int(i)] in names]


def _gguf_dtype(header: GgufHeader) -> str:
    names = {"F32": "float32", "BF16": "bfloat16"}
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        name = names.get(GGML_TYPES[tensor.ggml_type][0], "float16")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name])
