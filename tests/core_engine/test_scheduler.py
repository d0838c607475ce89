"""Worked examples: which tokens each step computes, and whose blocks it uses."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import ErrorCode, RequestError
from shared.messages import FinishReason
from tests.core_engine.simulation import EOS_IDS, VOCAB, Simulation, reference


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 5 * position) % VOCAB for position in range(length)]


def rows(simulation: Simulation, step: int) -> dict[str, tuple[int, bool]]:
    """Request → (tokens, is prefill) of one step; negative counts from the last."""
    return {row.request_id: (row.num_tokens, row.is_prefill) for row in simulation.records[step].rows}


def table(simulation: Simulation, rid: str) -> list[int]:
    """The block table of a request in the last step that computed it."""
    return next(
        row.block_table for record in reversed(simulation.records) for row in record.rows if row.request_id == rid
    )


def test_blocks_of_the_paged_attention_example() -> None:
    """8 blocks of 16: A takes two, B and C join while A decodes, A leaves, D takes A's blocks in the same step."""
    simulation = Simulation(9, block_size=16, steps_in_flight=1, max_num_batched_tokens=256)
    simulation.submit(prompt(20), "A", max_tokens=4, ignore_eos=True)
    simulation.tick()
    assert len(table(simulation, "A")) == 2
    simulation.submit(prompt(40, 1), "B", max_tokens=8, ignore_eos=True)
    simulation.submit(prompt(40, 2), "C", max_tokens=8, ignore_eos=True)
    simulation.tick()
    assert rows(simulation, -1) == {"A": (1, False), "B": (40, True), "C": (40, True)}
    assert simulation.replica.kv.pool.num_free == 0
    simulation.submit(prompt(30, 3), "D", max_tokens=2, ignore_eos=True)
    simulation.tick()
    assert "D" not in rows(simulation, -1)
    blocks_of_a = set(table(simulation, "A"))
    simulation.tick()
    assert simulation.requests[0].finished
    simulation.tick()
    assert simulation.records[-1].finished == ["A"]
    assert rows(simulation, -1) == {"B": (1, False), "C": (1, False), "D": (30, True)}
    assert set(table(simulation, "D")) == blocks_of_a
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


def test_a_long_prompt_in_chunks_while_others_decode() -> None:
    simulation = Simulation(
        200, block_size=16, max_num_batched_tokens=514, max_prefill_tokens=512, max_model_len=4096, steps_in_flight=2
    )
    simulation.submit(prompt(10), "x", max_tokens=30, ignore_eos=True)
    simulation.submit(prompt(12, 1), "y", max_tokens=30, ignore_eos=True)
    simulation.tick()
    first = len(simulation.records)
    simulation.submit(prompt(2048, 2), "long", max_tokens=3, ignore_eos=True)
    for _ in range(6):
        simulation.tick()
    for step in range(first, first + 4):
        assert rows(simulation, step) == {"x": (1, False), "y": (1, False), "long": (512, True)}
    assert rows(simulation, first + 4) == {"x": (1, False), "y": (1, False), "long": (1, False)}
    record = simulation.records[first]
    assert (record.num_tokens, record.num_prefills, record.num_decodes) == (514, 1, 2)
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


def test_decodes_are_never_held_up_by_prompts() -> None:
    simulation = Simulation(max_num_batched_tokens=4)
    simulation.submit(prompt(4), "a", max_tokens=20, ignore_eos=True)
    simulation.tick()
    simulation.submit(prompt(40, 1), "b", max_tokens=2)
    for _ in range(10):
        simulation.tick()
        assert rows(simulation, -1)["a"] == (1, False)
        assert rows(simulation, -1)["b"] == (3, True)
    simulation.run()
    simulation.check_empty()


