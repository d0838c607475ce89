"""Every message that crosses a process border.

Messages are frozen, typed and positional. A field is only ever appended, with a default, so that an older peer can
read what a newer one sends. Arrays travel as raw little-endian int32 frames behind the msgpack header, in the order in
which a class names them in ``ARRAYS``; the number beside the name is the count of columns (0: one-dimensional).

A *hop* is a parent (gateway, or the lower side of a tokenizer) and a child (the upper side of a tokenizer, or an
engine). Each (request, choice) output is an append-only log of rows: one row per token, then one END row. A row's
offset counts both kinds. ``docs/protocol.md`` states the rules.

*Handle*: an int32 that the parent draws for each Submit, unique within the parent's boot. It stands for (request id,
attempt) on that link, so a delta that names a live handle matches the live attempt exactly.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.message_parts import (
    MESSAGES,
    AckEntry,
    Attempt,
    End,
    Epoch,
    ErrorInfo,
    FinishReason,
    Known,
    ModelCard,
    PromptInfo,
    SlotInit,
    TextSpec,
    TokenSpec,
    WorkerConfig,
    message,
)

__all__ = [
    "FINISHED",
    "MESSAGES",
    "OLDEST_PROTOCOL",
    "PROTOCOL_VERSION",
    "Abort",
    "Ack",
    "AckEntry",
    "AckRows",
    "Attempt",
    "Detokenize",
    "Detokenized",
    "Dismissed",
    "End",
    "Epoch",
    "ErrorInfo",
    "FinishReason",
    "Go",
    "Gone",
    "Held",
    "Hello",
    "Init",
    "Int32",
    "Known",
    "Load",
    "Message",
    "ModelCard",
    "PrefixCacheReset",
    "PromptInfo",
    "Ready",
    "ResetPrefixCache",
    "SlotInit",
    "Step",
    "StepResult",
    "Submit",
    "TextDelta",
    "TextSpec",
    "TokenDelta",
    "TokenSpec",
    "Tokenize",
    "Tokenized",
    "Turn",
    "WorkerConfig",
    "WorkerFailed",
]

PROTOCOL_VERSION = 3  # 1: without a checksum; 2: without transfers
OLDEST_PROTOCOL = 2
FINISHED = 2**31 - 1
"""``have`` of an acknowledgement: nobody needs more of this choice."""

Int32: TypeAlias = npt.NDArray[np.int32]


# -- hop: down (parent to child) -------------------------------------------------------------------------------------


@message(1)
class Submit:
    """Ask a child to produce, or to go on producing, a request."""

    rid: str
    attempt: Attempt
    handle: int
    spec: TextSpec | TokenSpec
    counts: Int32
    """[n] token rows given for each choice."""
    tokens: Int32
    """[sum(counts)] their ids, choice after choice."""
    ends: list[End | None]
    """[n] the END row of each choice that has one."""
    known: list[Known]
    """[n] what the client has."""
    suspect: bool = False

    ARRAYS: ClassVar[dict[str, int]] = {"counts": 0, "tokens": 0}


@message(2)
class Ack:
    entries: list[AckEntry]


@message(3)
class AckRows:
    """The compact form of Ack for single choices, by handle: no lease is answered and unknown handles are ignored."""

    rows: Int32
    """[k, 3] handle, choice, have."""

    ARRAYS: ClassVar[dict[str, int]] = {"rows": 3}


@message(4)
class Abort:
    """End a request; acts on its own or a lower attempt."""

    rid: str
    attempt: Attempt


@message(5)
class Go:
    """Answer to Turn: the suspect may start."""

    rid: str
    attempt: Attempt


# -- hop: up (child to parent) ---------------------------------------------------------------------------------------


@message(16)
class Held:
    """Answers Submit and every beat."""

    rows: Int32
    """[k, 4] handle, accepted (0 or 1: the engine took it), prompt tokens (0 while not accepted), how many of them the
    prefix cache held (0 until it is scheduled)."""

    ARRAYS: ClassVar[dict[str, int]] = {"rows": 4}


@message(17)
class Gone:
    """``live`` None: unknown here, submit again; else superseded by that attempt."""

    rid: str
    attempt: Attempt
    handle: int
    live: Attempt | None


@message(18)
class Turn:
    """A suspect's turn to run alone; it starts at Go."""

    rid: str
    attempt: Attempt
    handle: int


