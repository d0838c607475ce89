"""Tiny random checkpoints of the supported architectures, each with a trained tokenizer and a chat template.

Their weights are large enough that greedy output does not fall into a loop: 64 tokens hold at least 20 distinct ids, so
that a wrong block, position or layer shows.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 384
MAX_POSITIONS = 512
ARCHITECTURES = ("llama", "qwen2", "qwen3")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 32, "use_sliding_window": False},
}


class TinyModels:
    """Makes checkpoints below ``root`` and remembers them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, architecture: str, *, seed: int = 0, shard_bytes: int | None = None, **changes: Any) -> Path:
        """A checkpoint folder of ``architecture``.

        Args:
            seed: of the random weights.
            shard_bytes: cut the weights into files of that size at most.
            changes: of the configuration, over the default shape.
        """
        key = json.dumps([architecture, seed, shard_bytes, changes], sort_keys=True)
        folder = self.root / f"{architecture}-{random.Random(key).getrandbits(48):012x}"
        if not folder.exists():
            make_checkpoint(folder, architecture, seed=seed, shard_bytes=shard_bytes, **changes)
        return folder


def make_checkpoint(
    folder: Path, architecture: str, *, seed: int = 0, shard_bytes: int | None = None, **changes: Any
) -> None:
    """Write a random checkpoint with its tokenizer to ``folder``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = AutoConfig.for_model(architecture, **{**_SHAPE, **_OWN[architecture], **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(1.5, 2.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.generation_config.pad_token_id = 0
    disable_progress_bar()  # it would be in what the test that asks first captures
    model.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    make_tokenizer(folder)


def with_kv_scales(folder: Path, to: Path, scales: dict[str, Any]) -> Path:
    """A copy of a checkpoint in one file, with these tensors, by their names below ``self_attn.``, in every layer."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    for layer in range(_SHAPE["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": value.clone() for name, value in scales.items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with ``VOCABULARY`` entries, trained on a little text, to ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _training_text() -> list[str]:
    """The same sentences every time."""
    sentence = (
        "the water wheel turns when the headrace is open and the mill grinds corn for bread while a river carries "
        "boats past fields of barley where people talk about prices weather and engines that answer questions"
    )
    words = sentence.split()
    choose = random.Random(1)
    return [" ".join(choose.choices(words, k=12)).capitalize() + "." for _ in range(400)]