def test_one_partly_computed_prompt_at_a_time() -> None:
    simulation = Simulation(max_num_batched_tokens=16, max_num_partial_prefills=1)
    simulation.submit(prompt(40), "a")
    simulation.submit(prompt(40, 1), "b")
    simulation.plan()
    simulation.plan()
    assert rows(simulation, 0) == {"a": (16, True)}
    assert rows(simulation, 1) == {"a": (16, True)}
    simulation.settle()
    simulation.plan()
    assert rows(simulation, 2) == {"a": (8, True), "b": (8, True)}
    simulation.run()
    simulation.check_outputs()


def test_several_partly_computed_prompts_share_the_step() -> None:
    simulation = Simulation(max_num_batched_tokens=16, max_num_partial_prefills=2, steps_in_flight=3)
    simulation.submit(prompt(40), "long")
    simulation.submit(prompt(12, 1), "short")
    simulation.plan()
    simulation.plan()
    assert rows(simulation, 0) == {"long": (8, True), "short": (8, True)}
    assert rows(simulation, 1) == {"long": (8, True), "short": (4, True)}
    simulation.run()
    simulation.check_outputs()


def test_prefill_tokens_are_bounded_apart_from_the_budget() -> None:
    simulation = Simulation(max_num_batched_tokens=64, max_prefill_tokens=10)
    simulation.submit(prompt(35), "a")
    simulation.run()
    assert [rows(simulation, step)["a"] for step in range(4)] == [(10, True), (10, True), (10, True), (5, True)]


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    simulation = Simulation(max_num_batched_tokens=32, enable_chunked_prefill=False)
    simulation.submit(prompt(20), "a")
    simulation.submit(prompt(20, 1), "b")
    simulation.plan()
    simulation.plan()
    assert rows(simulation, 0) == {"a": (20, True)}
    assert rows(simulation, 1) == {"a": (1, False), "b": (20, True)}
    simulation.run()
    simulation.check_outputs()


def test_no_step_goes_beyond_the_known_length() -> None:
    simulation = Simulation(steps_in_flight=3)
    simulation.submit(prompt(8), "a", max_tokens=3, ignore_eos=True)
    simulation.run()
    assert len(simulation.steps) == 3


def test_a_stop_token_costs_one_discarded_row() -> None:
    simulation = Simulation(steps_in_flight=2)
    request = simulation.submit(prompt(8, 2), "a", max_tokens=200)
    output, reason = reference(request, 0, 208)
    assert reason is FinishReason.STOP
    simulation.run()
    assert simulation.outputs["a", 0] == output
    assert len(simulation.steps) == len(output) + 1
    simulation.check_empty()


def test_the_newest_is_preempted_and_resumes() -> None:
    """7 blocks of 16, two prompts of 34 tokens, 35 new tokens each: 3 + 3 blocks at first, 5 + 5 in the end."""
    simulation = Simulation(7, block_size=16)
    simulation.submit(prompt(34), "old", max_tokens=35, ignore_eos=True)
    simulation.submit(prompt(34, 1), "new", max_tokens=35, ignore_eos=True)
    simulation.run()
    assert [rid for record in simulation.records for rid in record.preempted] == ["new"]
    old, new = (request.sequences[0] for request in simulation.requests)
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert len(simulation.outputs["old", 0]) == len(simulation.outputs["new", 0]) == 35
    assert new.cached_tokens == 0, "blocks found again after a preemption are no cache hits"
    simulation.check_outputs()
    simulation.check_empty()


def test_the_lowest_priority_is_preempted_first() -> None:
    simulation = Simulation(7, block_size=16)
    simulation.submit(prompt(34), "unimportant", max_tokens=35, ignore_eos=True, priority=5)
    simulation.submit(prompt(34, 1), "important", max_tokens=35, ignore_eos=True)
    simulation.run()
    assert [rid for record in simulation.records for rid in record.preempted] == ["unimportant"]
    simulation.check_outputs()
    simulation.check_empty()


