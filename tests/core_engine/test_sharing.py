"""Choices that fork from one prompt, copies on write, and newcomers that wait for a prefix that is underway."""

from __future__ import annotations

from typing import Any

import pytest

from core_engine import core as core_module
from core_engine.block import Block
from core_engine.kv_cache_manager import KVCacheManager
from core_engine.request import Sequence
from shared.messages import FinishReason
from tests.core_engine.simulation import Corrupt, Simulation


def rows_of(simulation: Simulation) -> list[list[tuple[str, int, int]]]:
    """Request, choice and tokens of the prefill rows of each step."""
    return [
        [(row.request_id, row.choice, row.num_tokens) for row in record.rows if row.is_prefill]
        for record in simulation.records
    ]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 23])
def test_choices_start_in_the_step_that_completes_the_prompt(length: int, caching: bool) -> None:
    simulation = Simulation(max_num_batched_tokens=8, enable_prefix_caching=caching)
    request = simulation.submit(list(range(length)), n=5, max_tokens=9, ignore_eos=True)
    while not any(len(step.sample) for step in simulation.steps):
        simulation.plan()
        simulation.settle()
    assert sorted(simulation.steps[-1].sample[:, 0].tolist()) == [0] * 5
    assert len(set(simulation.steps[-1].sample[:, 1].tolist())) == 5
    kv = simulation.replica.kv
    assert kv.pool.num_references == 5 * kv.blocks_for(length)
    assert kv.pool.num_blocks - 1 - kv.pool.num_free == kv.blocks_for(length)
    simulation.run()
    assert sum(count for step in rows_of(simulation) for _, _, count in step) == length
    copies = [pair for step in simulation.steps for pair in step.copies.tolist()]
    assert len(copies) == (4 if length % 4 else 0), "the first one writes in place"
    assert len({destination for _, destination in copies}) == len(copies)
    assert [sequence.cached_tokens for sequence in request.sequences] == [0] * 5
    simulation.check_outputs()
    simulation.check_empty()


def test_many_choices_hold_the_prompt_once() -> None:
    """512 tokens in, 64 out, 8 choices: less than 0.35 of what eight requests without sharing hold."""
    simulation = Simulation(
        1000, block_size=16, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024, watermark=0.0
    )
    simulation.submit([token % 97 for token in range(512)], n=8, max_tokens=64, ignore_eos=True)
    kv, most = simulation.replica.kv, 0
    while simulation.tick():
        most = max(most, kv.pool.num_blocks - 1 - kv.pool.num_free)
    assert most == 512 // 16 + 8 * 4
    assert most < 0.35 * 8 * (512 + 64) / 16
    simulation.check_outputs()


def test_what_has_no_seat_follows_from_the_cache() -> None:
    simulation = Simulation(max_num_seqs=3)
    request = simulation.submit(list(range(21)), n=8, max_tokens=6, ignore_eos=True)
    simulation.run()
    assert sorted(sequence.cached_tokens or 0 for sequence in request.sequences) == [0] * 3 + [20] * 5
    simulation.check_outputs()
    simulation.check_empty()


def test_no_fork_where_memory_is_short() -> None:
    simulation = Simulation(10, max_num_seqs=8)
    simulation.submit(list(range(21)), n=4, max_tokens=8, ignore_eos=True)
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


def test_choices_after_the_first_has_left() -> None:
    """The last one that is left writes into the block that all had borrowed."""
    simulation = Simulation(steps_in_flight=1)
    request = simulation.submit(list(range(6)), n=3, max_tokens=6, ignore_eos=True)
    simulation.plan()
    for choice in (0, 1):
        simulation.core.end(request.sequences[choice], FinishReason.ABORT)
    simulation.settle()
    simulation.run()
    assert not any(len(step.copies) for step in simulation.steps)
    simulation.check_outputs()
    simulation.check_empty()


