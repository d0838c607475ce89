"""The fitted time of a step: what it learns from noisy times, and what it never says."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_engine.step_time import CPU_COSTS, GPU_COSTS, StepCosts, StepLoad, StepTimeModel
from tests.core_engine.timed_rig import llama_8b


def decode_load(draw: random.Random) -> StepLoad:
    rows = draw.choice([8, 32, 100])
    return StepLoad(rows, rows * draw.randint(100, 3000), 0.0, False)


def mixed_load(draw: random.Random) -> StepLoad:
    rows, count, start = draw.choice([8, 32, 100]), draw.choice([100, 500, 1000, 1400, 2000]), draw.randint(0, 8000)
    return StepLoad(rows + count, rows * draw.randint(100, 3000), count * (start + count / 2), True)


def trained(device: Callable[[StepLoad], float], *, noise: float = 0.0, stalls: float = 0.0) -> StepTimeModel:
    """After 300 decode steps and 60 with prefills, some of which take seconds."""
    draw, model = random.Random(1), StepTimeModel(GPU_COSTS)
    for index in range(360):
        load = mixed_load(draw) if index % 6 == 0 else decode_load(draw)
        seconds = device(load) * draw.gauss(1.0, noise)
        model.observe(load, draw.uniform(1.0, 5.0) if draw.random() < stalls else seconds)
    return model


def worst_error(model: StepTimeModel, device: Callable[[StepLoad], float]) -> float:
    draw = random.Random(2)
    loads = [mixed_load(draw) for _ in range(100)]
    return max(abs(model.costs.of(load) / device(load) - 1.0) for load in loads)


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_it_learns_what_steps_take(factor: float) -> None:
    """Whatever the prior: a tenth of an 8B model's times, or ten times as long."""

    def device(load: StepLoad) -> float:
        return factor * llama_8b(load)

    assert worst_error(trained(device), device) < 0.06
    assert worst_error(trained(device, noise=0.05), device) < 0.1
    assert worst_error(trained(device, noise=0.05, stalls=0.05), device) < 0.15


def test_linear_times_are_found_exactly() -> None:
    costs = StepCosts(step=0.003, token=2e-5, more_token=0.0, context=1e-7, pair=3e-9)
    assert worst_error(trained(costs.of), costs.of) < 0.01


def test_the_first_steps_may_compile_for_seconds() -> None:
    draw, model = random.Random(3), StepTimeModel(GPU_COSTS)
    for _ in range(6):
        model.observe(mixed_load(draw), draw.uniform(1.0, 4.0))
    for _ in range(6):
        load = mixed_load(draw)
        model.observe(load, llama_8b(load))
    assert worst_error(model, llama_8b) < 0.25


def test_hours_of_decoding_do_not_wipe_out_what_prefills_cost() -> None:
    model, draw = trained(llama_8b), random.Random(4)
    before = worst_error(model, llama_8b)
    for _ in range(5000):
        load = decode_load(draw)
        model.observe(load, llama_8b(load))
    assert worst_error(model, llama_8b) < before + 0.05


def test_a_new_speed_is_learned() -> None:
    model, draw = trained(llama_8b), random.Random(5)

    def slower(load: StepLoad) -> float:
        return 2.0 * llama_8b(load)

    for _ in range(150):
        for load in (mixed_load(draw), decode_load(draw), decode_load(draw)):
            model.observe(load, slower(load))
    assert worst_error(model, slower) < 0.08


def test_nothing_is_learned_from_steps_that_were_not_timed() -> None:
    model = StepTimeModel(CPU_COSTS)
    model.observe(StepLoad(100, 0, 5000.0, True), 0.0)
    assert model.costs == CPU_COSTS
    assert model.most_tokens == 0


loads = st.builds(
    StepLoad,
    tokens=st.integers(1, 20_000),
    context=st.integers(0, 10**8),
    pairs=st.floats(0.0, 1e10),
    is_prefill=st.booleans(),
)


@given(observed=st.lists(st.tuples(loads, st.floats(1e-6, 1e4)), max_size=40), load=loads, more=loads)
def test_more_work_never_looks_faster(observed: list[tuple[StepLoad, float]], load: StepLoad, more: StepLoad) -> None:
    model = StepTimeModel(GPU_COSTS)
    for seen, seconds in observed:
        model.observe(seen, seconds)
        assert min(model.costs) >= 0.0
    together = StepLoad(load.tokens + more.tokens, load.context + more.context, load.pairs + more.pairs, True)
    assert 0.0 <= model.costs.of(load) <= model.costs.of(together) * (1 + 1e-12) < float("inf")


def test_sizes_have_factors_of_their_own() -> None:
    """A size that is slower than its neighbours is told from them; stalls tell little, and it is forgotten."""

    def uneven(load: StepLoad) -> float:
        return llama_8b(load) * (1.1 if load.is_prefill and -(-load.tokens // 128) == 9 else 1.0)

    draw, model = random.Random(5), StepTimeModel(GPU_COSTS)

    def observe(tokens: int, device: Callable[[StepLoad], float]) -> None:
        load = StepLoad(tokens, 50_000, (tokens - 32) * draw.randint(500, 8000), True)
        model.observe(load, device(load))

    def between(tokens: int) -> float:
        return model.factor(tokens) / ((model.factor(tokens - 128) + model.factor(tokens + 128)) / 2)

    assert model.factor(1024) == model.factor(10**6) == 1.0
    for _ in range(40):
        for tokens in (1024, 1152, 1280):
            observe(tokens, uneven)
    assert between(1152) == pytest.approx(1.1, abs=0.03)
    observe(1152, lambda load: 9.0)
    assert model.factor(1152) < 1.25
    for _ in range(600):
        observe(draw.choice([512, 2048]), llama_8b)
    assert between(1152) == pytest.approx(1.0, abs=0.03)