def test_nothing_is_admitted_while_a_preemption_drains() -> None:
    simulation = Simulation(7, block_size=16, steps_in_flight=2)
    simulation.submit(prompt(34), "old", max_tokens=35, ignore_eos=True)
    simulation.submit(prompt(34, 1), "new", max_tokens=35, ignore_eos=True)
    while not simulation.replica.num_draining_preemptions:
        if simulation.plan() is None and not simulation.replica.num_draining_preemptions:
            simulation.settle()
    assert simulation.replica.num_running == 2
    simulation.submit([1], "tiny", max_tokens=1)
    while simulation.replica.num_draining_preemptions:
        simulation.plan()
        assert "tiny" not in rows(simulation, -1)
        simulation.settle()
    simulation.run()
    simulation.check_outputs()


def test_watermark() -> None:
    simulation = Simulation(21, block_size=4, watermark=0.25, max_num_batched_tokens=256)
    simulation.submit(prompt(56), "alone", max_tokens=1)
    simulation.submit(prompt(8, 1), "second", max_tokens=1)
    simulation.plan()
    # 14 of 20 blocks are taken; 2 more would leave 4, and floor(0.25 * 21) = 5 must stay free.
    assert rows(simulation, 0) == {"alone": (56, True)}
    simulation.run()
    simulation.check_outputs()


def test_expected_output_is_kept_free() -> None:
    simulation = Simulation(21, block_size=4, max_num_batched_tokens=256)
    simulation.submit(prompt(20), "a", max_tokens=60, ignore_eos=True)
    simulation.submit(prompt(36, 1), "b", max_tokens=40, ignore_eos=True)
    simulation.plan()
    # 5 + 9 blocks for the prompts; a quarter of 60 and of 40 tokens is expected: 4 and 3 blocks more.
    assert set(rows(simulation, 0)) == {"a"}
    simulation.core.scheduler.admission.expected_ratio = 0.1
    simulation.plan()
    assert set(rows(simulation, 1)) == {"a", "b"}
    simulation.run()
    assert simulation.core.scheduler.admission.expected_ratio >= 0.1
    simulation.check_outputs()


@pytest.mark.parametrize(
    ("length", "max_tokens", "words"),
    [
        (812, 9000, "max_tokens 9000 + prompt 812 > max_model_len 8192"),
        (8192, None, "max_tokens 1 + prompt 8192 > max_model_len 8192"),
        (8191, 2, "max_tokens 2 + prompt 8191 > max_model_len 8192"),
        (0, 5, "the prompt is empty"),
        (700, 400, r"max_tokens 400 \+ prompt 700 > 1008 tokens, the size of the KV cache \(63 blocks of 16\)"),
    ],
)
def test_what_can_never_run_is_refused(length: int, max_tokens: int | None, words: str) -> None:
    simulation = Simulation(64, block_size=16, max_model_len=8192, max_num_batched_tokens=8192)
    with pytest.raises(RequestError, match=words if "\\" in words else words.replace("+", r"\+")) as refused:
        simulation.submit(prompt(length), max_tokens=max_tokens)
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert not simulation.core.waiting
    simulation.check_empty()


def test_without_max_tokens_a_request_may_fill_the_cache() -> None:
    simulation = Simulation(9, block_size=4)
    simulation.submit(prompt(5), max_tokens=None, ignore_eos=True)
    simulation.run()
    assert len(simulation.outputs["r0", 0]) == 32 - 5
    simulation.check_empty()


def test_the_waiting_queue_is_bounded() -> None:
    """Beside those that find a free seat, and those who come to an idle engine."""
    simulation = Simulation(max_num_seqs=2, max_num_queued_reqs=3)
    simulation.submit(prompt(5), n=4)
    with pytest.raises(RequestError, match="2 requests are waiting and at most 3 may, and this one has 2 choices"):
        simulation.submit(prompt(5), n=2)
    simulation.submit(prompt(5))
    with pytest.raises(RequestError, match="3 requests are waiting and at most 3 may; try") as refused:
        simulation.submit(prompt(5))
    assert refused.value.code is ErrorCode.OVERLOADED
    simulation.run()
    simulation.submit(prompt(5), n=7)
    simulation.run()
    simulation.check_outputs()


