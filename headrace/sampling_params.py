"""``SamplingParams`` as vLLM's scripts construct it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.offline.errors import InvalidRequest
from shared import sampling
from shared.errors import RequestError

MAX_TOKENS = 16


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """All that there is so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """Nothing is yielded before the end."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "flat_logprobs": (False,),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "skip_reading_prefix_cache": (None, False),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
}
"""Fields that would change the answer and are not supported, and their values that change nothing."""


@dataclasses.dataclass
class SamplingParams:
    """How to choose tokens; names, defaults and order of the fields are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 are off. ``max_tokens`` None: up to
    the end of the context, where any ``max_tokens`` ends, too. ``stop`` is a text or a list of texts. ``logprobs`` and
    ``prompt_logprobs``: how many of the most probable tokens to report at each position, 0 to 20; None: report
    nothing. ``best_of`` > ``n``: that many choices are made, and the ``n`` with the highest log-probability per token
    are returned, best first. ``truncate_prompt_tokens`` keeps that many of the prompt's last tokens, -1 as many as the
    context holds. ``max_tokens`` 0 together with ``prompt_logprobs`` only scores the prompt.

    Raises:
        ValueError: names the field that is out of range or not supported.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = MAX_TOKENS
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    best_of: int | None = None
    logits_processors: list[Any] | None = None
    guided_decoding: Any = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        wire = self.to_shared()
        self.stop, self.stop_token_ids, self.bad_words = wire.stop, wire.stop_token_ids, wire.bad_words

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """The same, with None standing for a field's default (but for ``max_tokens``, where None is a value)."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        return cls(**given)

    def clone(self) -> SamplingParams:
        """An independent copy."""
        return copy.deepcopy(self)

    @property
    def num_choices(self) -> int:
        """Choices that are made: ``best_of``, or ``n``."""
        return self.best_of or self.n

    def to_shared(self, vocab_size: int | None = None) -> sampling.SamplingParams:
        """These parameters as they are sent, checked; ``vocab_size`` bounds token ids when it is known.

        Raises:
            ValueError: as the constructor.
        """
        try:
            return self._to_shared(vocab_size)
        except RequestError as error:
            raise InvalidRequest(error.message, error.param) from None

    def _to_shared(self, vocab_size: int | None) -> sampling.SamplingParams:
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise RequestError(f"{name} is not supported; leave it out or give {neutral[0]!r}", name)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}", name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}", "output_kind")
        stop = _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        if stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True: stop strings are looked for in the text", "stop")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1 unless prompt_logprobs is set", "max_tokens")
        params = sampling.SamplingParams(
            **{name: getattr(self, name) for name in _PLAIN},
            n=self._checked_choices(),
            stop=stop,
            stop_token_ids=_sequence("stop_token_ids", self.stop_token_ids),
            logit_bias=_biases(self.logit_bias),
            allowed_token_ids=None
            if self.allowed_token_ids is None
            else _sequence("allowed_token_ids", self.allowed_token_ids),
            bad_words=_strings("bad_words", self.bad_words),
            logprobs=0 if self.logprobs is None and self.num_choices > self.n else self.logprobs,
        )
        params.validate(vocab_size)
        return params

    def _checked_choices(self) -> int:
        if self.best_of is None:
            return self.n
        for name, low in (("n", 1), ("best_of", self.n)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise RequestError(f"{name} must be an integer of at least {low}, got {value!r}", name)
        if self.best_of > sampling.MAX_CHOICES:
            raise RequestError(f"best_of must be at most {sampling.MAX_CHOICES}, got {self.best_of}", "best_of")
        return self.best_of


_PLAIN = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("ignore_eos", "max_tokens", "min_tokens", "prompt_logprobs", "skip_special_tokens"),
    *("include_stop_str_in_output", "truncate_prompt_tokens"),
)
"""Fields that are sent as they are."""
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


def _sequence(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | set | frozenset):
        raise RequestError(f"{name} must be a list, got {value!r}", name)
    return list(value)


def _strings(name: str, value: Any) -> list[str]:
    strings = _sequence(name, value)
    if not all(isinstance(item, str) for item in strings):
        raise RequestError(f"{name} must hold strings", name)
    return strings


def _biases(value: Any) -> list[tuple[int, float]]:
    """vLLM takes ids as numbers and as decimal texts, and clamps a bias to [-100, 100]."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must be a dict from token ids to numbers, got {value!r}", "logit_bias")
    biases = []
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or math.isnan(bias):
            raise RequestError(f"logit_bias[{key!r}] must be a number, got {bias!r}", "logit_bias")
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        biases.append((token, min(100.0, max(-100.0, float(bias)))))
    return biases
