"""Beam search from Python: vLLM's parameters and outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.offline.errors import InvalidRequest
from headrace.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from headrace.sampling_params import SamplingParams
from shared import sampling
from shared.errors import RequestError


@dataclasses.dataclass
class BeamSearchParams:
    """How to search; names and order of the fields are vLLM's, ``early_stopping`` is transformers'.

    A hypothesis of L generated tokens scores its log-probability / L ** ``length_penalty``. ``temperature`` must be 0.
    ``include_stop_str_in_output``: the end-of-sequence token is among ``BeamSearchSequence.tokens``.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def sampling_params(self) -> SamplingParams:
        """What a request of the best ``beam_width`` hypotheses asks for beside the search.

        Raises:
            ValueError: names the field that is out of range.
        """
        is_width = isinstance(self.beam_width, int) and 1 <= self.beam_width <= sampling.MAX_BEAM_WIDTH
        width = self.beam_width if is_width else 1  # ``to_shared`` refuses others by their own name
        return SamplingParams(
            n=width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=min(2 * width, sampling.MAX_LOGPROBS),
            detokenize=False,
        )

    def to_shared(self, params: SamplingParams, vocab_size: int) -> sampling.SamplingParams:
        """``sampling_params()`` and the search as they are sent, checked.

        Raises:
            ValueError: names the field that is out of range.
        """
        wire = dataclasses.replace(
            params.to_shared(vocab_size),
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
        try:
            wire.validate(vocab_size)
        except RequestError as error:
            raise InvalidRequest(error.message, error.param) from None
        return wire


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """One of the best hypotheses."""

    tokens: list[int]
    """The prompt, then what was generated."""
    logprobs: list[PositionLogprobs]
    """One entry for each generated token, the end of sequence included."""
    cum_logprob: float = 0.0
    """Of all generated tokens."""
    text: str | None = None
    """Of ``tokens``; None without a tokenizer."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """The best ``beam_width`` hypotheses of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """A finished request as vLLM's beam search returns it, still without texts."""
    return BeamSearchOutput([_sequence(output.prompt_token_ids, each, params) for each in output.outputs])


def _sequence(prompt: list[int], choice: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
    has_end = choice.finish_reason == "stop" and not params.include_stop_str_in_output
    return BeamSearchSequence(
        tokens=prompt + (choice.token_ids[:-1] if has_end else choice.token_ids),
        logprobs=choice.logprobs or [],
        cum_logprob=choice.cumulative_logprob or 0.0,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
