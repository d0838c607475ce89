"""Log-probabilities of prompt tokens, from the hidden states of the chunks that a prompt is computed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import Int64
from gpu_worker.sampling.logprobs import NONE, Distributions, Records
from shared.messages import SlotInit

SLICE = 64
"""Positions whose logits are in memory at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The records of a step's prefill rows that want them."""

    rows: Int64
    lengths: Int64
    """[rows] records of each row."""
    counts: Int64
    """[rows] most probable tokens in each of its records."""
    records: list[Records]
    """One row's after another's, in slices."""

    def pack(self) -> list[tuple[int, list[bytes]]]:
        """(prefill row, its records), in order. Waits for the device."""
        counts = np.split(np.repeat(self.counts, self.lengths), range(SLICE, int(self.lengths.sum()), SLICE))
        packed = [record for part, count in zip(self.records, counts, strict=True) for record in part.pack(count)]
        ends = np.cumsum(self.lengths).tolist()
        return [
            (row, packed[end - length : end])
            for row, length, end in zip(self.rows.tolist(), self.lengths.tolist(), ends, strict=True)
        ]


class PromptLogprobs:
    """Which slots want log-probabilities of their prompt tokens."""

    def __init__(self, num_slots: int) -> None:
        self.counts: Int64 = np.full(num_slots, NONE, np.int64)

    def add(self, request: SlotInit) -> None:
        self.counts[request.slot] = NONE if request.params.prompt_logprobs is None else request.params.prompt_logprobs

    def score(
        self,
        prefill: npt.NDArray[np.int32],
        prompt_lens: Int64,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        project: Callable[[torch.Tensor], torch.Tensor],
    ) -> ScoredPrompts | None:
        """The records of the prompt tokens start + 1 to start + count of each row, as far as its prompt goes.

        The vocabulary is projected for ``SLICE`` positions at a time.

        Args:
            prefill: [rows, 3] slot, start, count.
            prompt_lens: [slots].
            token_ids: [slots, max_model_len] int32 on the device.
            hidden: [tokens, hidden] of the step; the prefill rows come first, one after another.
            project: from hidden states to logits, float32.

        Returns:
            None: no row has any.
        """
        slots, starts, spans = prefill.astype(np.int64).T
        wanted = self.counts[slots]
        lengths = np.minimum(spans, prompt_lens[slots] - 1 - starts)
        rows = np.flatnonzero((wanted != NONE) & (lengths > 0))
        if not len(rows):
            return None
        lengths, total = lengths[rows], int(lengths[rows].sum())
        within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        sources = within + np.repeat((np.cumsum(spans) - spans)[rows], lengths)
        targets = within + np.repeat(slots[rows] * token_ids.shape[1] + starts[rows] + 1, lengths)
        source, target = torch.from_numpy(np.stack([sources, targets])).to(hidden.device)
        tokens, most = token_ids.view(-1)[target].long(), int(wanted[rows].max())
        records = [
            Distributions(project(hidden[source[first : first + SLICE]]), most).records(tokens[first : first + SLICE])
            for first in range(0, total, SLICE)
        ]
        return ScoredPrompts(rows, lengths, wanted[rows], records)
