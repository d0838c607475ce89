"""Chunks by time: gaps that readers see, how prompts get on meanwhile, and what it costs a batch."""

from __future__ import annotations

import dataclasses
import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_engine.chunking import HEADROOM, LEAST_CHUNK, ChunkLimit, ChunkTarget
from core_engine.step_time import GPU_COSTS, StepCosts, StepLoad, StepTimeModel
from tests.core_engine.timed_rig import DeviceTime, Timed, TimedRig, llama_8b


def times(factor: float) -> DeviceTime:
    return lambda load: factor * llama_8b(load)


def gpu(milliseconds: float) -> ChunkTarget:
    return ChunkTarget.on("cuda", milliseconds / 1000)


def with_long_prompts(rig: TimedRig, *, num_prompts: int, prompt_len: int = 8192) -> tuple[list[Timed], list[Timed]]:
    """32 requests that decode, and a long prompt each second, as ``headrace bench mixed`` has them."""
    steady = [rig.submit(128, 8000) for _ in range(32)]
    long = [rig.submit(prompt_len, 1, at=1.0 + number) for number in range(num_prompts)]
    rig.run(until=2.0 + num_prompts)
    return steady, long


def worst_gap(steady: list[Timed], since: float) -> float:
    return max(after - before for one in steady for before, after in itertools.pairwise(one.times) if before >= since)


@pytest.mark.parametrize(("factor", "milliseconds"), [(0.1, 10.0), (0.2, 40.0), (1.0, 40.0), (1.0, 100.0), (2.0, 60.0)])
def test_gaps_keep_the_target(factor: float, milliseconds: float) -> None:
    """From the first long prompt on, before any step like it was timed."""
    rig = TimedRig(times(factor), chunk_target=gpu(milliseconds), max_num_batched_tokens=16384)
    steady, long = with_long_prompts(rig, num_prompts=5)
    assert worst_gap(steady, 0.9) <= 1.1e-3 * milliseconds
    assert all(one.times for one in long)


def test_long_prompts_on_an_h200() -> None:
    """Llama-3.1-8B: as many steps as the target needs, of equal time, sizes that are computed well, no small rest."""
    rig = TimedRig(llama_8b, chunk_target=gpu(40.0))
    steady, long = with_long_prompts(rig, num_prompts=6)
    assert worst_gap(steady, 0.9) <= 0.040
    whole = TimedRig(llama_8b)
    _, uncut = with_long_prompts(whole, num_prompts=6)
    assert statistics.median(one.ttft for one in long) <= 1.1 * statistics.median(one.ttft for one in uncut)
    chunks = [
        (seconds, int(step.prefill[:, 2].sum()))
        for step, seconds in zip(rig.steps, rig.seconds, strict=True)
        if len(step.prefill) and len(step.decode)
    ]
    last = chunks[-7:]
    assert sum(count for _, count in last) == 8192
    assert max(seconds for seconds, _ in last) <= 1.3 * min(seconds for seconds, _ in last)
    assert all((32 + count) % 128 == 0 for _, count in last[:-1])


def test_the_metrics_say_how_good_the_model_is() -> None:
    rig = TimedRig(llama_8b, chunk_target=gpu(40.0))
    with_long_prompts(rig, num_prompts=3)
    values = {name: value for name, _, value in rig.core.metrics.samples(rig.core.replicas, 0)}
    count = values["headrace:step_time_measured_to_predicted_ratio_count"]
    assert count >= 15
    assert values["headrace:step_time_measured_to_predicted_ratio_sum"] / count == pytest.approx(1.0, abs=0.1)
    assert 1400 <= values["headrace:prefill_chunk_limit_tokens"] <= 1600


def test_slow_devices_begin_carefully() -> None:
    """Ten times slower than what the model begins with: the first chunk breaks the target by less than ten times."""
    rig = TimedRig(times(10.0), chunk_target=gpu(100.0))
    steady, _ = with_long_prompts(rig, num_prompts=1)
    assert worst_gap(steady, 0.9) <= 0.5
    tail = [gap for one in steady for gap in one.gaps[-20:]]
    assert max(tail) <= 0.110


def test_a_default_target_gives_way_to_a_slow_model() -> None:
    slow = ChunkTarget.on("cuda", 0.040, is_default=True)
    rig = TimedRig(times(10.0), chunk_target=slow)
    steady, long = with_long_prompts(rig, num_prompts=4)
    assert 0.15 <= worst_gap(steady, 3.0) <= 0.35
    assert all(one.times for one in long[:1])


def test_nothing_decodes_whole_steps() -> None:
    rig = TimedRig(llama_8b, chunk_target=gpu(40.0))
    for _ in range(8):
        rig.submit(1024, 1)
    rig.run()
    assert [load.tokens for load in rig.loads] == [8192]


@pytest.mark.parametrize("factor", [0.1, 1.0])
def test_a_batch_is_nearly_as_fast(factor: float) -> None:
    """400 requests at once, lengths as in the ``mix`` workload, with the default target and without one."""

    def seconds(target: ChunkTarget | None) -> float:
        rig = TimedRig(times(factor), chunk_target=target, max_num_seqs=256)
        for number in range(400):
            rig.submit(40 + number * 37 % 360, 40 + number * 53 % 300)
        rig.run()
        return rig.now

    assert seconds(ChunkTarget.on("cuda", 0.040, is_default=True)) <= 1.02 * seconds(None)


