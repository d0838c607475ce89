"""settle(): the only place that changes outputs. Appends tokens, sees ends, commits and releases blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from core_engine.beam_search import Found
from core_engine.replica import Replica, StepInFlight
from core_engine.request import Exit, Sequence
from core_engine.slot_table import Slots, SlotTable
from shared.errors import ProtocolError
from shared.messages import Int32, StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """What a step added: one token for each of some sequences, and which of them it ended."""

    sequences: list[Sequence]
    """[k]"""
    rows: Int32
    """[k, 4] as in ``TokenDelta``: handle, choice, tokens that were generated before, 1."""
    tokens: Int32
    """[k]"""
    finished: list[Sequence]
    """Their ``finish_reason`` and ``stop_reason`` are set."""
    records: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    """(index into ``sequences``, log-probability record), for each that asked for them."""
    searched: list[Sequence] = dataclasses.field(default_factory=list)
    """Sequences of beam searches; their search has the candidates for their next token."""
    found: list[tuple[Sequence, Found]] = dataclasses.field(default_factory=list)
    """Choices of beam searches that are over, as a whole; none of them is among ``finished``."""

    def without_silent(self) -> Settled:
        """Without the tokens of sequences that want none."""
        kept = np.array([not sequence.silent for sequence in self.sequences], np.bool_)
        sequences = [sequence for sequence in self.sequences if not sequence.silent]
        records = _kept(self.records, kept)
        return dataclasses.replace(
            self, sequences=sequences, rows=self.rows[kept], tokens=self.tokens[kept], records=records
        )


class StopTable:
    """Which ids may end any live sequence: one array look-up finds the few rows worth a closer look."""

    def __init__(self, vocab_size: int) -> None:
        self._holders = np.zeros(vocab_size, np.int32)
        self.may_stop = np.zeros(vocab_size, np.bool_)

    @property
    def vocab_size(self) -> int:
        return len(self.may_stop)

    def add(self, stop_ids: frozenset[int]) -> None:
        self._count(stop_ids, 1)

    def remove(self, stop_ids: frozenset[int]) -> None:
        self._count(stop_ids, -1)

    def _count(self, stop_ids: frozenset[int], change: int) -> None:
        ids = [token for token in stop_ids if token < self.vocab_size]
        self._holders[ids] += change
        self.may_stop[ids] = self._holders[ids] > 0


def settle(replica: Replica, step: StepInFlight, result: StepResult, stops: StopTable) -> Settled:
    """Apply the result of ``step``, the oldest one of the window.

    Tokens for sequences that have ended meanwhile are dropped (the overrun row of a stop token).

    Raises:
        ProtocolError: not the result of ``step``, or an id outside the vocabulary; the epoch is over.
    """
    slots, kv = replica.slots, replica.kv
    _check(step, result, stops, slots)
    _keep_prompt_records(step, result)
    slots.inflight[step.rows] -= 1
    kv.pool.release(step.copied)
    sampled, tokens, records = step.sampled, result.tokens, result.logprobs
    wanted = ~(slots.ended[sampled] | slots.searching[sampled])
    searched = _searched(slots, sampled, records) if replica.searches else []
    if not wanted.all():
        sampled, tokens, records = sampled[wanted], tokens[wanted], _kept(records, wanted)
    before = slots.num_tokens[sampled]
    slots.tokens[sampled, before] = tokens
    slots.num_tokens[sampled] = before + 1

    for sequence, num_settled in step.prefills:
        if sequence.exit is not Exit.ABORT:
            kv.commit(sequence, slots.tokens[sequence.slot], num_settled)
    for slot in sampled[before % kv.block_size == 0].tolist():
        kv.commit(slots.sequence_at(slot), slots.tokens[slot], int(slots.num_tokens[slot]) - 1)

    rows = np.ones((len(sampled), 4), np.int32)
    rows[:, 0] = slots.handle[sampled]
    rows[:, 1] = slots.choice[sampled]
    rows[:, 2] = before - slots.prompt_len[sampled]
    settled = Settled(
        sequences=slots.sequences[sampled].tolist(),
        rows=rows,
        tokens=tokens,
        finished=[],
        records=records,
        searched=searched,
    )
    ending = stops.may_stop[tokens] | (before + 1 >= slots.limit[sampled])
    for row in np.flatnonzero(ending).tolist():
        sequence = settled.sequences[row]
        end = sequence.end_of(int(tokens[row]), int(before[row]) + 1)
        if end is not None:
            sequence.finish_reason, sequence.stop_reason = end
            settled.finished.append(sequence)
            replica.request_exit(sequence, Exit.FINISH)
    leaving = step.rows[slots.leaving[step.rows]]
    for slot in leaving[slots.inflight[leaving] == 0].tolist():
        replica.drained(slots.sequence_at(slot))
    return settled.without_silent() if any(sequence.silent for sequence in settled.finished) else settled


def _searched(slots: SlotTable, sampled: Slots, records: list[tuple[int, bytes]]) -> list[Sequence]:
    """Give beam searches the records of the rows of theirs that go on; returns the sequences of these."""
    rows = np.flatnonzero(slots.searching[sampled] & ~slots.leaving[sampled]).tolist()
    if not rows:
        return []
    sequences, found = [slots.sequence_at(slot) for slot in sampled[rows].tolist()], dict(records)
    for row, sequence in zip(rows, sequences, strict=True):
        assert sequence.request.search is not None
        sequence.request.search.take(sequence, found[row])
    return sequences


def _kept(records: list[tuple[int, bytes]], kept: npt.NDArray[np.bool_]) -> list[tuple[int, bytes]]:
    """The records of the rows that are kept, by their new indices."""
    if not records:
        return records
    places = np.cumsum(kept) - 1
    return [(int(places[index]), record) for index, record in records if kept[index]]


def _keep_prompt_records(step: StepInFlight, result: StepResult) -> None:
    """Append the records of a chunk to those of the chunks before it.

    Raises:
        ProtocolError: they do not follow these.
    """
    given = dict(result.prompt_logprobs)
    for row, (sequence, num_settled) in enumerate(step.prefills):
        if sequence.scoring:
            held, records = sequence.prompt_records, given.pop(row, [])
            assert held is not None
            if len(held) + len(records) != min(num_settled, sequence.prompt_len - 1):
                words = f"{len(records)} log-probabilities of a prompt after {len(held)}"
                raise ProtocolError(f"{words} in step {step.number}")
            held += records
    if given:
        raise ProtocolError(f"log-probabilities of a prompt that were not asked for in step {step.number}")


def _check(step: StepInFlight, result: StepResult, stops: StopTable, slots: SlotTable) -> None:
    if result.number != step.number:
        raise ProtocolError(f"result of step {result.number} instead of step {step.number}")
    if len(result.tokens) != len(step.sampled):
        raise ProtocolError(f"{len(result.tokens)} tokens for {len(step.sampled)} sample rows of step {step.number}")
    # As unsigned numbers, so that one comparison finds negative ids too.
    if len(result.tokens) and result.tokens.view(np.uint32).max() >= stops.vocab_size:
        raise ProtocolError(f"a token id outside the vocabulary of {stops.vocab_size} in step {step.number}")
    if [row for row, _ in result.logprobs] != np.flatnonzero(slots.recorded[step.sampled]).tolist():
        raise ProtocolError(f"log-probabilities of other rows than asked for them in step {step.number}")