def test_with_seats_free_nobody_may_wait_and_all_are_served() -> None:
    simulation = Simulation(max_num_seqs=4, max_num_queued_reqs=0)
    for first in range(4):
        simulation.submit(prompt(5, first))
    with pytest.raises(RequestError, match="0 requests are waiting and at most 0 may"):
        simulation.submit(prompt(5))
    simulation.run()
    simulation.submit(prompt(5))
    simulation.run()
    simulation.check_outputs()


def test_where_memory_is_short_a_free_seat_is_no_place() -> None:
    simulation = Simulation(8, block_size=4, max_num_seqs=8, max_num_queued_reqs=2)
    simulation.submit(prompt(20), max_tokens=7)
    simulation.plan()
    simulation.submit(prompt(20, 1), max_tokens=7)
    simulation.plan()
    assert len(simulation.core.waiting) == 1
    simulation.submit(prompt(20, 2), max_tokens=7)
    with pytest.raises(RequestError, match="2 requests are waiting and at most 2 may"):
        simulation.submit(prompt(20, 3), max_tokens=7)
    simulation.run()
    simulation.check_outputs()


def test_waiting_prompt_tokens_are_bounded() -> None:
    simulation = Simulation(max_num_queued_tokens=20)
    simulation.submit(prompt(25))
    for length, n in ((1, 1), (10, 2)):
        with pytest.raises(RequestError, match="25 prompt tokens are waiting and at most 20 may") as refused:
            simulation.submit(prompt(length), n=n)
        assert refused.value.code is ErrorCode.OVERLOADED
    simulation.run()
    simulation.submit(prompt(5), n=2)
    with pytest.raises(RequestError, match="10 prompt tokens are waiting"):
        simulation.submit(prompt(6), n=2)
    simulation.submit(prompt(5), n=2)
    simulation.run()
    simulation.check_outputs()
    samples = {
        labels["reason"]: value
        for name, labels, value in simulation.core.metrics.samples(simulation.core.replicas, 0)
        if name == "vllm:admission_rejections_total"
    }
    assert samples == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 3}


def test_slots_bound_the_running_sequences() -> None:
    simulation = Simulation(max_num_seqs=2)
    for first in range(5):
        simulation.submit(prompt(4, first), max_tokens=6)
    simulation.run()
    assert max(len(record.rows) for record in simulation.records) == 2
    simulation.check_outputs()


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_end_conditions(min_tokens: int) -> None:
    simulation = Simulation(200, max_model_len=128)
    for first in range(12):
        simulation.submit(prompt(6, first), f"eos{first}", max_tokens=100, min_tokens=min_tokens)
        simulation.submit(prompt(6, first), f"all{first}", max_tokens=100, ignore_eos=True, min_tokens=min_tokens)
        simulation.submit(prompt(6, first), f"ids{first}", max_tokens=100, ignore_eos=True, stop_token_ids=[50, 3])
    simulation.run()
    simulation.check_outputs()
    ended = {(request.rid[:3], request.sequences[0].finish_reason) for request in simulation.requests}
    assert ended >= {("eos", FinishReason.STOP), ("all", FinishReason.LENGTH), ("ids", FinishReason.STOP)}
    for request in simulation.requests:
        output = simulation.outputs[request.rid, 0]
        assert len(output) >= request.params.min_tokens
        if request.rid.startswith("all"):
            assert len(output) == 100


