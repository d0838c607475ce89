"""A step while it is planned, and how it becomes one that is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from core_engine.block import Block
from core_engine.chunking import ChunkLimit
from core_engine.replica import Replica, StepInFlight
from core_engine.request import Sequence
from core_engine.slot_table import Slots
from core_engine.step_record import RowRecord, StepRecord
from core_engine.step_time import StepLoad
from shared.messages import Int32, SlotInit, Step

_NOTHING: Int32 = np.empty(0, np.int32)
_NO_COPIES: Int32 = np.empty((0, 2), np.int32)
_NO_TRANSFERS: Int32 = np.empty((0, 3), np.int32)


@dataclasses.dataclass(slots=True)
class Draft:
    """A step while it is planned."""

    prefills: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    """Sequence, tokens to compute."""
    admitted: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    """Sequence, tokens of it that the prefix cache holds."""
    beams: list[Sequence] = dataclasses.field(default_factory=list)
    """Of beam searches; they join ``prefills`` in the end."""
    blocks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Slot, block."""
    forks: list[tuple[Sequence, Sequence]] = dataclasses.field(default_factory=list)
    """Sequence with a prefill row, another choice that samples from it too."""
    copies: list[tuple[Block, Block]] = dataclasses.field(default_factory=list)
    """Source, destination."""
    granted: set[int] = dataclasses.field(default_factory=set)
    """Slots that got a block to decode into: no longer to be preempted in this step."""
    stalled: list[int] = dataclasses.field(default_factory=list)
    """Slots that wait for blocks which leaving sequences will give back."""
    num_preempted: int = 0
    limit: ChunkLimit | None = None
    """None: nothing decodes beside the prefills, or there is no target to keep."""


def commit(replica: Replica, draft: Draft, decode: Slots, recorder: Callable[[StepRecord], None] | None = None) -> Step:
    """Enter the step in the window, with the numbers as if every row will deliver its token."""
    slots = replica.slots
    replica.num_steps += 1
    computed = slots.num_computed[decode] + 1
    slots.num_computed[decode] = computed
    exhausted = decode[computed + 1 >= slots.limit[decode]]
    if len(exhausted):
        replica.stop_decoding(exhausted)
    prefill, complete = _commit_prefills(replica, draft)
    rows = sampled = decode
    sample = np.empty((len(complete) + len(decode), 2), np.int32)
    sample[:, 0] = np.arange(len(prefill) - len(complete), len(prefill) + len(decode))
    if len(prefill):
        rows = np.concatenate([prefill[:, 0], decode])
        sample[: len(complete), 0] = complete
        sampled = rows[sample[:, 0]]
    sample[:, 1] = sampled
    if draft.forks:
        forks = _commit_forks(replica, draft)
        sample = np.concatenate([sample, forks.astype(np.int32)])
        rows, sampled = np.concatenate([rows, forks[:, 1]]), np.concatenate([sampled, forks[:, 1]])
    slots.inflight[rows] += 1
    step = Step(
        epoch=replica.epoch,
        number=replica.num_steps,
        new=[_slot_init(sequence, num_cached) for sequence, num_cached in draft.admitted],
        new_tokens=_joined([sequence.tokens for sequence, _ in draft.admitted]),
        prefill=prefill.astype(np.int32),
        decode=decode.astype(np.int32),
        sample=sample,
        blocks=np.array(draft.blocks, np.int32).reshape(-1, 2),
        released=np.array(replica.released, np.int32),
        copies=_copies(draft.copies),
        transfers=_NO_TRANSFERS if replica.kv.host is None else replica.kv.host.transfers.take(replica.num_steps),
    )
    starting = [sequence for sequence, _ in draft.prefills] + [child for _, child in draft.forks]
    ends = [(sequence, int(slots.num_computed[sequence.slot])) for sequence in starting]
    load = _load(prefill, len(decode), int(computed.sum()))
    predicted_s = draft.limit.predicted_s if draft.limit is not None and draft.prefills else None
    copied = [source for source, _ in draft.copies]
    replica.window.append(StepInFlight(step.number, rows, sampled, ends, load, predicted_s, copied))
    if recorder is not None:
        recorder(_record(replica, draft, decode))
    replica.released, replica.finished, replica.preempted = [], [], []
    return step


