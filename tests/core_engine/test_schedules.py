"""Whole random schedules: whatever the memory, the depth, aborts and restarts, each output is the reference's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_engine.chunking import ChunkTarget
from core_engine.queues import QUEUES
from shared.messages import FinishReason
from tests.core_engine.simulation import VOCAB, Simulation


def target_of(seconds: float | None) -> ChunkTarget | None:
    """A target for the simulated worker, whose steps take a millisecond per token."""
    if seconds is None:
        return None
    target = ChunkTarget.on("cpu", seconds)
    return dataclasses.replace(target, first_chunk=2, least_chunk=1)


options = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([16, 20, 28, 60]),
        "steps_in_flight": st.integers(1, 3),
        "short_step_s": st.sampled_from([0.0, 0.002, 1.0]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "max_num_batched_tokens": st.sampled_from([4, 7, 16, 64]),
        "max_num_partial_prefills": st.integers(1, 3),
        "enable_prefix_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.1]),
        "policy": st.sampled_from(sorted(QUEUES)),
        "priority_ageing_s": st.sampled_from([1.0, 10.0, 1000.0]),
        "chunk_target": st.sampled_from([None, None, 0.004, 0.02]).map(target_of),
        "num_host_blocks": st.sampled_from([0, 3, 12, 40]),
        "swap_space": st.sampled_from([0.0, 1.0]),
        "kv_offloading_size": st.sampled_from([0.0, 1.0]),
        "preemption_mode": st.sampled_from(["swap", "auto", "recompute"]),
        "transfer_rate": st.sampled_from([0.0, 1e9, 5e5, 1e2]),
    }
)


def drive(
    simulation: Simulation,
    seed: int,
    *,
    num_requests: int = 24,
    restarts: bool = True,
    scale: Callable[[Simulation, random.Random, int], None] = lambda simulation, rng, tick: None,
    lag: float = 0.0,
) -> None:
    """Submit, abort and restart at random until all is done, checking the invariants all along.

    Args:
        scale: lets workers join and go, at each tick.
        lag: chance of a worker not to get on in a tick.
    """
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.choice([0, 4, 8, 13]))] for _ in range(4)]
    arrival = rng.choice([0.3, 1.0])
    restart_at = {rng.randrange(5, 60), rng.randrange(60, 120)} if restarts else set()
    submitted = 0
    for tick in range(20_000):
        while submitted < num_requests and rng.random() < arrival:
            prompt = rng.choice(prefixes) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            most = rng.choice([0, 1, 2, 5, 12, 30])
            simulation.submit(
                prompt,
                salt=rng.choice(["", "", "x"]),
                priority=rng.choice([0, 0, 1, 3]),
                tenant=rng.choice(["", "a", "b"]),
                n=rng.choice([1, 1, 1, 2, 5]),
                max_tokens=most,
                min_tokens=rng.choice([0, 0, min(most, 4)]),
                ignore_eos=rng.random() < 0.2,
                stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.3 else [],
                logprobs=rng.choice([None, 0, 5]),
                prompt_logprobs=rng.choice([None, None, 0, 3]),
            )
            submitted += 1
        live = simulation.live()
        if live and rng.random() < 0.03:
            simulation.core.end(rng.choice(live), FinishReason.ABORT)
        if live and rng.random() < 0.05:
            sequence = rng.choice(live)
            simulation.core.rest(sequence, not sequence.resting)
        elif rng.random() < 0.2:
            for sequence in live:
                simulation.core.rest(sequence, False)
        if tick in restart_at:
            simulation.restart_worker()
        scale(simulation, rng, tick)
        busy = simulation.tick(lambda replica: lag == 0.0 or rng.random() >= lag)
        for replica in simulation.core.replicas:
            replica.check()
        if not busy and submitted == num_requests and not live:
            break
    assert not simulation.live()
    simulation.check_outputs()
    simulation.check_empty()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(options=options, seed=st.integers(0, 2**32))
def test_outputs_equal_the_reference(options: dict[str, Any], seed: int) -> None:
    drive(Simulation(**options), seed)


@settings(max_examples=20, deadline=None)
@given(options=options, seed=st.integers(0, 2**32))
def test_whole_prompts(options: dict[str, Any], seed: int) -> None:
    options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "chunk_target": None}
    simulation = Simulation(**options)
    drive(simulation, seed)
    for step in simulation.steps:
        lengths = {init.slot: init.num_tokens for init in step.new}
        assert all(start + count == lengths[slot] for slot, start, count in step.prefill.tolist())
