"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and a sliding window in the upper layers if switched on."""

from __future__ import annotations

from typing import ClassVar

from gpu_worker.loading.weights import GgufNames
from gpu_worker.models.base import Builder
from gpu_worker.models.llama import GGUF_LAYER, GGUF_TOP, LlamaForCausalLM, Variant


class Qwen2ForCausalLM(LlamaForCausalLM):
    gguf_names: ClassVar[GgufNames] = GgufNames(GGUF_TOP, GGUF_LAYER)

    def variant(self, builder: Builder) -> Variant:
        return Variant(qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False)
