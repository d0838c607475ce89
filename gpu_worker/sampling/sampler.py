"""The sampler: constraints for every row, then the greedy choice or a draw."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from gpu_worker.sampling.allowed_token_ids import AllowedTokenIds
from gpu_worker.sampling.argmax import argmax
from gpu_worker.sampling.base import Component, Int64, SampleRows
from gpu_worker.sampling.frequency_penalty import FrequencyPenalty
from gpu_worker.sampling.logit_bias import LogitBias
from gpu_worker.sampling.min_p import MinP
from gpu_worker.sampling.min_tokens import MinTokens
from gpu_worker.sampling.noise import gumbel
from gpu_worker.sampling.presence_penalty import PresencePenalty
from gpu_worker.sampling.repetition_penalty import RepetitionPenalty
from gpu_worker.sampling.temperature import Temperature
from gpu_worker.sampling.top_k import TopK
from gpu_worker.sampling.top_p import TopP
from gpu_worker.sampling.vocabulary import PaddedVocabulary
from shared.messages import SlotInit
from shared.sampling import SamplingParams

CPU = torch.device("cpu")


class Sampler:
    """Draws one token for each row by the Gumbel-max trick.

    ``constraints`` apply to all rows, ``shapers`` to those that are drawn, in their order. A step whose rows are all
    greedy runs no shaper and makes no noise. Ties go to the lowest id.

    The order is vLLM's (``vllm/v1/sample/sampler.py``): what is masked, bias, penalties, temperature, what is cut off.
    It matters: a penalty divides or multiplies by the sign of the biased logit, and min-p to top-p see probabilities
    after the temperature. What is masked (-inf) stays masked in all that follows.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        num_tokens: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        """
        Args:
            num_tokens: ids from here on have no token; None: all ids have one.
            device: of the logits.
        """
        self.vocab_size = vocab_size
        self.constraints: list[Component] = [
            PaddedVocabulary(num_tokens),
            AllowedTokenIds(device),
            LogitBias(device),
            MinTokens(num_slots),
            RepetitionPenalty(num_slots),
            FrequencyPenalty(num_slots),
            PresencePenalty(num_slots),
        ]
        self.shapers: list[Component] = [
            Temperature(num_slots),
            MinP(num_slots),
            TopK(num_slots, vocab_size),
            TopP(num_slots),
        ]
        self.greedy = np.ones(num_slots, np.bool_)
        self.seeds: Int64 = np.zeros(num_slots, np.int64)
        self.choices: Int64 = np.zeros(num_slots, np.int64)

    def add(self, request: SlotInit) -> None:
        """A request takes its slot."""
        params = request.params
        self.greedy[request.slot] = self._is_greedy(params)
        self.seeds[request.slot] = zlib.crc32(request.rid.encode()) if params.seed is None else params.seed
        self.choices[request.slot] = request.choice
        for component in (*self.constraints, *self.shapers):
            component.add(request)

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """[rows] int64 token ids; ``logits`` [rows, vocabulary] float32 are used up."""
        for constraint in self.constraints:
            constraint.apply(logits, rows)
        drawn = np.flatnonzero(~self.greedy[rows.slots])
        if not len(drawn):
            return argmax(logits)
        if len(drawn) == len(rows.slots):
            return self._draw(logits, rows)
        tokens = argmax(logits)
        chosen = torch.from_numpy(drawn).to(logits.device)
        tokens[chosen] = self._draw(logits[chosen], rows.select(drawn))
        return tokens

    def _draw(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        for shaper in self.shapers:
            shaper.apply(logits, rows)
        device = logits.device
        seeds = torch.from_numpy(self.seeds[rows.slots]).to(device)
        choices = torch.from_numpy(self.choices[rows.slots]).to(device)
        return argmax(logits.add_(gumbel(seeds, choices, rows.positions, logits.shape[1])))

    def _is_greedy(self, params: SamplingParams) -> bool:
        """Also where only the most probable token can stay: its probability is at least 1 / vocab_size."""
        single = params.top_k == 1 or params.min_p >= 1.0 or params.top_p <= 1.0 / self.vocab_size
        return params.greedy or single