def _commit_prefills(replica: Replica, draft: Draft) -> tuple[Slots, list[int]]:
    """([p, 3] slot, start, count; indices of the rows that complete their sequence)."""
    prefill = np.empty((len(draft.prefills), 3), np.intp)
    complete: list[int] = []
    slots = replica.slots
    for index, (sequence, count) in enumerate(draft.prefills):
        slot = sequence.slot
        assert slot is not None
        prefill[index] = slot, slots.num_computed[slot], count
        slots.num_computed[slot] += count
        if slots.num_computed[slot] == slots.num_tokens[slot]:
            complete.append(index)
            if sequence in replica.prefilling:
                replica.prefilling.remove(sequence)
            if slots.num_tokens[slot] + 1 < slots.limit[slot] and not slots.searching[slot]:
                replica.start_decoding(slot)
    return prefill, complete


def _commit_forks(replica: Replica, draft: Draft) -> Slots:
    """[f, 2] forward row, slot of each fork."""
    slots = replica.slots
    row_of = {sequence: row for row, (sequence, _) in enumerate(draft.prefills)}
    forks = np.empty((len(draft.forks), 2), np.intp)
    for index, (parent, child) in enumerate(draft.forks):
        slot = child.slot
        assert slot is not None
        forks[index] = row_of[parent], slot
        if slots.num_tokens[slot] + 1 < slots.limit[slot]:
            replica.start_decoding(slot)
    return forks


def _record(replica: Replica, draft: Draft, decode: Slots) -> StepRecord:
    prefills = [(sequence, count, True) for sequence, count in draft.prefills]
    decodes = [(replica.slots.sequence_at(slot), 1, False) for slot in decode.tolist()]
    rows = [
        RowRecord(s.request.rid, s.choice, count, is_prefill, [block.id for block in s.blocks])
        for s, count, is_prefill in prefills + decodes
    ]
    return StepRecord(
        replica=replica.name,
        epoch=replica.epoch.counter,
        step=replica.num_steps,
        rows=rows,
        finished=[sequence.request.rid for sequence in replica.finished],
        preempted=[sequence.request.rid for sequence in replica.preempted],
        num_tokens=sum(row.num_tokens for row in rows),
        num_prefills=len(prefills),
        num_decodes=len(decodes),
    )


def _load(prefill: Slots, num_decodes: int, context: int) -> StepLoad:
    """``prefill`` [p, 3]: slot, start, count."""
    if not len(prefill):
        return StepLoad(num_decodes, context, 0.0, False)
    starts, counts = prefill[:, 1], prefill[:, 2]
    return StepLoad(int(counts.sum()) + num_decodes, context, float((counts * (starts + counts / 2)).sum()), True)


def _slot_init(sequence: Sequence, num_cached: int) -> SlotInit:
    request, params = sequence.request, sequence.row_params
    assert sequence.slot is not None
    if params.prompt_logprobs is not None and not sequence.scoring:
        params = dataclasses.replace(params, prompt_logprobs=None)
    return SlotInit(
        slot=sequence.slot,
        rid=request.rid,
        choice=sequence.choice,
        num_tokens=len(sequence.tokens),
        prompt_len=sequence.prompt_len,
        start=num_cached,
        limit=sequence.limit,
        params=params,
        eos_ids=list(request.eos_ids),
    )


def _copies(pairs: list[tuple[Block, Block]]) -> Int32:
    return np.array([(source.id, block.id) for source, block in pairs], np.int32) if pairs else _NO_COPIES


def _joined(arrays: list[Int32]) -> Int32:
    return np.concatenate(arrays) if arrays else _NOTHING
