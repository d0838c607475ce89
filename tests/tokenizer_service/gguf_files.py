"""Tiny GGUF files with a real vocabulary and random weights, good enough for llama.cpp to load."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_bpe(path: Path, tokenizer: Tokenizer, pre: str, *, bos: str, eos: str, add_bos: bool | None = None) -> Path:
    """A byte-level BPE as llama.cpp's converter writes it."""
    state = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    added = {token["id"]: token for token in state["added_tokens"]}
    names = [tokenizer.id_to_token(i) for i in range(size)]
    types = [NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED for i in range(size)]
    writer = _writer(path, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id(bos))
    writer.add_eos_token_id(tokenizer.token_to_id(eos))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    return _finish(writer, path, size)


def write_sentencepiece(path: Path, pieces: list[tuple[str, float, int]], *, add_space_prefix: bool) -> Path:
    """``pieces``: text, score and type of each token; 1 is BOS and 2 EOS."""
    writer = _writer(path, len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(add_space_prefix)
    return _finish(writer, path, len(pieces))


def _writer(path: Path, vocab_size: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(vocab_size)
    return writer


def _finish(writer: gguf.GGUFWriter, path: Path, vocab_size: int) -> Path:
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (vocab_size, 32), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "output_norm": (32,)}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (32, 32) for name in names}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_pieces() -> list[tuple[str, float, int]]:
    """A vocabulary in SentencePiece's order: better pieces have higher scores."""
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    words = [
        "th",
        "he",
        "▁t",
        "▁th",
        "▁the",
        "in",
        "ing",
        "qu",
        "▁qu",
        "ck",
        "ick",
        "▁quick",
        "er",
        "an",
        "▁a",
        "▁b",
        "own",
        "▁▁",
    ]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", *"THI.,!?0123456789é漢"]
    return pieces + [(piece, -float(rank), NORMAL) for rank, piece in enumerate([*words, *letters])]
