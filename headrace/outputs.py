"""What ``LLM`` returns: vLLM's names, so that a script that reads them needs no change."""

from __future__ import annotations

import dataclasses
from typing import Any

PositionLogprobs = dict[int, "Logprob"]
"""Token id to log-probability at one position: first the token itself, then the most probable ones, best first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position."""

    logprob: float
    """Natural logarithm of the softmax of the model's own logits, before any sampling parameter."""
    rank: int | None = None
    """1 is the most probable token of the vocabulary."""
    decoded_token: str | None = None
    """The token as text; None without a tokenizer, or for an id that has no token."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of ``token_ids``; None unless ``SamplingParams.logprobs`` is set."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry for each of ``token_ids``; None unless ``SamplingParams.logprobs`` is set."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while it goes on."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end of sequence."""
    lora_request: Any = None
    delta: str = ""
    """While streaming: the text since the output before this one."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds since 1970, None for what has not happened."""

    arrival_time: float
    """When it was handed to the engine's processes, or queued to be."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    """The prompt as text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    """Empty while streaming, until the first token is there."""
    prompt_logprobs: list[PositionLogprobs | None] | None
    """One entry for each prompt token, None for the first; None unless ``SamplingParams.prompt_logprobs`` is set."""
    outputs: list[CompletionOutput]
    """In the order of their indices; with ``best_of``, best first."""
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache held; None until a choice ended."""
    lora_request: Any = None
