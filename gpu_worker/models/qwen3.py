"""Qwen3: Llama with QK-norm and a head size of its own."""

from __future__ import annotations

from typing import ClassVar

from gpu_worker.loading.weights import GgufNames
from gpu_worker.models.base import Builder
from gpu_worker.models.llama import GGUF_LAYER, GGUF_TOP, LlamaForCausalLM, Variant


class Qwen3ForCausalLM(LlamaForCausalLM):
    gguf_names: ClassVar[GgufNames] = GgufNames(GGUF_TOP, GGUF_LAYER)

    def variant(self, builder: Builder) -> Variant:
        bias = builder.config.attention_bias
        return Variant(qkv_bias=bias, output_bias=bias, mlp_bias=False, qk_norm=True)
