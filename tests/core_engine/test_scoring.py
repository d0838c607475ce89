"""Log-probabilities of prompts, and requests that want no token at all."""

from __future__ import annotations

import dataclasses

import pytest

from shared.errors import ProtocolError
from shared.messages import FinishReason, StepResult
from tests.core_engine.loop_harness import FrontEnd, RunningEngine, WorkerThread
from tests.core_engine.simulation import Simulation

PROMPT = list(range(40, 61))


@pytest.mark.parametrize("budget", [1, 4, 7, 64])
def test_every_position_of_a_prompt_is_scored_whatever_the_chunks(budget):
    simulation = Simulation(max_num_batched_tokens=budget)
    request = simulation.submit(PROMPT, max_tokens=3, prompt_logprobs=1)
    simulation.run()
    simulation.check_outputs()
    assert len(request.sequences[0].prompt_records or []) == len(PROMPT) - 1


def test_a_scored_prompt_takes_nothing_from_the_cache_and_leaves_its_blocks_there():
    simulation = Simulation()
    simulation.submit(PROMPT, max_tokens=2)
    simulation.run()
    scored = simulation.submit(PROMPT, max_tokens=2, prompt_logprobs=0)
    simulation.run()
    plain = simulation.submit(PROMPT, max_tokens=2)
    simulation.run()
    assert [request.sequences[0].cached_tokens for request in (scored, plain)] == [0, 20]
    simulation.check_outputs()
    simulation.check_empty()


def test_only_the_first_choice_scores_the_prompt():
    simulation = Simulation()
    simulation.submit(PROMPT, max_tokens=3, n=3, prompt_logprobs=2)
    simulation.run()
    asked = {init.choice: init.params.prompt_logprobs for step in simulation.steps for init in step.new}
    assert asked == {0: 2, 1: None, 2: None}
    simulation.check_outputs()


def test_a_preempted_prompt_is_scored_from_the_beginning_again():
    simulation = Simulation(max_num_batched_tokens=4)
    request = simulation.submit(PROMPT, max_tokens=2, prompt_logprobs=0)
    for _ in range(3):
        simulation.tick()
    assert request.sequences[0].prompt_records
    simulation.core.rest(request.sequences[0], True)
    while simulation.tick():
        pass
    simulation.core.rest(request.sequences[0], False)
    simulation.run()
    simulation.check_outputs()


def test_a_worker_that_is_lost_in_the_middle_of_a_prompt():
    simulation = Simulation(max_num_batched_tokens=4)
    simulation.submit(PROMPT, max_tokens=2, prompt_logprobs=0, logprobs=0)
    for _ in range(3):
        simulation.tick()
    simulation.restart_worker()
    simulation.run()
    simulation.check_outputs()


def test_no_token_wanted_and_nothing_to_score_takes_no_step():
    simulation = Simulation()
    request = simulation.submit(PROMPT, max_tokens=0, n=2)
    assert not simulation.tick()
    assert [sequence.finish_reason for sequence in request.sequences] == [FinishReason.LENGTH] * 2
    simulation.check_empty()


def test_scoring_alone_ends_after_the_prompt_without_a_token():
    simulation = Simulation()
    request = simulation.submit(PROMPT, max_tokens=0, prompt_logprobs=0, logprobs=0, n=2)
    simulation.run()
    simulation.check_outputs()
    simulation.check_empty()
    assert [sequence.num_generated for sequence in request.sequences] == [0, 0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: dataclasses.replace(result, logprobs=[]),
        lambda result: dataclasses.replace(result, logprobs=[*result.logprobs, (1, b"")]),
        lambda result: dataclasses.replace(result, prompt_logprobs=[]),
        lambda result: dataclasses.replace(result, prompt_logprobs=[(0, [b""])]),
        lambda result: dataclasses.replace(result, prompt_logprobs=[(1, [])]),
        lambda result: dataclasses.replace(result, prompt_logprobs=[(7, [])]),
    ],
)
def test_a_result_whose_records_do_not_match_the_step_ends_the_epoch(damage):
    simulation = Simulation()
    simulation.submit(PROMPT, max_tokens=3, logprobs=0, prompt_logprobs=0)
    simulation.submit(PROMPT[:3], max_tokens=3)
    simulation.plan()
    result: StepResult = simulation.worker.execute(simulation.sent.popleft())
    with pytest.raises(ProtocolError, match="log-probabilities"):
        simulation.core.settle(simulation.replica, damage(result))


def test_records_reach_the_front_end_through_real_sockets(tmp_path):
    with (
        RunningEngine(tmp_path) as engine,
        FrontEnd(engine.frontends.listener.endpoint) as front_end,
        WorkerThread(engine.workers.listener.endpoint),
    ):
        front_end.wait_ready()
        asked = front_end.submit(PROMPT, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
        scored = front_end.submit(PROMPT, max_tokens=0, prompt_logprobs=1)
        plain = front_end.submit(PROMPT[:5], max_tokens=4, ignore_eos=True)
        front_end.wait_over()
    (log,) = asked.logs
    assert len(log.records) == len(log.ids) == 4
    assert log.prompt is not None
    assert log.prompt.records == scored.logs[0].prompt.records
    assert log.prompt.records[0].isdigit()
    assert (len(scored.logs[0].ids), scored.logs[0].end.reason) == (0, FinishReason.LENGTH)
    assert (plain.logs[0].records, plain.logs[0].prompt) == ([], None)
