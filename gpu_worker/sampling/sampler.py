"""The sampler: constraints for every row, then the greedy choice or a draw."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from gpu_worker.sampling.allowed_token_ids import AllowedTokenIds
from gpu_worker.sampling.argmax import argmax
from gpu_worker.sampling.bad_words import BadWords
from gpu_worker.sampling.base import Component, Int64, SampleRows
from gpu_worker.sampling.frequency_penalty import FrequencyPenalty
from gpu_worker.sampling.logit_bias import LogitBias
from gpu_worker.sampling.min_p import MinP
from gpu_worker.sampling.min_tokens import MinTokens
from gpu_worker.sampling.noise import Purpose, gumbel_of, keys_at, request_keys
from gpu_worker.sampling.presence_penalty import PresencePenalty
from gpu_worker.sampling.repetition_penalty import RepetitionPenalty
from gpu_worker.sampling.shortlist import Shortlister
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
            BadWords(device),
            MinTokens(num_slots, device),
            LogitBias(device),
            RepetitionPenalty(num_slots),
            FrequencyPenalty(num_slots),
            PresencePenalty(num_slots),
        ]
        self.temperature, self.min_p = Temperature(num_slots), MinP(num_slots)
        self.top_k, self.top_p = TopK(num_slots, vocab_size), TopP(num_slots)
        self.shapers: list[Component] = [self.temperature, self.min_p, self.top_k, self.top_p]
        self.shortlister = Shortlister(self.temperature, self.min_p, self.top_k, self.top_p)
        self.greedy = np.ones(num_slots, np.bool_)
        self.keys: Int64 = np.zeros(num_slots, np.int64)
        """What the noise of each slot is made from."""

    def add(self, request: SlotInit) -> None:
        """A request takes its slot."""
        params = request.params
        self.greedy[request.slot] = self._is_greedy(params)
        seed = zlib.crc32(request.rid.encode()) if params.seed is None else params.seed
        self.keys[request.slot] = int(request_keys(torch.tensor([seed]), torch.tensor([request.choice])))
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
        settled = self.shortlister.settle(logits, rows) if logits.device.type == "cpu" else []
        if not settled:
            return self._draw_from_all(logits, rows)
        tokens, left = rows.positions.new_empty(len(rows.slots)), np.ones(len(rows.slots), np.bool_)
        for short in settled:
            noise = gumbel_of(self._keys(rows.select(short.rows)), short.ids.int())
            best = short.logits.add_(noise).argmax(-1, keepdim=True)
            tokens[torch.from_numpy(short.rows)] = short.ids.gather(1, best)[:, 0]
            left[short.rows] = False
        if left.any():
            others = np.flatnonzero(left)
            chosen = torch.from_numpy(others)
            tokens[chosen] = self._draw_from_all(logits[chosen], rows.select(others))
        return tokens

    def _draw_from_all(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        for shaper in self.shapers:
            shaper.apply(logits, rows)
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        return argmax(logits.add_(gumbel_of(self._keys(rows), ids)))

    def _keys(self, rows: SampleRows) -> torch.Tensor:
        """[rows] int64: what the noise of each row is made from."""
        requests = torch.from_numpy(self.keys[rows.slots]).to(rows.positions.device)
        return keys_at(requests, rows.positions, Purpose.SAMPLE)

    def _is_greedy(self, params: SamplingParams) -> bool:
        """Also where only the most probable token can stay: its probability is at least 1 / vocab_size."""
        single = params.top_k == 1 or params.min_p >= 1.0 or params.top_p <= 1.0 / self.vocab_size
        return params.greedy or single
