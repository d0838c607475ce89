"""Array operations change nothing: planning and settling row by row give the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_engine import core as core_module
from core_engine.replica import Replica, StepInFlight
from core_engine.request import Exit
from core_engine.scheduler import Scheduler
from core_engine.settle import Settled, StopTable
from core_engine.slot_table import Slots
from shared.messages import Step, StepResult
from tests.core_engine.simulation import Simulation
from tests.core_engine.test_schedules import drive, options


class PlainScheduler(Scheduler):
    """Decode rows one after another, as the rule says: planned while one token is missing and the limit is not met."""

    def _plan_decodes(self, replica: Replica, draft: Any) -> Slots:
        slots, kv = replica.slots, replica.kv
        candidates = replica.decode_slots().tolist()[: self.config.max_num_batched_tokens]
        needy = []
        for slot in candidates:
            assert not slots.leaving[slot]
            assert slots.num_computed[slot] + 1 < slots.limit[slot]
            sequence = slots.sequences[slot]
            if slots.num_computed[slot] >= (len(sequence.blocks) - sequence.borrows) * kv.block_size:
                needy.append(sequence)
        if len(needy) > kv.pool.num_free:
            needy.sort(key=self.waiting.rank)
        for sequence in needy:
            self._grow(replica, draft, sequence)
        return np.array([s for s in candidates if slots.decoding[s] and s not in draft.stalled], np.intp)


def plain_settle(replica: Replica, step: StepInFlight, result: StepResult, stops: StopTable) -> Settled:
    """Row by row, with no table of stop ids."""
    slots, kv = replica.slots, replica.kv
    settled = Settled([], np.empty((0, 4), np.int32), np.empty(0, np.int32), [])
    for slot in step.rows.tolist():
        slots.inflight[slot] -= 1
    for block in step.copied:
        kv.pool.release([block])
    computed = dict.fromkeys(step.rows.tolist(), -1) | {s.slot: end for s, end in step.prefills}
    for row, records in result.prompt_logprobs:
        scored = step.prefills[row][0]
        scored.prompt_records = [*(scored.prompt_records or []), *records]
    tokens, rows_of, logprobs = [], [], dict(result.logprobs)
    for index, (slot, token) in enumerate(zip(step.sampled.tolist(), result.tokens.tolist(), strict=True)):
        sequence = slots.sequence_at(slot)
        if sequence.exit in (Exit.FINISH, Exit.ABORT):
            continue
        slots.tokens[slot, slots.num_tokens[slot]] = token
        slots.num_tokens[slot] += 1
        computed[slot] = int(slots.num_tokens[slot]) - 1
        if index in logprobs:
            settled.records.append((len(settled.sequences), logprobs[index]))
        settled.sequences.append(sequence)
        rows_of.append((sequence.handle, sequence.choice, computed[slot] - sequence.prompt_len, 1))
        tokens.append(token)
    for slot in [s.slot for s, _ in step.prefills] + [s.slot for s in settled.sequences]:
        if slots.sequence_at(slot).exit is not Exit.ABORT:
            kv.commit(slots.sequence_at(slot), slots.tokens[slot], computed[slot])
    for sequence, token in zip(settled.sequences, tokens, strict=True):
        end = sequence.end_of(token, int(slots.num_tokens[sequence.slot]))
        if end is not None:
            sequence.finish_reason, sequence.stop_reason = end
            settled.finished.append(sequence)
            replica.request_exit(sequence, Exit.FINISH)
    for slot in step.rows.tolist():
        if slots.leaving[slot] and slots.inflight[slot] == 0:
            replica.drained(slots.sequence_at(slot))
    rows, wanted = np.array(rows_of, np.int32).reshape(-1, 4), np.array(tokens, np.int32)
    whole = Settled(settled.sequences, rows, wanted, settled.finished, settled.records)
    return whole.without_silent()


def same(one: Step, other: Step) -> bool:
    arrays = all((getattr(one, name) == getattr(other, name)).all() for name in Step.ARRAYS)
    shapes = all(getattr(one, name).shape == getattr(other, name).shape for name in Step.ARRAYS)
    return shapes and arrays and (one.number, one.new) == (other.number, other.new)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(options=options, seed=st.integers(0, 2**32))
def test_same_steps(options: dict[str, Any], seed: int) -> None:
    fast = Simulation(**options)
    drive(fast, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "Scheduler", PlainScheduler)
        patch.setattr(core_module, "settle", plain_settle)
        plain = Simulation(**options)
        drive(plain, seed)
    assert len(fast.steps) == len(plain.steps)
    assert all(map(same, fast.steps, plain.steps))
    assert (fast.outputs, fast.logprobs) == (plain.outputs, plain.logprobs)
