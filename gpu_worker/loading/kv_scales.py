"""The scales of an 8-bit KV cache in a checkpoint, under the names that tools for quantization give them.

A stored number times the scale is the key or the value. One scale holds for all heads of a layer.
"""

from __future__ import annotations

import math

from gpu_worker.loading.weights import Weights
from shared.errors import StartupError

KEY_NAMES = ("k_proj.k_scale", "k_scale", "attn.k_scale", "k_proj.output_scale", "kv_scale")
"""Below ``self_attn.``: of ModelOpt; compressed-tensors; vLLM; Quark and older compressed-tensors; and, for keys and
values together, AutoFP8."""
VALUE_NAMES = ("v_proj.v_scale", "v_scale", "attn.v_scale", "v_proj.output_scale", "kv_scale")


def find_scale(weights: Weights, prefix: str, names: tuple[str, ...]) -> float | None:
    """The first of ``names`` that is there; None: none is.

    Args:
        prefix: of the layer's attention, with its dot.

    Raises:
        StartupError: it is not one finite, positive number; the text names it.
    """
    for name in names:
        tensor = weights.find(prefix + name)
        if tensor is None:
            continue
        if tensor.numel() != 1:
            raise StartupError(
                f"the scale {prefix}{name} of the KV cache has the shape {list(tensor.shape)}; "
                "one number for each layer is supported, not one for each head"
            )
        scale = float(tensor)
        if not (math.isfinite(scale) and scale > 0.0):
            raise StartupError(f"the scale {prefix}{name} of the KV cache is {scale}; it must be finite and positive")
        return scale
    return None
