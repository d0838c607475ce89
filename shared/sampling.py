"""Sampling parameters: what a request may ask of the sampler, and the ranges that are checked before any work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from shared.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 8192
"""A step that takes in a thousand requests with this many ids each is still a message of 40 MB."""
MAX_REPETITION_PENALTY = 10.0
"""Far beyond use: 1.5 is strong, and 10 sets whatever was seen apart for good. A bound keeps logits finite."""
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 10.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64
MAX_SEED = 2**63 - 1
GREEDY_BELOW = 1e-4
"""A temperature at or below this is greedy: the division would overflow half precision and change nothing else."""


_WITHOUT_BEAMS: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ([],),
    "allowed_token_ids": (None,),
    "bad_words": ([],),
    "bad_words_token_ids": ([],),
    "stop": ([],),
}
"""Fields that beam search refuses, and their values that change nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Names and defaults are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` None: the gateway
    draws one, so that a restart does not redraw. ``max_tokens`` None: up to the context's end.
    ``repetition_penalty`` 1, ``presence_penalty`` and ``frequency_penalty`` 0, ``logit_bias`` [] and
    ``allowed_token_ids`` None are off. ``max_tokens`` 0 samples nothing: the prompt is scored, or echoed, only.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = dataclasses.field(default_factory=list)
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """(token id, what is added to its logit), each id once."""
    allowed_token_ids: list[int] | None = None
    """No other ids are sampled."""
    bad_words: list[str] = dataclasses.field(default_factory=list)
    """Words that are never completed; the tokenizer turns them into ``bad_words_token_ids``."""
    bad_words_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    """Sequences of ids that are never completed: the last id is not sampled after all the others."""
    logprobs: int | None = None
    """How many of the most probable tokens to report at each position, beside the sampled one; None: report none."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1: as many as the context holds."""

    beam_width: int | None = None
    """Search with so many beams, and return the best ``n`` of what they find, best first; None: no beam search."""
    length_penalty: float = 1.0
    """A hypothesis of beam search is scored by its log-probability over its length to the power of this."""
    early_stopping: bool | str = False
    """When beam search ends, as in transformers: True with ``beam_width`` hypotheses, False once no beam is likely to
    become better, "never" once none can."""

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW

    def validate(self, vocab_size: int | None = None) -> None:
        """Check every range; ``vocab_size`` bounds token ids when it is known.

        Raises:
            RequestError: names the first field that is out of range.
        """
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 100.0)
        if _number("top_p", self.top_p, 0.0, 1.0) == 0.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} must not exceed max_tokens {self.max_tokens}", "min_tokens"
            )
        self._validate_stops(vocab_size)
        self._validate_penalties()
        self._validate_biases(vocab_size)
        self._validate_bad_words(vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if (wanted := getattr(self, name)) is not None:
                _integer(name, wanted, 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
            if self.truncate_prompt_tokens == 0:
                raise RequestError("truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens")
        self._validate_beam_search()

    def _validate_beam_search(self) -> None:
        """Beams are the most probable ones by the model's own logits: nothing may change or draw from these."""
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}', "early_stopping"
            )
        if self.beam_width is None:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise RequestError(f"{name} needs beam search", name)
            return
        _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.n > self.beam_width:
            raise RequestError(f"n {self.n} must not exceed beam_width {self.beam_width}", "n")
        if self.max_tokens == 0:
            raise RequestError("max_tokens must be at least 1 with beam search", "max_tokens")
        for name, neutrals in _WITHOUT_BEAMS.items():
            if getattr(self, name) not in neutrals:
                raise RequestError(f"{name} cannot be used with beam search; leave it out", name)
        if not self.greedy:
            raise RequestError(f"temperature must be 0 with beam search, got {self.temperature:g}", "temperature")

    def _validate_bad_words(self, vocab_size: int | None) -> None:
        check_count(len(self.bad_words), MAX_BAD_WORDS, "bad_words")
        if any(not isinstance(word, str) or not word.strip() for word in self.bad_words):
            raise RequestError("bad_words must hold strings that are not blank", "bad_words")
        for ids in self.bad_words_token_ids:
            if not ids:
                raise RequestError("bad_words_token_ids must not hold an empty list", "bad_words_token_ids")
            check_count(len(ids), MAX_BAD_WORD_TOKENS, "bad_words_token_ids")
            check_token_ids(ids, vocab_size, "bad_words_token_ids")

    def _validate_stops(self, vocab_size: int | None) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
        if any(not isinstance(text, str) for text in self.stop):
            raise RequestError("stop must hold strings", "stop")
        if any(not text for text in self.stop):
            raise RequestError("stop must not contain an empty string", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids holds more than {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")

    def _validate_penalties(self) -> None:
        if _number("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY) == 0.0:
            raise RequestError(
                f"repetition_penalty must be in (0, {MAX_REPETITION_PENALTY:g}], got {self.repetition_penalty}",
                "repetition_penalty",
            )
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _validate_biases(self, vocab_size: int | None) -> None:
        check_count(len(self.logit_bias), MAX_LOGIT_BIAS, "logit_bias")
        bound = 2**31 if vocab_size is None else vocab_size
        seen = set()
        for token, bias in self.logit_bias:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < bound:
                raise RequestError(f"logit_bias key {token!r} is not a token id in 0..{bound - 1}", "logit_bias")
            if token in seen:
                raise RequestError(f"logit_bias holds token id {token} twice", "logit_bias")
            seen.add(token)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0, "logit_bias")
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty; leave it out to allow all", "allowed_token_ids")
        check_count(len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids")
        check_token_ids(self.allowed_token_ids, vocab_size, "allowed_token_ids")


def check_count(count: int, limit: int, param: str) -> None:
    """Refuse more than ``limit`` entries.

    Raises:
        RequestError: with both numbers.
    """
    if count > limit:
        raise RequestError(f"{param} holds {count} entries; at most {limit} are allowed", param)


def check_token_ids(ids: Sequence[object], vocab_size: int | None, param: str) -> None:
    """Refuse ids that are not integers in 0..vocab_size-1.

    Raises:
        RequestError: with the first bad id and its index.
    """
    bound = 2**31 if vocab_size is None else vocab_size
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < bound:
            raise RequestError(f"{param}[{index}] = {value!r} is not a token id in 0..{bound - 1}", param)


def _number(name: str, value: object, low: float, high: float, param: str | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param or name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low:g}, {high:g}], got {value}", param or name)
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", name)
    return value
