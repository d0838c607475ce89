"""The sampler of kernels beside the sampler of the CPU, with the same slots and the same known tokens."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.cuda_sampler import CudaSampler, Variant, pack
from gpu_worker.sampling.logprobs import SampleLogprobs
from gpu_worker.sampling.sampler import Sampler
from shared.messages import SlotInit
from shared.sampling import SamplingParams

END = 2
LONGEST = 48
Record = tuple[int, bytes]


class State(NamedTuple):
    """As ``cuda_sampler.SlotState``."""

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    prompt_len: torch.Tensor


class Pair:
    """Both samplers; the known tokens of all slots are random, and all lengths differ."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, num_tokens: int | None = None) -> None:
        self.num_slots, self.device = num_slots, device
        self.kernels = CudaSampler(num_slots, vocab_size, num_tokens, device)
        self.cpu, self.cpu_logprobs = Sampler(num_slots, vocab_size, num_tokens), SampleLogprobs(num_slots)
        generator = torch.Generator().manual_seed(num_slots + vocab_size)
        rows = num_slots + 1
        lengths = torch.randint(12, LONGEST, (rows,), dtype=torch.int32, generator=generator)
        prompts = (lengths * torch.rand(rows, generator=generator)).int().clamp_min_(1)
        high = min(num_tokens or vocab_size, 150)
        ids = torch.randint(min(3, high - 1), high, (rows, LONGEST), dtype=torch.int32, generator=generator)
        lengths[-1] = 0
        self.state = State(ids, lengths, prompts)

    def add(self, slot: int, choice: int = 0, **params: Any) -> SlotInit:
        """A request takes the slot in both samplers."""
        request = make_request(slot, choice, **params)
        self.add_all([request])
        return request

    def add_all(self, requests: list[SlotInit]) -> None:
        self.kernels.add(requests)
        for request in requests:
            self.cpu.add(request)
            self.cpu_logprobs.add(request)

    def sample(
        self, logits: torch.Tensor, slots: list[int], variant: Variant | None = None
    ) -> tuple[list[int], list[Record]]:
        """Tokens and log-probabilities by the kernels; ``logits`` [rows, vocabulary] are unchanged."""
        host = np.array(slots)
        samples = self.kernels.sample(
            logits.clone().to(self.device),
            torch.from_numpy(host.astype(np.int32)).to(self.device),
            State(*(tensor.to(self.device) for tensor in self.state)),
            variant or self.kernels.variant_of(host),
        )
        records = []
        if samples.logprobs is not None:
            records = pack(samples.logprobs.cpu().numpy(), self.kernels.wanted_logprobs(host))
        return samples.tokens.tolist(), records

    def expected(self, logits: torch.Tensor, slots: list[int]) -> tuple[list[int], list[Record]]:
        """The same by the CPU's components."""
        host = np.array(slots)
        known, prompts = self.state.num_tokens[host].long(), self.state.prompt_len[host].long()
        rows = SampleRows(host, (known - prompts).numpy(), known, known.numpy(), self.state.token_ids)
        before = self.cpu_logprobs.before(logits, rows)
        tokens = self.cpu.sample(logits.clone(), rows)
        after = self.cpu_logprobs.after(before, tokens, rows)
        return tokens.tolist(), after.pack() if after else []


def make_request(slot: int, choice: int = 0, **params: Any) -> SlotInit:
    known = SamplingParams(**params)
    known.validate()
    return SlotInit(slot, f"request-{slot}", choice, 0, 0, 0, LONGEST, known, [END])


def make_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """[rows, vocab_size] float32."""
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def features(vocab_size: int, last: int, before: int, seed: int) -> dict[str, dict[str, Any]]:
    """Parameters that turn on one feature each, such that it matters.

    Args:
        last: the newest known token of the slot.
        before: the one before.
    """
    draw = random.Random(seed)
    ids = draw.sample(range(3, vocab_size), 60)
    return {
        "allowed": {"allowed_token_ids": ids},
        "bad_words": {
            "bad_words_token_ids": [
                [ids[0]],
                *([last, token] for token in range(3, 80)),
                [before, last, ids[1]],
                [9, 9, 8],
            ]
        },
        "min_tokens": {"min_tokens": 30, "max_tokens": 90, "stop_token_ids": ids[:40]},
        "bias": {"logit_bias": [(token, draw.uniform(-4.0, 8.0)) for token in ids[:9]]},
        "repetition": {"repetition_penalty": 1.7},
        "frequency": {"frequency_penalty": 1.1},
        "presence": {"presence_penalty": -1.6},
        "top_k": {"top_k": draw.choice([2, 7, 40])},
        "top_p": {"top_p": draw.choice([0.1, 0.6, 0.95])},
        "min_p": {"min_p": draw.choice([0.02, 0.2])},
        "logprobs": {"logprobs": draw.choice([0, 3, 20])},
    }