def test_stop_reason_is_the_users_id_and_not_the_models() -> None:
    simulation = Simulation()
    request = simulation.submit(prompt(4), stop_token_ids=[3, 50])
    sequence = request.sequences[0]
    assert EOS_IDS[0] == 3
    assert sequence.end_of(3, 5) == (FinishReason.STOP, None)
    assert sequence.end_of(50, 5) == (FinishReason.STOP, 50)
    ignoring = simulation.submit(prompt(4), stop_token_ids=[3], ignore_eos=True).sequences[0]
    assert ignoring.end_of(3, 5) == (FinishReason.STOP, 3)
    assert ignoring.end_of(34, 5) is None


def test_a_resumed_request_goes_on_after_its_tokens() -> None:
    simulation = Simulation()
    request = simulation.submit(prompt(6), "whole", max_tokens=20, ignore_eos=True)
    simulation.run()
    whole = simulation.outputs["whole", 0]
    again = simulation.submit(prompt(6), "again", max_tokens=20, ignore_eos=True)
    simulation.core.end(again.sequences.pop(), FinishReason.ABORT)
    simulation.core.submit(again, {0: np.array(whole[:9], np.int32)})
    simulation.outputs["again", 0] = whole[:9]
    simulation.run()
    assert simulation.outputs["again", 0] == whole
    assert simulation.steps[-1].number > 0
    assert again.sequences[0].prompt_len == len(request.prompt)
    simulation.check_empty()


def test_an_abort_frees_its_memory_within_the_window() -> None:
    simulation = Simulation(steps_in_flight=2)
    request = simulation.submit(prompt(30), "a", max_tokens=100, ignore_eos=True)
    for _ in range(4):
        simulation.tick()
    simulation.core.end(request.sequences[0], FinishReason.ABORT)
    simulation.tick()
    assert simulation.replica.num_running == 0
    simulation.run()
    simulation.check_empty()


def test_restart_keeps_the_order() -> None:
    simulation = Simulation(max_num_seqs=4)
    for first in range(6):
        simulation.submit(prompt(4, first), f"r{first}", max_tokens=20, ignore_eos=True)
    for _ in range(5):
        simulation.tick()
    simulation.restart_worker()
    assert [sequence.request.rid for sequence in simulation.core.waiting] == [f"r{i}" for i in range(6)]
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()


def test_metrics() -> None:
    simulation = Simulation(7, block_size=16)
    for _ in range(2):
        simulation.submit(prompt(34), max_tokens=35, ignore_eos=True)
    simulation.submit(prompt(34), max_tokens=1, n=2)
    simulation.run()
    metrics = simulation.core.metrics
    found = {
        name + str(labels.get("finished_reason", "")): value
        for name, labels, value in metrics.samples(simulation.core.replicas, len(simulation.core.waiting))
        if "le" not in labels
    }
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"] == 4 * 34
    assert found["vllm:prefix_cache_hits_total"] == found["vllm:prompt_tokens_cached_total"] == 64
    preempted = sum(len(record.preempted) for record in simulation.records)
    assert found["vllm:num_preemptions_total"] == found["vllm:request_num_preemptions_sum"] == preempted > 0
    assert found["vllm:generation_tokens_total"] == found["vllm:request_generation_tokens_sum"] == 72
    assert found["vllm:request_success_totallength"] == 3
    assert found["vllm:request_success_totalerror"] == 0
    assert found["vllm:request_params_max_tokens_count"] == found["vllm:request_queue_time_seconds_count"] == 3
    assert found["vllm:iteration_tokens_total_count"] == len(simulation.steps)


def test_short_steps_have_one_more_in_flight_unless_they_hold_prompts() -> None:
    simulation = Simulation(short_step_s=0.5)
    core, replica = simulation.core, simulation.core.replicas[0]
    simulation.submit([1, 2, 3], max_tokens=20)
    assert core.plan(replica) is not None
    replica.last_compute_s = 0.1
    assert core.plan(replica) is not None
    assert core.plan(replica) is None, "the first of them holds a prompt"
    replica.window[0].prefills.clear()
    assert core.plan(replica) is not None
    assert core.plan(replica) is None
    assert len(replica.window) == 3
