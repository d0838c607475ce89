"""Linear layers: weights prepacked for oneDNN on a CPU, plain elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

INVARIANT_ROWS = {torch.float32: 16, torch.bfloat16: 2}
"""The product of a number of rows that this does not divide may take another summation order (measured with oneDNN 3:
one row in bfloat16, one to nine rows in float32)."""
EQUAL_ROWS = 16
"""In bfloat16 that holds where AVX-512 computes it. With AMX, or without either, nearly every number of rows has an
order of its own: there all products are of this many."""


class LinearLayer(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out], of x's dtype."""


class HeadLayer(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, vocabulary], float32."""


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> LinearLayer:
    """A linear layer for ``weight`` [out, in] and ``bias`` [out]; takes over the weight (it may be repacked).

    Args:
        batch_invariant: a row's result is the same bits whatever other rows there are.
    """
    if weight.is_cuda:
        from gpu_worker.layers.cuda_linear import CudaLinear

        return CudaLinear(weight, bias, batch_invariant=batch_invariant)
    layer: LinearLayer = PackedLinear(weight, bias) if can_prepack(weight) else PlainLinear(weight, bias)
    return _invariant(layer, weight.dtype) if batch_invariant else layer


def make_head(weight: torch.Tensor, *, batch_invariant: bool = False) -> HeadLayer:
    """The projection to the vocabulary, whose results are float32 for any dtype of ``weight`` [vocabulary, hidden]."""
    if weight.is_cuda:
        from gpu_worker.layers.cuda_linear import CudaHead

        return CudaHead(weight, batch_invariant=batch_invariant)
    if weight.dtype == torch.float32:
        return make_linear(weight, batch_invariant=batch_invariant)
    head = SplitHead(weight) if can_prepack(weight) else WideHead(weight)
    return _invariant(head, weight.dtype) if batch_invariant else head


def _invariant(layer: LinearLayer | HeadLayer, dtype: torch.dtype) -> PaddedRows | EqualRows:
    if dtype == torch.bfloat16 and (torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported()):
        return EqualRows(layer, EQUAL_ROWS)
    return PaddedRows(layer, INVARIANT_ROWS.get(dtype, 1))


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can repack this weight (a CPU, and a dtype that the CPU computes natively)."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The weight in oneDNN's own blocked layout, made once: 1.3 to 2 times faster at few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return result


class PaddedRows:
    """Pads the rows to a multiple of a number."""

    def __init__(self, layer: LinearLayer | HeadLayer, multiple: int) -> None:
        self.layer, self.multiple = layer, multiple

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        missing = -len(x) % self.multiple
        if not missing:
            return self.layer(x)
        return self.layer(F.pad(x, (0, 0, 0, missing)))[: len(x)]


class EqualRows:
    """Computes so many rows at a time, the last ones padded."""

    def __init__(self, layer: LinearLayer | HeadLayer, rows: int) -> None:
        self.layer, self.rows = PaddedRows(layer, rows), rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= self.rows:
            return self.layer(x)
        return torch.cat([self.layer(some) for some in torch.split(x, self.rows)])


class SplitHead:
    """Logits with about 16 bits of mantissa from a bfloat16 product, whose own result has 8.

    The library sums in float32 but returns bfloat16, where logits near 20 are 0.125 apart. A second product that
    subtracts the first result before it rounds returns what the first one lost: ``hi = bf16(Wx)``,
    ``lo = bf16(Wx - hi)``.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._subtract = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        high: torch.Tensor = self._linear(x, self.weight, None, "none", [], "")
        low: torch.Tensor = self._subtract(x, high, self.weight, None, "sub")
        return high.float().add_(low)


class WideHead:
    """Logits in float32 from float32 copies of the operands."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight)
