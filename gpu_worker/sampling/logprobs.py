"""Log-probabilities of sampled and of the most probable tokens: ``log_softmax`` (float32) of the model's own logits.

Taken before anything changes the logits, as vLLM does by default (``logprobs_mode`` raw_logprobs).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from gpu_worker.sampling.most_probable import most_probable
from shared.logprobs import pack_records
from shared.messages import SlotInit

NONE = -1
"""A slot that wants no log-probabilities; 0 wants that of the token itself."""


class Distributions:
    """What is known about some positions before their tokens are.

    Args:
        logits: [positions, vocabulary] float32, unchanged and not kept.
        count: how many of the most probable tokens are wanted.
    """

    def __init__(self, logits: torch.Tensor, count: int) -> None:
        self.logprobs = logits.log_softmax(-1)
        self.top = most_probable(logits, min(count, logits.shape[1]))[1] if count else logits.new_empty(len(logits), 0)

    def records(self, tokens: torch.Tensor) -> Records:
        """The records of ``tokens`` [positions] int64; used up."""
        ids = torch.cat([tokens[:, None], self.top.long()], 1)
        logprobs = self.logprobs.gather(1, ids)
        # 1 for more probable tokens, else 0; by arithmetic, which is several times as fast as a comparison on a CPU.
        ranks = self.logprobs.sub_(logprobs[:, :1]).sign_().clamp_min_(0.0).sum(-1).add_(1.0)
        return Records(ranks.int(), ids.int(), logprobs)


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """What ``shared.logprobs`` packs, on the device."""

    ranks: torch.Tensor
    """[positions] int32: 1 more than the number of tokens that are more probable."""
    ids: torch.Tensor
    """[positions, most + 1] int32: the token, then the most probable ones, the lowest id first among equals."""
    logprobs: torch.Tensor
    """[positions, most + 1] float32."""

    def pack(self, counts: Int64) -> list[bytes]:
        """Copy to the host and pack; ``counts`` [positions] most probable tokens are kept of each."""
        ranks, ids, logprobs = self.ranks.cpu().numpy(), self.ids.cpu().numpy(), self.logprobs.cpu().numpy()
        records = [b""] * len(counts)
        for count in np.unique(counts):
            places = np.flatnonzero(counts == count)
            some = pack_records(ranks[places], ids[places, : count + 1], logprobs[places, : count + 1])
            for place, record in zip(places.tolist(), some, strict=True):
                records[place] = record
        return records


@dataclasses.dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The records of the rows of a step that want them."""

    rows: Int64
    counts: Int64
    records: Records

    def pack(self) -> list[tuple[int, bytes]]:
        """(sample row, record), in order. Waits for the device."""
        return list(zip(self.rows.tolist(), self.records.pack(self.counts), strict=True))


class SampleLogprobs:
    """Which slots want log-probabilities of their sampled tokens.

    In a step: ``before`` the sampler uses up the logits, then ``after``. Only rows that want them cost something.
    """

    def __init__(self, num_slots: int) -> None:
        self.counts: Int64 = np.full(num_slots, NONE, np.int64)

    def add(self, request: SlotInit) -> None:
        self.counts[request.slot] = NONE if request.params.logprobs is None else request.params.logprobs

    def before(self, logits: torch.Tensor, rows: SampleRows) -> tuple[Int64, Distributions] | None:
        """The rows that want them, and what is known of these; None: no row does."""
        counts = self.counts[rows.slots]
        wanted = np.flatnonzero(counts != NONE)
        if not len(wanted):
            return None
        some = logits if len(wanted) == len(counts) else logits[torch.from_numpy(wanted).to(logits.device)]
        return wanted, Distributions(some, int(counts.max()))

    def after(
        self, before: tuple[Int64, Distributions] | None, tokens: torch.Tensor, rows: SampleRows
    ) -> SampledLogprobs | None:
        """The records of ``tokens`` [rows] int64, the sampled ids."""
        if before is None:
            return None
        wanted, distributions = before
        chosen = torch.from_numpy(wanted).to(tokens.device)
        return SampledLogprobs(wanted, self.counts[rows.slots[wanted]], distributions.records(tokens[chosen]))