def test_a_named_block_is_copied_though_nobody_else_holds_it() -> None:
    """The first choice fills the block, so that others find it in the cache, and leaves."""
    simulation = Simulation(steps_in_flight=1, max_num_batched_tokens=8)
    request = simulation.submit([7] * 6, n=2, max_tokens=9, ignore_eos=True)
    simulation.plan()
    simulation.core.replicas[0].stop_decoding(request.sequences[1].slot or 0)
    simulation.settle()
    for _ in range(4):
        simulation.plan()
        simulation.settle()
    simulation.core.end(request.sequences[0], FinishReason.ABORT)
    assert request.sequences[1].blocks[-1].digest is not None
    assert request.sequences[1].blocks[-1].ref == 1
    simulation.core.replicas[0].start_decoding(request.sequences[1].slot or 0)
    simulation.run()
    assert sum(len(step.copies) for step in simulation.steps) == 1
    simulation.check_outputs()
    simulation.check_empty()


class NeverCopies(KVCacheManager):
    """A fork writes into the block that it borrows."""

    def grow(self, sequence: Sequence) -> tuple[Block, Block | None]:
        if sequence.borrows:
            sequence.borrows = False
            return sequence.blocks[-1], None
        return super().grow(sequence)


def test_writing_without_a_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "KVCacheManager", NeverCopies)
    simulation = Simulation()
    simulation.submit(list(range(6)), n=3, max_tokens=6, ignore_eos=True)
    with pytest.raises(Corrupt):
        simulation.run()


def test_scored_prompts_are_computed_by_the_choice_that_wants_them() -> None:
    simulation = Simulation(max_num_batched_tokens=8)
    request = simulation.submit(list(range(21)), n=3, max_tokens=6, prompt_logprobs=1, logprobs=1)
    simulation.run()
    assert request.sequences[0].prompt_records is not None
    simulation.check_outputs()
    simulation.check_empty()


# -- prefixes underway -----------------------------------------------------------------------------------------------


def two_with_one_prefix(common: int, own: int, **options: Any) -> Simulation:
    simulation = Simulation(600, max_model_len=1024, max_num_partial_prefills=4, **options)
    for first in (90, 91):
        simulation.submit([*(token % 80 for token in range(common)), *[first] * own], max_tokens=4)
    return simulation


@pytest.mark.parametrize("budget", [32, 64, 512])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_prefix_that_is_underway_is_computed_once(budget: int, num_workers: int) -> None:
    simulation = two_with_one_prefix(200, 9, max_num_batched_tokens=budget, num_workers=num_workers)
    simulation.run()
    computed = sum(count for step in rows_of(simulation) for _, _, count in step)
    assert computed == 209 + 9 or num_workers == 2
    simulation.check_outputs()
    simulation.check_empty()


@pytest.mark.parametrize(("common", "own"), [(60, 9), (80, 700)])
def test_little_is_not_waited_for(common: int, own: int) -> None:
    simulation = two_with_one_prefix(common, own, max_num_batched_tokens=2048)
    simulation.plan()
    assert len(rows_of(simulation)[0]) == 2
    simulation.run()
    simulation.check_outputs()


def test_others_pass_who_waits_for_a_prefix() -> None:
    simulation = two_with_one_prefix(200, 9, max_num_batched_tokens=512)
    simulation.submit([96] * 5, "other", max_tokens=4)
    simulation.plan()
    assert [rid for rid, _, _ in rows_of(simulation)[0]] == ["r0", "other"]
    simulation.run()
    simulation.check_outputs()


def test_a_prefix_whose_computation_is_given_up_is_not_waited_for() -> None:
    simulation = two_with_one_prefix(200, 9, max_num_batched_tokens=64)
    simulation.plan()
    simulation.core.end(simulation.requests[0].sequences[0], FinishReason.ABORT)
    assert simulation.plan() is not None
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


def test_other_salts_are_not_waited_for() -> None:
    simulation = Simulation(200, max_model_len=1024, max_num_batched_tokens=512)
    for salt in ("a", "b"):
        simulation.submit([token % 80 for token in range(200)], salt=salt, max_tokens=4)
    simulation.plan()
    assert len(rows_of(simulation)[0]) == 2
