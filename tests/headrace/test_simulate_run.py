"""The engine core on a simulated clock: times that can be reckoned by hand, and what must hold for every trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_engine.core import CoreConfig
from core_engine.engine_config import core_config_for, scheduler_for
from core_engine.host_memory import HostMemorySpec
from core_engine.pressure import Wait
from core_engine.step_time import StepCosts
from headrace.simulate.advice import advice, limit_of
from headrace.simulate.device import Device
from headrace.simulate.figures import Figures
from headrace.simulate.gaps import GapHistogram
from headrace.simulate.run import CONNECTIONS, NOT_YET, QUEUE_FULL, TOO_LONG, Outcome, Simulator
from headrace.simulate.timeline import CAUSES, COLUMNS, Cause, Timeline
from headrace.simulate.trace import VOCAB_SIZE, TraceRequest
from shared.config import Settings

DEVICE = Device(
    name="slow", kind="cpu", costs=StepCosts(0.010, 0.001, 0.0, 0.0, 0.0), gap_s=0.002, latency_s=0.003, request_s=0.5
)


def core_config(max_model_len: int = 1024, **flags: Any) -> CoreConfig:
    given_flags = Settings(**flags)
    return core_config_for(given_flags, scheduler_for(given_flags, max_model_len, "cpu"), VOCAB_SIZE)


def load(count: int, prompt: int = 20, output: int = 10, every_s: float = 0.0, **fields: Any) -> list[TraceRequest]:
    return [TraceRequest(arrival_s=index * every_s, prompt=prompt, output=output, **fields) for index in range(count)]


def run(trace: list[TraceRequest], num_blocks: int = 1000, replicas: int = 1, **options: Any) -> Outcome:
    names = "max_connections", "max_concurrency", "isolated", "host"
    bounds = {name: options.pop(name) for name in names if name in options}
    simulator = Simulator(core_config(**options), DEVICE, trace, num_blocks=num_blocks, num_replicas=replicas, **bounds)
    outcome = simulator.run()
    for replica in simulator._replicas:
        replica.check()
        assert replica.is_idle
        assert replica.kv.pool.num_free == num_blocks - 1
    return outcome


def check_outputs(trace: list[TraceRequest], outcome: Outcome) -> None:
    """Each request that was let in ends with the tokens that it was to have."""
    done = outcome.first != NOT_YET
    targets = np.array([trace[number].output for number in outcome.request])
    assert (outcome.output[done] == targets[done]).all()
    assert (outcome.output[~done] == 0).all()
    assert (outcome.sent[done] <= outcome.scheduled[done]).all()
    assert (outcome.scheduled[done] <= outcome.first[done]).all()
    assert (outcome.first[done] <= outcome.ended[done]).all()
    assert len(np.unique(outcome.request[done])) + outcome.refused.total() == len(trace)


def test_one_request_by_hand() -> None:
    """Prefill from idle: 3 + 2 + 10 + 20 ms; then steps of 2 + 10 + 1 ms each, planned ahead."""
    outcome = run(load(1))
    assert outcome.first[0] == pytest.approx(0.035)
    assert outcome.ended[0] == pytest.approx(0.035 + 9 * 0.013)
    assert outcome.steps == 10
    assert outcome.busy_s == pytest.approx(0.032 + 9 * 0.013)
    assert outcome.gaps.num == 9
    assert outcome.gaps.mean == pytest.approx(0.013)
    figures = Figures(outcome, 1, DEVICE.request_s)
    assert figures.latencies["ttft"].mean == pytest.approx(535.0)
    assert figures.latencies["tpot"].mean == pytest.approx(13.0)
    assert figures.latencies["itl"].mean == pytest.approx(13.0)
    assert figures.duration_s == pytest.approx(outcome.ended[0] + 0.5)


def test_steps_that_are_not_planned_ahead_wait_for_the_links() -> None:
    outcome = run(load(1), steps_in_flight=1)
    assert outcome.ended[0] == pytest.approx(0.035 + 9 * 0.016)


def test_an_output_ends_where_the_trace_says_whatever_was_asked_for() -> None:
    """A stop is seen one step late: the row that was planned meanwhile is in vain."""
    exact, more = run(load(3)), run(load(3, max_tokens=500))
    assert exact.output.tolist() == more.output.tolist() == [10, 10, 10]
    assert more.step_tokens > exact.step_tokens


def test_requests_wait_for_seats() -> None:
    trace = load(12)
    outcome = run(trace, max_num_seqs=4)
    check_outputs(trace, outcome)
    assert outcome.timeline.table()["running"].max() <= 4 + 2
    assert outcome.timeline.cause_shares()[Cause.SEATS] > 0.3
    figures = Figures(outcome, 1, 0.0)
    assert limit_of(figures) is Cause.SEATS
    assert "--max-num-seqs" in advice(figures, core_config(max_num_seqs=4))[0]


def test_requests_wait_for_blocks() -> None:
    trace = load(30, prompt=60, output=40)
    outcome = run(trace, num_blocks=20, max_num_seqs=64)
    check_outputs(trace, outcome)
    figures = Figures(outcome, 1, 0.0)
    assert limit_of(figures) is Cause.BLOCKS
    assert 0.5 < figures.usage_max <= 1.0
    assert "--gpu-memory" in advice(figures, core_config())[0]


@pytest.mark.parametrize(
    ("cause", "flags"),
    [
        (Cause.SEATS, {"max_num_seqs": 2}),
        (Cause.BLOCKS, {"num_blocks": 20}),
        (Cause.BLOCKS, {"num_blocks": 100, "watermark": 0.9}),
        (Cause.STEP, {"max_num_batched_tokens": 8}),
    ],
    ids=["seats", "memory", "watermark", "step"],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_scarce_is_what_is_waited_for(cause: Cause, flags: dict[str, Any], replicas: int) -> None:
    """The simulated time goes to the cause that the scheduler tells."""
    figures = Figures(run(load(40, prompt=60), replicas=replicas, **flags), replicas, 0.0)
    assert limit_of(figures) is cause
    assert figures.causes[cause] > 0.5


def test_each_cause_of_the_scheduler_has_a_name_here() -> None:
    assert CAUSES.keys() == {None, *Wait}
    assert {CAUSES[wait] for wait in Wait} == {Cause.SEATS, Cause.BLOCKS, Cause.STEP}


def test_preemptions_are_counted_and_paid_for() -> None:
    trace = load(30, prompt=40, output=200, every_s=0.01)
    outcome = run(trace, num_blocks=60, watermark=0.0, enable_prefix_caching=False)
    check_outputs(trace, outcome)
    assert outcome.preemptions > 0
    assert outcome.recomputed_tokens > 40 * outcome.preemptions
    assert outcome.step_tokens >= 30 * (40 + 199) + outcome.recomputed_tokens
    figures = Figures(outcome, 1, 0.0)
    assert any("preemptions" in words for words in advice(figures, core_config()))
    assert sum(figures.outcome.timeline.series(10)["preemptions"]) > 0


@pytest.mark.parametrize(("rates", "is_fast"), [((1e12, 1e12), True), ((1e3, 1e3), False)])
def test_preempted_requests_are_swapped_where_that_is_faster(rates: tuple[float, float], is_fast: bool) -> None:
    trace = load(30, prompt=40, output=200, every_s=0.01)
    options: dict[str, Any] = {"num_blocks": 60, "watermark": 0.0, "enable_prefix_caching": False}
    host = HostMemorySpec(1000, 4096, rates)
    swapped = run(trace, swap_space=1.0, host=host, **options)
    check_outputs(trace, swapped)
    assert swapped.preemptions > 0
    assert (swapped.recomputed_tokens < 16 * swapped.preemptions) == is_fast


def test_prefixes_come_back_from_host_memory() -> None:
    """20 systems prompts in turn, of which the device caches 5."""
    trace = [load(1, prompt=200, output=2, prefix=((f"system {number % 20}", 160),))[0] for number in range(60)]
    for number, request in enumerate(trace):
        request.arrival_s = 1.0 * number
    host = HostMemorySpec(400, 4096, (1e9, 1e9))
    assert run(trace, num_blocks=60, kv_offloading_size=1.0, host=host).cache_hits == 40 * 160
    assert run(trace, num_blocks=60).cache_hits == 0


def test_a_light_load_is_not_limited() -> None:
    outcome = run(load(20, every_s=1.0))
    figures = Figures(outcome, 1, 0.0)
    assert limit_of(figures) is Cause.NOBODY_WAITS
    assert figures.busy_share < 0.3
    assert advice(figures, core_config())[0].startswith("Nothing limits")


def test_prompts_wait_for_steps() -> None:
    trace = load(40, prompt=500, output=2)
    figures = Figures(run(trace, max_num_batched_tokens=64, num_blocks=5000), 1, 0.0)
    assert limit_of(figures) is Cause.STEP
    assert "--max-num-batched-tokens" in advice(figures, core_config())[0]


def test_common_prefixes_are_computed_once() -> None:
    trace = load(10, prompt=200, every_s=1.0, prefix=(("system", 160),))
    shared, alone = run(trace), run(trace, enable_prefix_caching=False)
    assert shared.cache_hits == 9 * 160
    assert alone.cache_hits == 0
    assert shared.step_tokens == alone.step_tokens - 9 * 160


def test_users_may_be_kept_apart() -> None:
    trace = load(6, prompt=200, every_s=1.0, prefix=(("system", 160),))
    for index, request in enumerate(trace):
        request.user = f"user-{index % 2}"
    assert run(trace, isolated=True).cache_hits == 4 * 160
    assert run(trace).cache_hits == 5 * 160


def test_the_next_turn_of_a_chat_finds_the_answer_cached() -> None:
    first = TraceRequest(arrival_s=0.0, prompt=64, output=33, prefix=(("chat", 64),))
    second = TraceRequest(arrival_s=5.0, prompt=120, output=8, prefix=(("chat", 110),))
    assert run([first, second]).cache_hits == 96


def test_choices_share_their_prompt() -> None:
    trace = load(3, prompt=64, output=5, n=4)
    outcome = run(trace)
    check_outputs(trace, outcome)
    assert len(outcome.output) == 12
    figures = Figures(outcome, 1, 0.0)
    assert (figures.completed, figures.input_tokens, figures.output_tokens) == (3, 3 * 64, 60)
    assert outcome.step_tokens == 3 * 64 + 12 * 4, "each prompt once, and every token but the last of a choice"


def test_two_replicas_take_half_the_time() -> None:
    trace = load(64, prompt=40, output=40)
    one, two = (run(trace, replicas=number, max_num_seqs=8) for number in (1, 2))
    check_outputs(trace, two)
    assert two.ended.max() == pytest.approx(one.ended.max() / 2, rel=0.2)
    assert two.num_blocks == 2 * one.num_blocks


def test_refusals() -> None:
    trace = [*load(20), *load(1, prompt=2000)]
    outcome = run(trace, max_num_seqs=2, max_num_queued_reqs=5)
    check_outputs(trace, outcome)
    assert outcome.refused == {QUEUE_FULL: 13, TOO_LONG: 1}
    assert run(load(20), max_connections=6).refused == {CONNECTIONS: 14}
    words = " ".join(advice(Figures(outcome, 1, 0.0), core_config(max_num_queued_reqs=5)))
    assert "--max-num-queued-reqs 5" in words
    assert "--max-model-len 1,024" in words


def test_clients_that_send_a_few_at_a_time() -> None:
    trace = load(20)
    outcome = run(trace, max_concurrency=3)
    check_outputs(trace, outcome)
    assert outcome.timeline.table()["running"].max() == 3
    assert np.unique(outcome.sent).size > 5


def test_the_same_trace_gives_the_same_times() -> None:
    trace = load(50, every_s=0.02, max_tokens=30)
    assert (run(trace, num_blocks=40).ended == run(trace, num_blocks=40).ended).all()


requests = st.builds(
    TraceRequest,
    arrival_s=st.floats(0.0, 0.5),
    prompt=st.integers(40, 90),
    output=st.integers(1, 60),
    max_tokens=st.one_of(st.none(), st.integers(60, 100)),
    prefix=st.sampled_from([(), (("a", 40),), (("b", 16), ("c", 20))]),
    priority=st.integers(0, 2),
    n=st.integers(1, 3),
)


@settings(max_examples=20, deadline=None)
@given(
    trace=st.lists(requests, min_size=1, max_size=25),
    num_blocks=st.integers(14, 80),
    replicas=st.integers(1, 3),
    seats=st.integers(1, 12),
    caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.05]),
)
def test_every_request_ends_as_the_trace_says(
    trace: list[TraceRequest], num_blocks: int, replicas: int, seats: int, caching: bool, watermark: float
) -> None:
    trace = sorted(trace, key=lambda request: request.arrival_s)
    outcome = run(trace, num_blocks, replicas, max_num_seqs=seats, enable_prefix_caching=caching, watermark=watermark)
    check_outputs(trace, outcome)
    assert outcome.gaps.num == (outcome.output[outcome.first != NOT_YET] - 1).sum()


# -- what is counted -------------------------------------------------------------------------------------------------


def test_timeline() -> None:
    timeline = Timeline()
    rows = {"time": [0.0, 1.0, 4.0], "running": [2.0, 4.0, 0.0], "output_tokens": [0.0, 10.0, 40.0], "cause": [1, 2, 0]}
    for index in range(3):
        timeline.add(*(rows[name][index] if name in rows else 0.0 for name in COLUMNS))
    assert timeline.mean("running") == pytest.approx((2 * 1 + 4 * 3) / 4)
    assert timeline.mean_while("running", Cause.SEATS) == 2.0
    assert timeline.mean_while("running", Cause.STEP) == 0.0
    assert timeline.cause_shares() == {
        Cause.NOBODY_WAITS: 0.0, Cause.SEATS: 0.25, Cause.BLOCKS: 0.75, Cause.STEP: 0.0,
    }  # fmt: skip
    series = timeline.series(2)
    assert series["running"].tolist() == pytest.approx([3.0, 4.0])
    assert series["output_tokens"].tolist() == pytest.approx([10.0, 10.0])


def test_gaps() -> None:
    gaps, found = GapHistogram(), np.random.default_rng(0).lognormal(-4.0, 1.0, 50_000)
    for part in np.split(found, 100):
        gaps.add(part)
    gaps.add(np.empty(0))
    assert gaps.num == 50_000
    assert gaps.mean == pytest.approx(found.mean())
    for p in (1, 50, 90, 99, 99.9):
        assert gaps.percentile(p) == pytest.approx(np.percentile(found, p), rel=0.02)
        assert np.percentile(gaps.samples(10_000), p) == pytest.approx(np.percentile(found, p), rel=0.05)
    assert GapHistogram().percentile(50) == 0.0
    assert GapHistogram().samples(10) == []
