"""Linear layers on a GPU, each product by the kernel that is fastest for its number of tokens."""

from __future__ import annotations

from typing import ClassVar

import torch

from gpu_worker.kernels.activation import silu_mul
from gpu_worker.kernels.gemm import gemm
from gpu_worker.kernels.gemm_config import GemmChoice
from gpu_worker.kernels.split_k import make_arrivals
from gpu_worker.layers.gemm_choice import GemmShape, choices_for, invariant_config


class CudaLinear:
    """``x @ weight.T + bias``, summed in float32.

    A layer computes on one stream at a time: its products count arrivals in one buffer.

    Args:
        weight: [out, in], contiguous.
        bias: [out].
        out_dtype: dtype of the results; x's where None.
        batch_invariant: a token's result is the same bits whatever other tokens there are: one kernel with one order
            of summation for any number of them.
    """

    GATED: ClassVar[bool] = False
    """Whether the result is ``silu(gate) * up`` of the product's halves."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.weight, self.bias, self.out_dtype = weight.contiguous(), bias, out_dtype
        rows, depth = weight.shape
        self.shape = GemmShape(rows, depth, weight.dtype, out_dtype or weight.dtype, self.GATED)
        self._arrivals = make_arrivals(weight.device)
        self._gated = False
        self._choices: tuple[GemmChoice, ...] = ()
        self._beyond: GemmChoice = None
        if batch_invariant:
            self._beyond = invariant_config(self.shape)
        else:
            self._choices = choices_for(self.shape, device_name(weight.device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] to [tokens, out]."""
        return self._compute(x, self.choice(len(x)))

    def choice(self, tokens: int) -> GemmChoice:
        """What computes the product of so many tokens."""
        if not tokens:
            return None
        return self._choices[tokens] if tokens < len(self._choices) else self._beyond

    def _compute(self, x: torch.Tensor, choice: GemmChoice) -> torch.Tensor:
        return gemm(
            x,
            self.weight,
            self.bias,
            choice,
            self._arrivals,
            out_dtype=self.out_dtype,
            gated=self._gated,
        )


class CudaGatedLinear(CudaLinear):
    """``silu(gate(x)) * up(x)``, [tokens, in] to [tokens, size]: ``weight`` [2 * size, in], the gate first.

    Kernels for few tokens compute all of it; the sums of gate and up are rounded to x's dtype before the activation
    only where that is a kernel of its own. So it always is in the batch-invariant mode.
    """

    GATED = True

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
    ) -> None:
        super().__init__(weight, bias, batch_invariant=batch_invariant)
        self._gated = not batch_invariant

    def _compute(self, x: torch.Tensor, choice: GemmChoice) -> torch.Tensor:
        result = super()._compute(x, choice)
        return result if self._gated else silu_mul(result)


class CudaHead(CudaLinear):
    """The projection of [tokens, hidden] to the vocabulary: ``weight`` [vocabulary, hidden], results float32."""

    def __init__(self, weight: torch.Tensor, *, batch_invariant: bool = False) -> None:
        super().__init__(weight, out_dtype=torch.float32, batch_invariant=batch_invariant)


def device_name(device: torch.device) -> str:
    """The device's name as measurements are stored under; ``cpu`` where the kernels are interpreted."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
