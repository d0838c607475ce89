"""A request, and its choices as sequences: each has tokens, a place among the waiting or a slot on a worker."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from core_engine.block import Block
from core_engine.prefix_hash import root_digest
from shared.messages import FinishReason, Int32
from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from core_engine.beam_search import BeamSearch
    from core_engine.host_loads import Load
    from core_engine.host_memory import Swapped


class Exit(enum.Enum):
    """Why a running sequence leaves its slot. It does once no step that names it is in flight."""

    FINISH = "finish"
    ABORT = "abort"
    PREEMPT = "preempt"


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """What was asked for. One sequence for each of its ``params.n`` choices."""

    rid: str
    params: SamplingParams
    prompt: Int32
    """[prompt tokens], read-only."""
    order: int
    """Number of its arrival at this engine."""
    arrived_at: float
    """Seconds of the engine's clock; so are all times here."""
    stop_ids: frozenset[int]
    """Every id that ends it: the model's own ends unless ``params.ignore_eos``, and ``params.stop_token_ids``."""
    eos_ids: tuple[int, ...] = ()
    """The model's own ends."""
    priority: int = 0
    """Lower is served first and preempted last."""
    cache_salt: str = ""
    tenant: str = ""
    """On whose account it runs; "" is one as well."""
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    deadline: float = math.inf
    """When it ends, whatever it is waiting for."""
    search: BeamSearch | None = None
    """Computes its choices, which neither wait nor run themselves but for the prompt of the first one; None: each
    choice is sampled."""
    strikes: int = 0
    """Losses of a worker in a row that it was aboard."""
    strikes_alone: int = 0
    """Those in which nothing else was."""

    @property
    def num_seats(self) -> int:
        """Sequences that each of its choices that waits will run as, at most."""
        return 1 if self.search is None else self.search.width

    @property
    def finished(self) -> bool:
        return all(sequence.ended_at is not None for sequence in self.sequences)


class Sequence:
    """One choice of a request: ``num_computed`` chasing ``num_tokens`` under one rule, whatever the phase.

    While it runs, its numbers and tokens are row ``slot`` of its worker's ``SlotTable``; else ``tokens`` holds all of
    them: the prompt, then what was generated and settled.
    """

    __slots__ = (
        "blocks",
        "borrows",
        "cached_tokens",
        "choice",
        "context",
        "digests",
        "ended_at",
        "exit",
        "finish_reason",
        "first_token_at",
        "handle",
        "limit",
        "load",
        "num_generated",
        "num_hashed",
        "num_preemptions",
        "prompt_records",
        "request",
        "resting",
        "root",
        "scheduled_at",
        "slot",
        "stop_reason",
        "struck_at",
        "swapped",
        "tokens",
    )

    def __init__(self, request: Request, choice: int, generated: Int32, limit: int) -> None:
        self.request = request
        self.choice = choice
        self.tokens: Int32 = np.concatenate([request.prompt, generated]) if generated.size else request.prompt
        self.limit = limit
        """Tokens at most, prompt included."""
        self.slot: int | None = None
        self.exit: Exit | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        """The user's stop id that ended it."""
        self.blocks: list[Block] = []
        """The block table; only ever appended to while the sequence runs."""
        self.borrows = False
        """The last block of the table is another's to write into; it is copied before this one does."""
        self.swapped: Swapped | None = None
        """Copies of its blocks in host memory, while it waits or rests after a preemption."""
        self.load: Load | None = None
        """Blocks that it will start with, while it waits."""
        self.digests: list[bytes] = []
        """Chain hashes of its first full blocks, as far as they were needed. They outlive a preemption."""
        self.num_hashed = 0
        """Blocks of the table that were offered to the prefix map."""
        self.root = root_digest(request.cache_salt)
        self.cached_tokens: int | None = None
        """Prompt tokens that the prefix cache held when it was first scheduled; None: it was not yet."""
        self.num_generated = 0
        """Tokens beyond the prompt; known once it has ended."""
        self.num_preemptions = 0
        self.prompt_records: list[bytes] | None = [] if self._scores_prompt(generated) else None
        """Log-probability records of the prompt tokens from the second on, as far as they are settled; None: not
        asked for, or somebody has them already."""
        self.resting = False
        """Nobody renews it: it gives its slot back and does not wait for one."""
        self.struck_at = len(self.tokens)
        """Tokens that it had when a worker was last lost with a choice of its request, or when its turn as a suspect
        began."""
        self.handle = 0
        """What the front end calls the request at present."""
        self.context: Any = None
        """The front end's log of its output."""
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.request.rid}/{self.choice}, slot={self.slot}, exit={self.exit})"

    @property
    def arrival(self) -> tuple[int, int]:
        """Orders the sequences of an engine by arrival."""
        return self.request.order, self.choice

    @property
    def scoring(self) -> bool:
        """Its prompt has to be computed, whatever the cache holds: each position's logits are wanted."""
        return self.prompt_records is not None and len(self.tokens) == self.prompt_len

    @property
    def silent(self) -> bool:
        """No token is wanted: what is sampled after its prompt is discarded."""
        return self.request.params.max_tokens == 0

    @property
    def row_params(self) -> SamplingParams:
        """What its rows are sampled with."""
        search = self.request.search
        return self.request.params if search is None else search.row_params

    def _scores_prompt(self, generated: Int32) -> bool:
        """The records go with the first row of the first choice."""
        return self.request.params.prompt_logprobs is not None and self.choice == 0 and not generated.size

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    def end_of(self, token: int, length: int) -> tuple[FinishReason, int | None] | None:
        """Whether ``token``, the last of ``length`` tokens, ends the sequence; with the user's stop id that did.

        A stop token counts once ``min_tokens`` are generated; it wins over the length.
        """
        params = self.request.params
        if self.silent:
            return FinishReason.LENGTH, None
        if token in self.request.stop_ids and length - self.prompt_len >= params.min_tokens:
            is_eos = token in self.request.eos_ids and not params.ignore_eos
            return FinishReason.STOP, None if is_eos else token
        if length >= self.limit:
            return FinishReason.LENGTH, None
        return None


def stop_ids_of(params: SamplingParams, eos_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
