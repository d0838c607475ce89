"""The vocabulary inside a GGUF file as a ``tokenizers.Tokenizer`` that gives llama.cpp's ids.

``tokenizer.ggml.model`` names the algorithm: ``gpt2`` is byte-level BPE, whose splitting into words follows
``tokenizer.ggml.pre``; ``llama`` is SentencePiece's BPE with byte fallback. The regular expressions are those of
llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shared.errors import StartupError
from shared.gguf_header import read_gguf_header
from tokenizer_service.vocabulary import DEFAULT_TEMPLATE, Vocabulary, add_bos_and_eos, finish

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of ``tokenizer.ggml.token_type`` that are matched in the text before anything is split."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_CASED = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+{suffix}"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*{suffix}"
    r"|{digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("{suffix}", "").replace("{digits}", r"\p{N}")
_GPT4O = _CASED.replace("{suffix}", _CONTRACTIONS + "?").replace("{digits}", r"\p{N}{1,3}")

_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
"""A word that is in the vocabulary is one token, whatever the merges say; these also begin with BOS by default."""

_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_WHOLE_WORDS_FIRST, (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""``tokenizer.ggml.pre``: the expressions that cut a text into words, each applied to the pieces of the one before."""


def load_gguf_vocabulary(path: Path) -> Vocabulary:
    """Build the tokenizer of a GGUF file.

    Raises:
        StartupError: the file has no vocabulary, or one of a kind that is not supported.
    """
    metadata = read_gguf_header(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    kind = metadata.get("tokenizer.ggml.model")
    if tokens is None:
        raise StartupError(f"the GGUF file {path} holds no vocabulary (tokenizer.ggml.tokens)")
    names = list(tokens)
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(path, names, metadata)
        bos_by_default = metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    elif kind == "llama":
        tokenizer, bos_by_default = _sentencepiece_bpe(names, metadata), True
    else:
        raise StartupError(
            f"the GGUF file {path} has a vocabulary of the kind {kind!r}; gpt2 and llama are supported. "
            "A folder with the model's tokenizer.json works, too"
        )
    _add_special_tokens(tokenizer, names, metadata.get("tokenizer.ggml.token_type"))

    def token(name: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return names[token_id] if token_id is not None and 0 <= token_id < len(names) else None

    bos, eos = token("bos"), token("eos")
    add_bos_and_eos(
        tokenizer,
        bos if metadata.get("tokenizer.ggml.add_bos_token", bos_by_default) else None,
        eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    special = {"bos_token": bos, "eos_token": eos, "unk_token": token("unknown"), "pad_token": token("padding")}
    template = metadata.get("tokenizer.chat_template")
    return finish(tokenizer, special, {DEFAULT_TEMPLATE: template} if template else {})


def _byte_level_bpe(path: Path, names: Sequence[str], metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise StartupError(
            f"the GGUF file {path} splits words in the way {pre!r}, which is not supported; "
            "a folder with the model's tokenizer.json works"
        )
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_bpe(names: Sequence[str], metadata: Mapping[str, Any]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    ranks = [0.0] * len(names) if scores is None else [float(score) for score in scores]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    unknown = names[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab, ranks), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to make a token of two others, best token first: SentencePiece joins the pair of the best score."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[token_id], vocab[left], vocab[right], left, right))
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(tokenizer: Tokenizer, names: Sequence[str], types: Any) -> None:
    for token_id, kind in enumerate([] if types is None else types.tolist()):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            token = AddedToken(names[token_id], special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
