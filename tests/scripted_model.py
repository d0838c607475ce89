"""A real checkpoint whose output is forced: each token has one successor, so a prompt of one token gives its script.

The residual stream carries the current token alone, as a one-hot vector: attention and MLP add zero, and the head maps
each token to the next one of its script. What a model would have to be persuaded to say, this one says.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

SIZE = 512
"""Width of the logits, and of everything else; ids that no script uses have a token only if it is a byte."""
EOS = "</s>"


class Scripts:
    """The ids of scripts: of the token that starts each, and of its tokens."""

    def __init__(self, scripts: Mapping[str, Sequence[str | bytes]]) -> None:
        alphabet = _byte_alphabet()
        self.vocabulary: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.ids: dict[str, list[int]] = {}
        self.scripts = {name: [_spelling(piece, alphabet) for piece in script] for name, script in scripts.items()}
        for token in ("<unk>", "<s>", EOS, *alphabet.values()):
            self._add(token)
        for name, script in self.scripts.items():
            self.starts[name] = self._add(f"<|{name}|>")
            self.ids[name] = [self._add(token) for token in script]
        used = [token for ids in self.ids.values() for token in ids]
        assert len(set(used)) == len(used), "a token is in two places of the scripts: its successor would be unclear"
        assert len(self.vocabulary) < SIZE

    @property
    def eos(self) -> int:
        return self.vocabulary[EOS]

    def successors(self) -> dict[int, int]:
        found = {}
        for name, ids in self.ids.items():
            chain = [self.starts[name], *ids, self.eos]
            found.update(itertools.pairwise(chain))
        return found

    def _add(self, token: str) -> int:
        return self.vocabulary.setdefault(token, len(self.vocabulary))


def make_scripted_checkpoint(folder: Path, scripts: Mapping[str, Sequence[str | bytes]]) -> Scripts:
    """Write the checkpoint to ``folder``; a piece of a script is one token, as text or as raw bytes.

    The token ``<|name|>`` starts the script of that name, as a prompt or as the last message of a chat.
    """
    made = Scripts(scripts)
    _write_model(folder, made)
    _write_tokenizer(folder, made)
    return made


def _write_model(folder: Path, scripts: Scripts) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=scripts.vocabulary["<s>"],
        eos_token_id=scripts.eos,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        for token in range(SIZE):
            model.lm_head.weight[scripts.successors().get(token, scripts.eos), token] = 1.0
    disable_progress_bar()  # as in tiny_models
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, scripts: Scripts) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = [token for token in scripts.vocabulary if token in ("<unk>", "<s>", EOS) or token.startswith("<|")]
    tokenizer = Tokenizer(models.BPE(scripts.vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": EOS,
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ messages[-1]['content'] }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_alphabet() -> dict[int, str]:
    """Each byte's character in byte-level vocabularies: itself where it prints, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


def _spelling(piece: str | bytes, alphabet: Mapping[int, str]) -> str:
    raw = piece.encode() if isinstance(piece, str) else piece
    return "".join(alphabet[byte] for byte in raw)
