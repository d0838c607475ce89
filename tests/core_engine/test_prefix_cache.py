"""What is found in the prefix cache, and what never is."""

from __future__ import annotations

import pytest

from core_engine.kv_cache_manager import slot_of
from shared.messages import FinishReason
from tests.core_engine.simulation import Simulation


def computed(simulation: Simulation, rid: str) -> int:
    """Prefill tokens that were computed for a request."""
    return sum(
        row.num_tokens
        for record in simulation.records
        for row in record.rows
        if row.request_id == rid and row.is_prefill
    )


def test_slot_mapping() -> None:
    assert slot_of(35, [7, 2, 9, 0], 16) == 147


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 64])
def test_whole_prompt_cached(length: int) -> None:
    simulation = Simulation(block_size=16, max_num_batched_tokens=256)
    prompt = [(7 * position) % 97 for position in range(length)]
    outputs = []
    for attempt in range(3):
        request = simulation.submit(prompt, max_tokens=20, ignore_eos=True)
        simulation.run()
        outputs.append(simulation.outputs[request.rid, 0])
        cached = request.sequences[0].cached_tokens
        assert cached is not None
        assert cached <= length - 1
        assert cached % 16 == 0
        assert cached == (0 if attempt == 0 else (length - 1) // 16 * 16)
        assert computed(simulation, request.rid) == length - cached
    assert outputs[0] == outputs[1] == outputs[2]
    simulation.check_outputs()
    simulation.check_empty()


def test_salts_are_apart() -> None:
    simulation = Simulation()
    hits = []
    for salt in ("a", "a", "b", ""):
        request = simulation.submit(list(range(12)), salt=salt, max_tokens=1)
        simulation.run()
        hits.append(request.sequences[0].cached_tokens)
    assert hits == [0, 8, 0, 0]


def test_generated_tokens_are_cached_too() -> None:
    simulation = Simulation()
    first = simulation.submit(list(range(6)), max_tokens=12, ignore_eos=True)
    simulation.run()
    follow_up = list(range(6)) + simulation.outputs[first.rid, 0] + [1, 2, 3]
    second = simulation.submit(follow_up, max_tokens=1)
    simulation.run()
    # The KV of the last of 18 tokens was never written: 17 tokens fill 4 blocks of 4.
    assert second.sequences[0].cached_tokens == 16


def test_an_aborted_prompt_leaves_its_finished_blocks() -> None:
    simulation = Simulation(max_num_batched_tokens=8, steps_in_flight=1)
    first = simulation.submit(list(range(40)))
    simulation.tick()
    simulation.tick()
    simulation.core.end(first.sequences[0], FinishReason.ABORT)
    simulation.run()
    second = simulation.submit(list(range(40)), max_tokens=1)
    simulation.run()
    assert second.sequences[0].cached_tokens == 16
    simulation.check_empty()


def test_off() -> None:
    simulation = Simulation(enable_prefix_caching=False)
    for _ in range(2):
        request = simulation.submit(list(range(20)), max_tokens=1)
        simulation.run()
        assert request.sequences[0].cached_tokens == 0


def test_a_new_epoch_forgets() -> None:
    simulation = Simulation()
    simulation.submit(list(range(20)), max_tokens=1)
    simulation.run()
    simulation.restart_worker()
    request = simulation.submit(list(range(20)), max_tokens=1)
    simulation.run()
    assert request.sequences[0].cached_tokens == 0
    simulation.check_outputs()


def test_choices_compute_their_prompt_once() -> None:
    simulation = Simulation(max_num_batched_tokens=8)
    request = simulation.submit(list(range(23)), "choices", n=4, max_tokens=6, ignore_eos=True)
    other = simulation.submit(list(range(40, 45)), "other", max_tokens=6, ignore_eos=True)
    simulation.run()
    assert [sequence.cached_tokens for sequence in request.sequences] == [0, 0, 0, 0]
    assert computed(simulation, "choices") == 23
    first_steps = [row.request_id for record in simulation.records[:4] for row in record.rows]
    assert "other" in first_steps, "it waits for nobody's prompt"
    assert other.sequences[0].cached_tokens == 0
    simulation.check_outputs()
    simulation.check_empty()


def test_choices_share_the_prompt_of_an_earlier_request() -> None:
    simulation = Simulation()
    simulation.submit(list(range(20)), max_tokens=1)
    simulation.run()
    request = simulation.submit(list(range(20)), n=3, max_tokens=8, ignore_eos=True)
    simulation.run()
    assert [sequence.cached_tokens for sequence in request.sequences] == [16, 16, 16]
    assert len({tuple(simulation.outputs[request.rid, choice]) for choice in range(3)}) == 3
    simulation.check_outputs()
    simulation.check_empty()