@message(19)
class TokenDelta:
    """One per step and peer, engine to tokenizer."""

    rows: Int32
    """[k, 4] handle, choice, start offset, token rows (the END row, if any, comes after them)."""
    tokens: Int32
    """[sum of token rows], entry after entry."""
    ends: list[tuple[int, End]]
    """(index into ``rows``, END row)."""
    logprobs: list[tuple[int, list[bytes]]] = dataclasses.field(default_factory=list)
    """(index into ``rows``, a log-probability record for each of its token rows); only where they were asked for."""
    prompts: list[tuple[int, PromptInfo]] = dataclasses.field(default_factory=list)
    """(index into ``rows``, what was asked about the prompt), for entries that start at offset 0."""

    ARRAYS: ClassVar[dict[str, int]] = {"rows": 4, "tokens": 0}


@message(20)
class TextDelta:
    """One per step and peer, tokenizer to gateway."""

    rows: Int32
    """[k, 4] handle, choice, start offset, token rows."""
    tokens: Int32
    """[sum of token rows]."""
    pieces: list[str]
    """[sum of token rows] the text that each token row releases."""
    ends: list[tuple[int, End, str]]
    """(index into ``rows``, END row, the last text)."""
    logprobs: list[tuple[int, list[bytes]]] = dataclasses.field(default_factory=list)
    """As in ``TokenDelta``, but records with the text of their tokens."""
    prompts: list[tuple[int, PromptInfo]] = dataclasses.field(default_factory=list)

    ARRAYS: ClassVar[dict[str, int]] = {"rows": 4, "tokens": 0}


@message(21)
class Load:
    """The state and the counters of one process, cumulative since its boot; a later one replaces an earlier one."""

    source: str
    """``engine/<name>``, ``tokenizer/<name>``, ..."""
    boot: int
    running: int
    waiting: int
    kv_usage: float
    """0 to 1."""
    metrics: list[tuple[str, dict[str, str], float]] = dataclasses.field(default_factory=list)
    """(scraped sample name, extra labels, value): counters and histogram samples as they are exposed."""
    stalled_s: float = 0.0
    """An engine: seconds in which no step was settled although a ready worker had work; 0 when idle."""


# -- calls that are not requests (gateway to tokenizer; lost ones are asked again) -----------------------


@message(48)
class Tokenize:
    call: int
    spec: TextSpec
    """``text`` or ``chat``; its ``params`` are not looked at."""
    want_strings: bool = False


@message(49)
class Tokenized:
    call: int
    tokens: Int32
    strings: list[str]
    """The token of each id in the vocabulary's spelling; empty unless wanted."""
    error: ErrorInfo | None = None

    ARRAYS: ClassVar[dict[str, int]] = {"tokens": 0}


@message(50)
class Detokenize:
    call: int
    tokens: Int32

    ARRAYS: ClassVar[dict[str, int]] = {"tokens": 0}


@message(51)
class Detokenized:
    call: int
    text: str
    error: ErrorInfo | None = None


@message(52)
class ResetPrefixCache:
    call: int
    """The tokenizer passes it on to all engines."""


@message(53)
class PrefixCacheReset:
    """No prefix that was cached before is found: free KV blocks that only cached, and those that requests hold."""

    call: int
    num_forgotten: int
    num_held: int
    error: ErrorInfo | None = None
    num_host: int = 0
    """Copies in host memory."""


# -- links -----------------------------------------------------------------------------------------------------------


@message(32)
class Hello:
    """Sent by the connecting side at once and every beat, and answered with the other side's own."""

    role: str
    name: str
    oldest_protocol: int
    protocol: int
    ready: bool
    card: ModelCard | None
    """None while unknown."""
    refusal: str | None = None
    """Why the sender will not work with the receiver, in words; None: it will."""
    status: str = ""
    """What it is doing, in words, while not ready."""
    leaving: bool = False
    """A worker: it was asked to stop and does so once dismissed."""


