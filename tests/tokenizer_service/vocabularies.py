"""Small vocabularies that tests build themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

TEXT = ["the quick brown fox jumps over the lazy dog", "I see. Observatory! DEFGHIJ", "naïve café 漢字 🙂", "12 345"]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def byte_level(special: list[str], *, bos: str | None = None) -> Tokenizer:
    """A byte-level BPE like Llama 3's and Qwen's; ``bos`` is put first by its post-processor."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    if bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """BPE with byte fallback and a space before the first word, like Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "a", "b", "ab", "▁ab", "c", "é", "漢", "▁c"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "c")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words without a decoder: ``decode`` puts spaces between them."""
    words = ["<unk>", "<s>", "a", "b", "stop", "�", "x�"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "play", "##ing", "##ed", "the", ".", "'", "s"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """A model folder with everything but weights; ``config`` is its tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = tokenizer.get_vocab_size()
    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": size,
        "max_position_embeddings": 128,
        "eos_token_id": config.get("eos_id"),
    }
    (folder / "config.json").write_text(json.dumps(model))
    return folder
