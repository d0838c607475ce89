"""The sampler for logits on a GPU: the pipeline of ``sampler.Sampler`` in kernels that a graph can capture."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.kernels.logprobs import gather_logprobs, summarise_logprobs
from gpu_worker.kernels.sampling_argmax import ArgmaxState, sample_argmax
from gpu_worker.kernels.sampling_constraints import constrain
from gpu_worker.kernels.sampling_cut import find_cuts
from gpu_worker.kernels.sampling_layout import DRAWN, RESULT
from gpu_worker.sampling.base import Int64
from gpu_worker.sampling.cuda_slots import SlotParams
from shared.logprobs import pack_records
from shared.messages import SlotInit

Variant = Literal["plain", "full"]
NONE = -1
"""A slot that wants no log-probabilities."""


class SlotState(Protocol):
    """The known tokens of all slots on the device, int32, with a last row for the padding slot."""

    token_ids: torch.Tensor
    """[slots + 1, max_model_len]."""
    num_tokens: torch.Tensor
    """[slots + 1], the sampled token not included: where it will be written."""
    prompt_len: torch.Tensor
    """[slots + 1]."""


class Samples(NamedTuple):
    """The result of a step, on the device."""

    tokens: torch.Tensor
    """[rows] int32."""
    logprobs: torch.Tensor | None
    """[rows, RESULT] int32 (``sampling_layout.RESULT``) for ``pack``; valid in rows that want them. None: the
    variant is *plain*."""


class CudaSampler:
    """Draws one token for each row of logits; tokens are those of ``Sampler`` on the CPU.

    The parameters of the slots are on the device, and what a step launches depends only on the number of rows and the
    variant, so that it can be captured once and replayed for any rows:

    - *plain*: greedy rows and draws with a temperature; one kernel that reads the logits once.
    - *full*: all features and log-probabilities. Each kernel returns at once for rows that don't need it.

    A row gives the same token in both variants, whatever the other rows are. Ties go to the lowest id.

    Equality with the CPU is that of float32 arithmetic: the integers behind the noise are the same bits, logarithms and
    sums may differ in their last one, so that a draw differs only where two scores are equal but for rounding.

    Not for two streams at a time. All memory that is kept has been allocated when the constructor returns, except for
    lists of parameters that outgrow the arena, which ``add`` moves without the kernels' notice.

    Args:
        num_slots: the padding slot, which is greedy and has no feature, has this number.
        vocab_size: width of the logits.
        num_tokens: ids from here on have no token and are never sampled; None: all ids have one.
        max_rows: most rows of a step; None: ``num_slots`` rounded up to a multiple of 512.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        num_tokens: int | None,
        device: torch.device,
        max_rows: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_tokens = vocab_size if num_tokens is None else min(num_tokens, vocab_size)
        self.params = SlotParams(num_slots + 1, vocab_size, device)
        self._argmax = ArgmaxState(max_rows or -(-(num_slots + 1) // 512) * 512, device)
        self._logprobs: Int64 = np.full(num_slots + 1, NONE, np.int64)

    def add(self, inits: list[SlotInit]) -> None:
        """Requests take their slots; overwrites all that the slots' last requests left.

        One copy and one kernel on the current stream, from pinned memory that stays untouched while a copy is in
        flight; the host does not wait. Not inside a capture.
        """
        for request in inits:
            wanted = request.params.logprobs
            self._logprobs[request.slot] = NONE if wanted is None else wanted
        if inits:
            self.params.add(inits)

    def variant_of(self, slots: npt.NDArray[np.integer]) -> Variant:
        """The cheapest variant that serves these slots, from what the host knows.

        Args:
            slots: [rows], on the host.
        """
        return "full" if (self.params.flags[slots] & ~DRAWN.value).any() else "plain"

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, state: SlotState, variant: Variant) -> Samples:
        """Draw a token for each row. Can be captured; waits for nothing.

        Compile the kernels by one call of each variant before capturing.

        Args:
            logits: [rows, vocab_size] float32, rows contiguous; used up by *full*.
            slots: [rows] int32 on the device; distinct, but for the padding slot.
            state: as it is before the drawn tokens are appended.
            variant: at least what ``variant_of`` says.
        """
        params = self.params
        if variant == "plain":
            tokens = sample_argmax(logits, slots, params.records, state.num_tokens, self.num_tokens, self._argmax)
            return Samples(tokens, None)
        summary = summarise_logprobs(logits, slots, params.records)
        constrain(
            logits,
            slots,
            params.records,
            params.arena_address,
            state.token_ids,
            state.num_tokens,
            state.prompt_len,
            self.num_tokens,
        )
        cuts = find_cuts(logits, slots, params.records, self.num_tokens)
        tokens = sample_argmax(logits, slots, params.records, state.num_tokens, self.num_tokens, self._argmax, cuts)
        return Samples(tokens, gather_logprobs(logits, slots, params.records, tokens, summary))

    def wanted_logprobs(self, slots: npt.NDArray[np.integer]) -> Int64:
        """[rows] how many of the most probable tokens each row reports, ``NONE``: it reports nothing.

        For ``pack``: ask when the step is launched, before a slot is given away.

        Args:
            slots: [rows], on the host.
        """
        counts: Int64 = self._logprobs[slots]
        return counts


def pack(logprobs: npt.NDArray[np.int32], counts: Int64) -> list[tuple[int, bytes]]:
    """(sample row, token record of ``shared.logprobs``) of the rows that want one, in order.

    Args:
        logprobs: [rows, RESULT], ``Samples.logprobs`` on the host.
        counts: [rows] of ``CudaSampler.wanted_logprobs``.
    """
    assert logprobs.shape[1] == RESULT
    half = 1 + RESULT // 2
    packed: list[tuple[int, bytes]] = []
    for count in np.unique(counts[counts != NONE]).tolist():
        rows = np.flatnonzero(counts == count)
        some = logprobs[rows]
        values = np.ascontiguousarray(some[:, half : half + count + 1]).view(np.float32)
        packed += zip(rows.tolist(), pack_records(some[:, 0], some[:, 1 : count + 2], values), strict=True)
    return sorted(packed)
