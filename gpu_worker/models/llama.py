"""Llama (Touvron et al., 2023), and the decoder that Qwen2 and Qwen3 share with it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from gpu_worker.forward_context import ForwardContext
from gpu_worker.layers.attention import Attention
from gpu_worker.layers.linear import make_head
from gpu_worker.layers.mlp import GatedMLP
from gpu_worker.layers.norm import HeadNorm, RMSNorm
from gpu_worker.loading.weights import GgufNames
from gpu_worker.models.base import Builder
from shared.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """Where the architectures of this family differ; the defaults are Llama's."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def sliding_window(config: ModelConfig, index: int) -> int | None:
    """The window of a layer: of those that ``layer_types`` names, or else of those from ``max_window_layers`` on."""
    layer_types = config.raw.get("layer_types")
    if isinstance(layer_types, list):
        return config.sliding_window if layer_types[index] == "sliding_attention" else None
    return config.sliding_window if index >= int(config.raw.get("max_window_layers", 0)) else None


class DecoderLayer:
    """Pre-norm attention and feed-forward. The result of each is added to the residual stream by the norm behind it."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.input_norm, self.attention, self.mlp_norm, self.mlp = input_norm, attention, mlp_norm, mlp

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None, context: ForwardContext) -> torch.Tensor:
        """
        Args:
            hidden: [tokens, hidden] float32, the residual stream; updated in place.
            delta: [tokens, hidden], what the layer before adds to it; None: there is none.

        Returns:
            What this layer's feed-forward adds to it, which is left to the caller.
        """
        attended = self.attention(self.input_norm.add(hidden, delta), context)
        return self.mlp(self.mlp_norm.add(hidden, attended))


class LlamaForCausalLM:
    """Satisfies ``CausalLM``."""

    gguf_names: ClassVar[GgufNames] = GgufNames(
        GGUF_TOP, GGUF_LAYER, interleaved=("self_attn.q_proj", "self_attn.k_proj")
    )

    def __init__(self, builder: Builder) -> None:
        config = builder.config
        self.embedding = builder.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self._layer(builder, index) for index in range(config.num_layers)]
        self.norm = self._norm(builder, "model.norm")
        head = (
            self.embedding
            if config.tie_word_embeddings
            else builder.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self.head = make_head(head, batch_invariant=builder.batch_invariant)

    def variant(self, builder: Builder) -> Variant:
        config = builder.config
        return Variant(config.attention_bias, config.attention_bias, config.mlp_bias, config.qk_norm)

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.embedding.index_select(0, token_ids).float()
        delta = None
        for layer in self.layers:
            delta = layer(hidden, delta, context)
        return self.norm.add(hidden, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def _layer(self, builder: Builder, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        return DecoderLayer(
            self._norm(builder, prefix + "input_layernorm"),
            self._attention(builder, index, prefix + "self_attn."),
            self._norm(builder, prefix + "post_attention_layernorm"),
            self._mlp(builder, prefix + "mlp."),
        )

    def _norm(self, builder: Builder, name: str) -> RMSNorm:
        config = builder.config
        return RMSNorm(builder.vector(f"{name}.weight", config.hidden_size), config.rms_norm_eps, builder.dtype)

    def _attention(self, builder: Builder, index: int, prefix: str) -> Attention:
        config, variant = builder.config, self.variant(builder)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        return Attention(
            config,
            builder.backend,
            index,
            builder.linear(names, (q_size, kv_size, kv_size), config.hidden_size, variant.qkv_bias),
            builder.linear([prefix + "o_proj"], (config.hidden_size,), q_size, variant.output_bias),
            self._head_norm(builder, prefix) if variant.qk_norm else None,
            sliding_window(config, index),
            builder.kv_scales(prefix),
        )

    def _head_norm(self, builder: Builder, prefix: str) -> HeadNorm:
        config = builder.config
        q_weight = builder.vector(prefix + "q_norm.weight", config.head_dim)
        k_weight = builder.vector(prefix + "k_norm.weight", config.head_dim)
        return HeadNorm(q_weight, k_weight, config.num_heads, config.num_kv_heads, config.rms_norm_eps)

    def _mlp(self, builder: Builder, prefix: str) -> GatedMLP:
        config, bias = builder.config, self.variant(builder).mlp_bias
        size = config.intermediate_size
        gated = builder.gated_linear(prefix + "gate_proj", prefix + "up_proj", size, config.hidden_size, bias)
        down = builder.linear([prefix + "down_proj"], (config.hidden_size,), size, bias)
        return GatedMLP(gated, down)