def test_prompts_get_on_where_decoding_alone_breaks_the_target() -> None:
    rig = TimedRig(llama_8b, chunk_target=gpu(2.0))
    steady = [rig.submit(128, 4000) for _ in range(8)]
    long = rig.submit(2000, 1, at=0.5)
    rig.run(until=2.0)
    assert long.times
    counts = [int(step.prefill[:, 2].sum()) for step in rig.steps if len(step.prefill) and len(step.decode)]
    assert set(counts[:-1]) == {LEAST_CHUNK}
    assert worst_gap(steady, 0.4) <= 0.010


def test_limits_in_tokens_stay_hard() -> None:
    rig = TimedRig(times(0.1), chunk_target=gpu(40.0), max_prefill_tokens=300)
    rig.submit(100, 200)
    rig.run(until=0.01)
    rig.submit(2000, 1, at=0.01)
    rig.run()
    counts = [int(step.prefill[:, 2].sum()) for step in rig.steps if len(step.prefill)]
    assert max(counts) <= 300
    assert sum(counts) == 2100


def test_short_prompts_join_while_there_is_time() -> None:
    """As many whole prompts as the target allows, and one that is cut: no step is left half empty."""
    rig = TimedRig(llama_8b, chunk_target=gpu(40.0))
    rig.submit(100, 400)
    rig.run(until=0.5)
    for _ in range(30):
        rig.submit(300, 1, at=0.5)
    rig.run()
    mixed = [step.prefill for step in rig.steps if len(step.prefill) and len(step.decode)]
    assert max(len(prefill) for prefill in mixed) >= 4
    assert max(rig.seconds[1:]) <= 0.044
    assert all(prefill[:, 2].sum() >= 1000 for prefill in mixed[4:-1])


costs = st.builds(
    StepCosts,
    step=st.floats(0.0, 0.1),
    token=st.floats(0.0, 1e-2),
    more_token=st.floats(0.0, 1e-2),
    context=st.floats(0.0, 1e-6),
    pair=st.floats(0.0, 1e-6),
)
targets = st.builds(
    ChunkTarget,
    seconds=st.floats(1e-3, 1.0),
    prior=costs,
    first_chunk=st.integers(1, 20_000),
    pads_steps=st.booleans(),
    least_chunk=st.sampled_from([1, 64]),
)


@given(
    target=targets,
    num_decodes=st.integers(1, 1024),
    context=st.integers(1, 10**6),
    prompts=st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 10_000)), min_size=1, max_size=6),
    budget=st.integers(1, 16_384),
)
def test_chunks_fit_the_time_and_the_budget(
    target: ChunkTarget, num_decodes: int, context: int, prompts: list[tuple[int, int]], budget: int
) -> None:
    limit = ChunkLimit(
        target, StepTimeModel(target.prior), num_decodes=num_decodes, context=context, num_prompts=len(prompts)
    )
    taken, pairs = 0, 0.0
    for start, missing in prompts:
        if budget == taken or not limit.is_open:
            break
        count = limit.take(start, missing, budget - taken)
        assert 1 <= count <= min(missing, budget - taken)
        least = min(missing, budget - taken, target.least_chunk)
        taken, pairs = taken + count, pairs + count * (start + count / 2)
        load = StepLoad(num_decodes + taken, context, pairs, True)
        assert limit.num_tokens == taken
        assert limit.predicted_s == pytest.approx(target.prior.of(load))
        if count > least:
            assert taken <= max(target.first_chunk, 0)
            assert target.prior.of(load) <= HEADROOM * target.seconds * (1 + 1e-9)


def test_what_is_left_of_a_prompt_is_cut_evenly() -> None:
    target = dataclasses.replace(gpu(40.0), pads_steps=False, first_chunk=100_000)
    start, counts = 0, []
    while start < 5000:
        limit = ChunkLimit(target, StepTimeModel(GPU_COSTS), num_decodes=32, context=32_000, num_prompts=1)
        counts.append(limit.take(start, 5000 - start, 8192))
        start += counts[-1]
    spans = [
        GPU_COSTS.of(StepLoad(32 + count, 32_000, count * (sum(counts[:index]) + count / 2), True))
        for index, count in enumerate(counts)
    ]
    assert len(counts) == 4
    assert max(spans) <= 1.02 * min(spans)


def test_sizes_that_a_device_computes_badly_are_avoided() -> None:
    """Some sizes take a tenth longer than their neighbours: the lines cannot follow, and gaps keep the target."""

    def uneven(load: StepLoad) -> float:
        return llama_8b(load) * (1.1 if load.is_prefill and -(-load.tokens // 128) in (9, 10) else 1.0)

    rig = TimedRig(uneven, chunk_target=gpu(40.0))
    steady, long = with_long_prompts(rig, num_prompts=12)
    assert worst_gap(steady, 6.0) <= 0.039
    even = TimedRig(llama_8b, chunk_target=gpu(40.0))
    _, others = with_long_prompts(even, num_prompts=12)
    assert statistics.median(one.ttft for one in long) <= 1.1 * statistics.median(one.ttft for one in others)
