"""How far a result may be from the exact one."""

from __future__ import annotations

import torch


def relative_error(dtype: torch.dtype) -> float:
    """Of one rounding to ``dtype``, or of a few operations in float32. Triton's interpreter cuts bfloat16 off."""
    if dtype == torch.bfloat16:
        return 2.0**-8 if torch.cuda.is_available() else 2.0**-7
    return {torch.float16: 2.0**-11, torch.float32: 1e-5}[dtype]
