"""Linear layers on a GPU, each product by the kernel that is fastest for its number of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch

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

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.weight, self.bias, self.out_dtype = weight.contiguous(), bias, out_dtype
        self.shape = GemmShape(weight.shape[0], weight.shape[1], weight.dtype, out_dtype or weight.dtype)
        self._arrivals = make_arrivals(weight.device)
        self._choices: tuple[GemmChoice, ...] = ()
        self._beyond: GemmChoice = None
        if batch_invariant:
            self._beyond = invariant_config(self.shape)
        else:
            self._choices = choices_for(self.shape, device_name(weight.device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] to [tokens, out]."""
        return gemm(x, self.weight, self.bias, self.choice(len(x)), self._arrivals, out_dtype=self.out_dtype)

    def choice(self, tokens: int) -> GemmChoice:
        """What computes the product of so many tokens."""
        if not tokens:
            return None
        return self._choices[tokens] if tokens < len(self._choices) else self._beyond

    def warm_up(self, token_counts: Iterable[int], *, compile_only: bool = False) -> None:
        """Compute a product of each of these numbers of tokens once, which compiles and loads its kernel.

        A CUDA graph's capture must not do that. One layer of a shape is enough.

        Args:
            compile_only: launch nothing, as is right while another stream works or the weight is still being loaded;
                the kernels are in Triton's cache then.
        """
        for tokens in token_counts:
            x = self.weight.new_zeros(tokens, self.shape.in_features)
            choice = self.choice(tokens)
            if choice is not None or not compile_only:
                gemm(
                    x,
                    self.weight,
                    self.bias,
                    choice,
                    self._arrivals,
                    out_dtype=self.out_dtype,
                    compile_only=compile_only,
                )


class CudaHead(CudaLinear):
    """The projection of [tokens, hidden] to the vocabulary: ``weight`` [vocabulary, hidden], results float32."""

    def __init__(self, weight: torch.Tensor, *, batch_invariant: bool = False) -> None:
        super().__init__(weight, out_dtype=torch.float32, batch_invariant=batch_invariant)


def device_name(device: torch.device) -> str:
    """The device's name as measurements are stored under; ``cpu`` where the kernels are interpreted."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