@message(33)
class Init:
    """Engine to worker: begin an epoch with empty slots. Repeated until Ready; the same epoch clears nothing."""

    epoch: Epoch
    config: WorkerConfig


@message(34)
class Ready:
    """Worker to engine, on the steps link."""

    epoch: Epoch
    num_blocks: int
    """Blocks of the pool, the null block 0 included."""
    block_bytes: int
    device: str
    dtype: str
    error: str | None = None
    """Why it can never be ready (a missing tensor, an unknown architecture); the engine reports it and gives up."""
    num_host_blocks: int = 0
    """Blocks of the pool in host memory."""
    transfer_rates: tuple[float, float] = (0.0, 0.0)
    """Bytes per second from the device to that pool and back, as measured at the start; 0: there is none."""


@message(35)
class Step:
    """One step of one worker. Forward rows are the prefill rows, then the decode rows."""

    epoch: Epoch
    number: int
    """Consecutive from 1 in each epoch; a gap ends the epoch."""
    new: list[SlotInit]
    new_tokens: Int32
    """[sum of num_tokens] ids of the new slots, one after another."""
    prefill: Int32
    """[p, 3] slot, start position, count: tokens known to the slot."""
    decode: Int32
    """[d] slots: one token each, the last of the slot, at the device's own position."""
    sample: Int32
    """[s, 2] forward row, slot that takes the sampled token."""
    blocks: Int32
    """[b, 2] slot, block: appended to the slot's table, in order."""
    released: Int32
    """[r] slots that are free after all earlier steps."""
    copies: Int32
    """[c, 2] source block, destination block: before the forward."""
    transfers: Int32 = dataclasses.field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[t, 3] direction (0: to the host, 1: to the device), block of the device, block of the host. They wait for no
    step and no step waits for them: what they read was written by settled steps, what they write is in no step until
    they are reported complete, and what one writes no other one touches."""

    ARRAYS: ClassVar[dict[str, int]] = {
        "new_tokens": 0,
        "prefill": 3,
        "decode": 0,
        "sample": 2,
        "blocks": 2,
        "released": 0,
        "copies": 2,
        "transfers": 3,
    }


@message(36)
class StepResult:
    """Worker to engine, on the results link, in order."""

    epoch: Epoch
    number: int
    tokens: Int32
    """Sampled ids, in the order of ``Step.sample``; with ``counts``, that many for each sample row."""
    counts: Int32
    """[s] or empty: one token for each sample row."""
    logprobs: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    """(sample row, log-probability record of its token), in order, for each row that asked for one."""
    compute_s: float = 0.0
    """Time the step took on the worker."""
    prompt_logprobs: list[tuple[int, list[bytes]]] = dataclasses.field(default_factory=list)
    """(prefill row, records), in order, for each row that asked for them: of the prompt tokens at start + 1 to
    start + count, as far as the prompt goes."""
    idle_s: float = 0.0
    """Time for which the device had nothing to compute between the step before and this one, as far as it is known."""
    transferred: int = 0
    """The transfers of all steps up to this one are complete. Only the result of a step without rows waits for them,
    but no longer than until a step with rows comes after it."""

    ARRAYS: ClassVar[dict[str, int]] = {"tokens": 0, "counts": 0}


@message(37)
class WorkerFailed:
    """The worker cannot go on in this epoch: a gap, a broken frame, an exception in a step."""

    epoch: Epoch
    number: int
    reason: str
    on_the_way: bool = False
    """A message was lost or damaged on its way: no request is to blame."""


@message(38)
class Dismissed:
    """Engine to a leaving worker: nothing is left to compute in this epoch; end."""

    epoch: Epoch


Message: TypeAlias = (
    Submit
    | Ack
    | AckRows
    | Abort
    | Go
    | Held
    | Gone
    | Turn
    | TokenDelta
    | TextDelta
    | Load
    | Hello
    | Init
    | Ready
    | Step
    | StepResult
    | WorkerFailed
    | Dismissed
    | Tokenize
    | Tokenized
    | Detokenize
    | Detokenized
    | ResetPrefixCache
    | PrefixCacheReset
)
