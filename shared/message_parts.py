"""What messages are made of: the parts that several of them carry, and those that are long.

They are frozen and positional like the messages (``shared.messages``); a field is only ever appended, with a default.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from shared.sampling import SamplingParams

T = TypeVar("T")

MESSAGES: dict[int, type[Any]] = {}
"""By tag."""


@dataclass_transform(frozen_default=True)
def message(tag: int) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass and register it under its tag on the wire."""

    def register(cls: type[T]) -> type[T]:
        made = dataclasses.dataclass(frozen=True, slots=True, eq=False)(cls)
        if tag in MESSAGES:
            raise ValueError(f"tag {tag} is taken by {MESSAGES[tag].__name__}")
        MESSAGES[tag] = made
        return made

    return register


@dataclass_transform(frozen_default=True)
def part(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that is sent inside messages, as a positional list."""
    return dataclasses.dataclass(frozen=True, slots=True)(cls)


class Attempt(NamedTuple):
    """Which try of a request this is. ``newer`` orders them."""

    g: int
    """Raised by gateways at each re-submission."""
    uid: int
    """Random, unique for each opening at a gateway (63 bits)."""
    t: int
    """Raised by the tokenizer at each re-submission of its own."""

    def newer(self, other: Attempt) -> bool:
        return self.g > other.g or (self.g == other.g and self.uid == other.uid and self.t > other.t)


class FinishReason(enum.IntEnum):
    """Why a choice ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@part
class ErrorInfo:
    """An error for the client: which kind (``shared.errors.ErrorCode`` value), the words, and the field it is about."""

    code: int
    message: str
    param: str | None = None


@part
class End:
    """The last row of a choice."""

    reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end of sequence."""
    error: ErrorInfo | None = None
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when the request was first scheduled."""
    prompt_tokens: int = 0
    """Length of the prompt; 0: not known to who ended it."""


@part
class PromptInfo:
    """What a request asked to be told about its prompt; it travels with the first row of a choice.

    An engine gives ``records`` only, a tokenizer gives all that was asked for.
    """

    records: list[bytes] = dataclasses.field(default_factory=list)
    """One log-probability record for each prompt token but the first (``shared.logprobs``); empty: not asked for."""
    ids: bytes = b""
    """The prompt's token ids, raw int32."""
    text: str = ""
    """The prompt as text, to be echoed."""
    first: bytes = b""
    """Text bytes of the first prompt token, which has no record."""


@part
class Known:
    """What the client has of a choice: the number of token rows and a digest over their ids (``shared.hop.digest``)."""

    count: int
    digest: bytes


@part
class TextSpec:
    """A request as the gateway gives it to a tokenizer. Exactly one of ``text``, ``ids`` and ``chat`` is set."""

    params: SamplingParams
    text: str | None = None
    ids: bytes | None = None
    """Prompt token ids, raw int32."""
    chat: bytes | None = None
    """JSON object: ``messages``, and optionally ``tools``, ``add_generation_prompt``, ``continue_final_message``,
    ``chat_template_kwargs``."""
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    resumable: bool = False
    deadline_s: float | None = None
    """Remaining time, in seconds; None: no limit."""
    tenant: str = ""
    echo: bool = False
    """The prompt's text and ids come back with the first row of each choice (``PromptInfo``)."""
    clamp_max_tokens: bool = False
    """A ``max_tokens`` beyond the end of the context means up to that end; else it is refused."""


@part
class TokenSpec:
    """A request as the tokenizer gives it to an engine."""

    params: SamplingParams
    prompt: bytes
    """Prompt token ids, raw int32."""
    priority: int = 0
    cache_salt: str = ""
    resumable: bool = False
    deadline_s: float | None = None
    tenant: str = ""


@part
class ModelCard:
    """What a model serves with; peers whose cards differ refuse each other."""

    model: str
    """Path or name as resolved; for people."""
    digest: str
    """Over the model's configuration and vocabulary (``shared.model_config``)."""
    vocab_size: int
    """Width of the logits: ids are valid in 0..vocab_size-1."""
    max_model_len: int
    sampling_defaults: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    """(request field, value) for fields that a request leaves out, from the model's generation_config; only a
    tokenizer's card has them, and cards may differ in them."""


@part
class WorkerConfig:
    """All that a worker needs to know; the engine owns it and hands it out."""

    model: str
    """Local path: a folder or a .gguf file."""
    dtype: str
    max_model_len: int
    block_size: int
    num_slots: int
    """Request slots, spares included; the padding slot is the worker's own, beyond these."""
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    """Size of the KV pool; None: measured on a GPU, 1 GiB on a CPU."""
    num_blocks_override: int | None
    seed: int
    batch_invariant: bool
    enforce_eager: bool
    load_format: str = "auto"
    """``auto`` or ``dummy`` (random weights)."""
    rank: int = 0
    world_size: int = 1
    num_token_ids: int | None = None
    """Ids from here on have no token in the tokenizer and are never sampled; None: all ids of the logits have one."""
    kv_cache_dtype: str = "auto"
    """One of ``shared.setting_checks.KV_CACHE_DTYPES``; auto: the model's."""
    host_bytes: int = 0
    """Size of the KV pool in host memory."""


class Epoch(NamedTuple):
    """A life of the link between an engine and a worker."""

    boot: int
    counter: int


@part
class SlotInit:
    """A request that takes a slot. Its ids are in ``Step.new_tokens``: all known ones, the cached part included."""

    slot: int
    rid: str
    choice: int
    num_tokens: int
    prompt_len: int
    """Tokens before this are the prompt; the rest was generated earlier."""
    start: int
    """Tokens whose KV is already in the given blocks (prefix hit)."""
    limit: int
    """The device never writes a token at or beyond this position."""
    params: SamplingParams
    eos_ids: list[int]
    """Ids that end the text unless ``params.ignore_eos``."""


@part
class AckEntry:
    """A cumulative acknowledgement that also renews the lease."""

    rid: str
    attempt: Attempt
    handle: int
    have: list[int]
    """[n] rows held of each choice; ``shared.messages.FINISHED``: all that is wanted."""
    resync: bool = False
    """Send again from ``have``."""
    beat: bool = False
    """Answer with Held."""
