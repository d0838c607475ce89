"""Beam search: a request whose choices are what a search over several sequences, the *beams*, found best.

The first choice of the request waits, is admitted and computes the prompt like any other. From then on there are beams,
sequences of the engine's own:

    step settled       each row of the search came with the most probable tokens (its log-probability record)
    ``advance``        ``BeamScores`` chooses the next beams; each shares all blocks of its parent by reference, then
                       the parents leave their slots
    next ``plan``      ``place`` gives the beams slots; they get blocks to write into: a partial last block that is
                       shared is copied. Each is a prefill row of one token, its last

So no step of a search is planned before its last one is settled, all beams are in the same step, and a worker need not
know that there is a search. Nothing is delivered before the end. A search that is preempted, or whose worker is lost,
begins again with the prompt.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from core_engine.beam_scores import BeamScores, Continuation, Hypothesis
from core_engine.request import Exit, Request, Sequence
from shared.errors import RequestError
from shared.logprobs import pack_records
from shared.messages import FinishReason
from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from core_engine.replica import Replica

MOST_RECORDED = 32
"""Most probable tokens that a worker reports of a row."""


@dataclasses.dataclass(slots=True, eq=False)
class Beam:
    """One of the sequences that a search goes on with."""

    sequence: Sequence
    logprob: float
    """Cumulative, of the generated tokens."""
    records: list[bytes]
    """Log-probability records of the generated tokens, if the request asked for them."""
    found: bytes = b""
    """The record of its settled row: the most probable tokens after it; b"": not settled."""


class Found(NamedTuple):
    """One of the best hypotheses."""

    ids: list[int]
    """Generated."""
    records: list[bytes]
    """Their log-probability records, if the request asked for them."""
    reason: FinishReason
    stop_reason: int | None


class BeamSearch:
    """The beams of one request, and what they found.

    Raises:
        RequestError: it cannot be searched for.
    """

    def __init__(self, request: Request, leader: Sequence) -> None:
        params = request.params
        assert params.beam_width is not None
        self.request = request
        self.leader = leader
        """The first choice."""
        self.width = params.beam_width
        self.row_params = SamplingParams(
            temperature=0.0, max_tokens=None, logprobs=num_recorded(request), prompt_logprobs=params.prompt_logprobs
        )
        """What every row is sampled with; the greedy token is not looked at."""
        self.beams: list[Beam] = []
        self.replica: Replica | None = None
        """Where the beams are; None: the leader waits, rests or computes the prompt, or the search is over."""
        self.is_pending = False
        """The beams hold blocks, but no slots."""
        self.is_over = False
        """Done, or nobody wants it any more."""
        self.struck_at = len(leader.tokens)
        """Tokens of its longest beam when a worker was lost with it, at most."""
        self._scores: BeamScores[Beam] | None = None

    @property
    def is_leaving(self) -> bool:
        return any(sequence.exit is not None for sequence in self.live)

    @property
    def live(self) -> list[Sequence]:
        """The sequences that get on."""
        return [beam.sequence for beam in self.beams] if self.replica is not None else [self.leader]

    def place(self) -> list[Sequence]:
        """Give the beams slots; returns them. All but the last token of each is computed."""
        assert self.replica is not None
        self.is_pending = False
        for beam in self.beams:
            self.replica.slots.enter(beam.sequence, len(beam.sequence.tokens) - 1, 0)
        return [beam.sequence for beam in self.beams]

    # -- settled steps ---------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence, record: bytes) -> None:
        """The row of a sequence of the search was settled."""
        if self.replica is None:
            self.beams = [Beam(sequence, 0.0, [])]
        next(beam for beam in self.beams if beam.sequence is sequence).found = record

    def advance(self, replica: Replica) -> list[Found] | None:
        """All rows of the last step are settled: choose the next beams.

        Returns:
            The best of what was found, in order, when the search is over; it has left the replica.
        """
        if self.replica is None:
            self._begin(replica)
        assert self._scores is not None
        parents = self.beams
        length = len(parents[0].sequence.tokens) - self.leader.prompt_len + 1
        going = self._scores.advance([(beam, beam.logprob, _top(beam.found)) for beam in parents], length)
        self.beams = [self._child(replica, each) for each in going]
        self.is_pending = bool(going)
        for beam in parents:
            replica.retire(beam.sequence)
        if going:
            return None
        self.is_over = True
        self._leave()
        return [self._result(each) for each in self._scores.finished[: self.request.params.n]]

    def _begin(self, replica: Replica) -> None:
        params = self.request.params
        self.replica = replica
        self._scores = BeamScores(
            self.width,
            self.request.stop_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            most_tokens=self.leader.limit - self.leader.prompt_len,
            min_tokens=params.min_tokens,
        )

    def _child(self, replica: Replica, continuation: Continuation[Beam]) -> Beam:
        parent, leader = continuation.parent, self.leader
        sequence = Sequence(self.request, 0, np.array([continuation.token], np.int32), leader.limit)
        sequence.tokens = np.append(parent.sequence.tokens, sequence.tokens[-1:])
        sequence.scheduled_at, sequence.first_token_at = leader.scheduled_at, leader.first_token_at
        replica.kv.share(parent.sequence, sequence, len(parent.sequence.tokens))
        return Beam(sequence, continuation.logprob, self._records(continuation))

    def _records(self, continuation: Continuation[Beam]) -> list[bytes]:
        most = self.request.params.logprobs
        if most is None:
            return []
        parent = continuation.parent
        return [*parent.records, _record_of(continuation.token, parent.found, most)]

    def _result(self, hypothesis: Hypothesis[Beam]) -> Found:
        last, request = hypothesis.last, self.request
        ids = [*last.parent.sequence.tokens[self.leader.prompt_len :].tolist(), last.token]
        records = self._records(last)
        if not hypothesis.stopped:
            return Found(ids, records, FinishReason.LENGTH, None)
        is_eos = last.token in request.eos_ids and not request.params.ignore_eos
        return Found(ids, records, FinishReason.STOP, None if is_eos else last.token)

    # -- the ways out ----------------------------------------------------------------------------------------------

    def request_exit(self, exit: Exit) -> None:
        """Let all beams go: those that are in a step once it is settled."""
        replica = self.replica
        assert replica is not None, "the search does not run"
        if self.is_pending:
            for beam in self.beams:
                replica.kv.release(beam.sequence)
            self.beams = []
            self.is_pending = False
            self._gone(exit)
            return
        for beam in list(self.beams):
            replica.exit_slot(beam.sequence, exit)

    def left(self, sequence: Sequence, exit: Exit) -> None:
        """A beam has given back its slot and its blocks."""
        self.beams = [beam for beam in self.beams if beam.sequence is not sequence]
        if not self.beams:
            self._gone(exit)

    def _gone(self, exit: Exit) -> None:
        replica = self._leave()
        if exit is not Exit.PREEMPT:
            self.is_over = True
            return
        self.leader.num_preemptions += 1
        replica.preempted.append(self.leader)
        if not self.leader.resting:
            replica.waiting.push(self.leader)

    def _leave(self) -> Replica:
        replica = self.replica
        assert replica is not None
        replica.searches.remove(self)
        self.replica = None
        return replica


def num_recorded(request: Request) -> int:
    """Most probable tokens that are wanted of each row: enough for all beams beside any stop tokens.

    Raises:
        RequestError: more than a worker reports.
    """
    params = request.params
    assert params.beam_width is not None
    wanted = params.beam_width + len(request.stop_ids)
    if wanted > MOST_RECORDED:
        words = f"beam_width {params.beam_width} and {len(request.stop_ids)} stop tokens are more than {MOST_RECORDED}"
        raise RequestError(words, "beam_width")
    return max(wanted, params.logprobs or 0)


def beam_blocks(prompt_len: int, limit: int, width: int, block_size: int) -> int:
    """KV blocks that a search may hold at once: the whole blocks of the prompt, what follows for each beam, and what is
    copied for each in a step."""
    shared = prompt_len // block_size
    return shared + width * (-(-limit // block_size) - shared) + width


def beam_limit(prompt_len: int, limit: int, width: int, block_size: int, num_blocks: int) -> int:
    """The most tokens up to ``limit`` that each of ``width`` beams may have in a pool of ``num_blocks`` usable blocks;
    as few as ``prompt_len`` if they do not fit at all."""
    shared = prompt_len // block_size
    tail = (num_blocks - shared - width) // width
    return max(prompt_len, min(limit, (shared + tail) * block_size))


def _top(record: bytes) -> list[tuple[int, float]]:
    """The most probable tokens of a token record (``shared.logprobs``), and their log-probabilities."""
    count = (len(record) - 4) // 8
    ids = np.frombuffer(record, "<i4", count, 4)
    logprobs = np.frombuffer(record, "<f4", count, 4 * (count + 1))
    return list(zip(ids[1:].tolist(), logprobs[1:].tolist(), strict=True))


def _record_of(token: int, record: bytes, most: int) -> bytes:
    """The record of a token that is among the most probable ones of another record, with ``most`` of these."""
    top = _top(record)
    logprob = next(value for each, value in top if each == token)
    rank = 1 + sum(value > logprob for _, value in top)
    ids = [token] + [each for each, _ in top[:most]]
    values = [logprob] + [value for _, value in top[:most]]
    return pack_records(np.array([rank], np.int32), np.array([ids], np.int32), np.array([values], np.float32))[0]
