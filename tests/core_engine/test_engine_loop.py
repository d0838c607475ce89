"""The engine with its sockets: epochs, refusals, hang-ups, signs of life."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from core_engine.engine import Engine
from core_engine.request import Request, stop_ids_of
from shared.errors import ErrorCode, StartupError
from shared.hop import Request as HopRequest
from shared.messages import FINISHED, Abort, Ack, AckEntry, Attempt, Epoch, FinishReason, StepResult
from shared.transport import Connector
from tests.core_engine.loop_harness import FrontEnd, RunningEngine, WorkerThread, hello, two_front_ends, until
from tests.core_engine.simulation import EOS_IDS, VOCAB, reference


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 5 * position) % VOCAB for position in range(length)]


def expected(request: HopRequest, choice: int = 0) -> tuple[list[int], FinishReason]:
    params = request.spec.params
    ids = np.frombuffer(request.spec.prompt, np.int32)
    alone = Request(request.rid, params, ids, 0, 0.0, stop_ids_of(params, EOS_IDS), EOS_IDS)
    assert params.max_tokens is not None
    return reference(alone, choice, len(ids) + params.max_tokens)


def check(request: HopRequest) -> None:
    for log in request.logs:
        assert log.end is not None
        assert (log.ids.tolist(), log.end.reason) == expected(request, log.choice), request.rid


def check_at_rest(engine: Engine) -> None:
    """No block, slot or request is left behind."""
    until(lambda: engine.core.replicas and not engine.frontends.child.requests)
    replica = engine.core.replicas[0]
    until(lambda: replica.num_running == 0)
    replica.check()
    assert replica.kv.pool.num_free == replica.kv.pool.num_blocks - 1
    assert not engine.core.waiting


def test_requests_are_served(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    running = RunningEngine(tmp_path, step_log=str(log))
    with running as engine, WorkerThread(running.workers, num_blocks=40) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        for index in range(30):
            front.submit(prompt(3 + index % 20, index), n=1 + index % 3, max_tokens=1 + 3 * index % 40)
        front.wait_over()
        check_at_rest(engine)
        assert front.accepted_ids == set(front.all)
        until(lambda: front.metric("vllm:num_requests_running") == 0, meanwhile=front.turn)
        front.wait(lambda: front.metric("vllm:request_params_n_count") == 30)
        total = sum(len(item.ids) for request in front.all.values() for item in request.logs)
        assert front.metric("vllm:generation_tokens_total") == total
        assert front.hello is not None
        assert front.hello.card is not None
        assert (front.hello.card.vocab_size, front.hello.card.max_model_len) == (VOCAB, 256)
    for request in front.all.values():
        check(request)
        assert request.prompt_tokens == len(request.spec.prompt) // 4
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    timings, records = [line for line in lines if "wall_s" in line], [line for line in lines if "rows" in line]
    assert [record["step"] for record in records] == list(range(1, len(worker.executed) + 1))
    assert [timing["step"] for timing in timings] == list(range(1, len(worker.executed) + 1))
    assert [timing["num_tokens"] for timing in timings] == [record["num_tokens"] for record in records]
    assert all(timing["compute_s"] > 0.0 for timing in timings)
    assert {row["request_id"] for record in records for row in record["rows"]} == set(front.all)


def test_requests_are_swapped(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path, swap_space=1.0, kv_offloading_size=1.0, preemption_mode="swap")
    with (
        running as engine,
        WorkerThread(running.workers, num_blocks=20, num_host_blocks=40) as worker,
        FrontEnd(running.front) as front,
    ):
        front.wait_ready()
        for index in range(20):
            front.submit(prompt(8 + index % 20, 11 * index), max_tokens=30 + index % 18)
        front.wait_over()
        until(lambda: engine.core.replicas[0].is_idle and not len(engine.core.replicas[0].kv.host.transfers))
        check_at_rest(engine)
        front.wait(lambda: front.metric("headrace:swapped_preemptions_total") > 0)
        assert front.metric("headrace:kv_blocks_to_host_total") > 0
        num_steps = len(worker.executed)
        until_s = time.monotonic() + 0.3
        front.wait(lambda: time.monotonic() > until_s)
        assert len(worker.executed) == num_steps, "an idle engine sends steps"
    for request in front.all.values():
        check(request)


def test_a_worker_that_is_started_again(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path)
    with running as engine, FrontEnd(running.front) as front:
        front.wait(lambda: front.hello is not None)
        assert front.hello is not None
        assert not front.hello.ready
        assert front.hello.status == "waiting for a worker"
        for index in range(12):
            front.submit(prompt(10, index), max_tokens=60, ignore_eos=True)
        with WorkerThread(running.workers) as first:
            front.wait(lambda: len(first.executed) > 20)
        with WorkerThread(running.workers) as second:
            front.wait_over()
            check_at_rest(engine)
            assert second.epochs != first.epochs
        for request in front.all.values():
            check(request)


def test_epochs_end(tmp_path: Path) -> None:
    """By a failure, a gap, a malformed frame, and a window without progress."""
    running = RunningEngine(tmp_path, step_timeout_s=0.5)
    with running as engine, WorkerThread(running.workers) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        for index in range(4):
            front.submit(prompt(10, index), max_tokens=240, ignore_eos=True)

        def get_on() -> None:
            done = len(worker.executed)
            front.wait(lambda: len(worker.executed) > done + 10)

        get_on()
        worker.failures = 1
        front.wait(lambda: len(worker.epochs) == 2)
        get_on()
        empty = np.empty(0, np.int32)
        gap = StepResult(worker.epochs[-1], 10_000, empty, empty)
        worker.errands.append(lambda: worker.results.send(gap))
        front.wait(lambda: len(worker.epochs) == 3)
        get_on()
        stale = StepResult(Epoch(*worker.epochs[0]), 1, empty, empty)
        worker.errands.append(lambda: worker.results.send(stale))
        front.wait(lambda: engine.workers.stale > 0)
        worker.errands.append(lambda: worker.results.socket.send_multipart([b"\xc1", b"junk"]))
        front.wait(lambda: len(worker.epochs) == 4)
        get_on()
        worker.deaf = True
        front.wait(lambda: len(worker.epochs) > 4)
        worker.deaf = False
        front.wait_over()
        check_at_rest(engine)
        for request in front.all.values():
            check(request)


def test_a_request_that_a_worker_cannot_survive_is_failed(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path)
    with running as engine, WorkerThread(running.workers) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        worker.failures = 5
        request = front.submit(prompt(10))
        front.wait_over()
        end = request.logs[0].end
        assert end is not None
        assert end.error is not None
        assert end.error.code == ErrorCode.POISON
        assert "device lost" in end.error.message
        assert worker.failures == 0
        check_at_rest(engine)


def test_refusals(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path, max_num_queued_reqs=2)
    with running as engine, FrontEnd(running.front) as front:
        front.wait(lambda: front.hello is not None)
        too_long = front.submit(prompt(200), max_tokens=100)
        outside = front.submit([1, 2, VOCAB])
        front.wait_over()
        for request, words in (
            (too_long, "max_tokens 100 + prompt 200 > max_model_len 256"),
            (outside, f"prompt[2] = {VOCAB} is not a token id in 0..{VOCAB - 1}"),
        ):
            end = request.logs[0].end
            assert end is not None
            assert end.reason is FinishReason.ERROR
            assert end.error is not None
            assert (end.error.code, end.error.message) == (ErrorCode.INVALID_REQUEST, words)
            assert request.rid not in front.accepted_ids
        larger_than_the_cache = front.submit(prompt(100), max_tokens=100)
        waiting = front.submit(prompt(5))
        front.wait(lambda: front.accepted_ids == {larger_than_the_cache.rid, waiting.rid})
        overload = front.submit(prompt(5))
        front.wait(lambda: overload.over)
        assert overload.logs[0].end is not None
        assert overload.logs[0].end.error is not None
        assert overload.logs[0].end.error.code == ErrorCode.OVERLOADED
        with WorkerThread(running.workers, num_blocks=41):
            front.wait_over()
            check(waiting)
            end = larger_than_the_cache.logs[0].end
            assert end is not None
            assert end.error is not None
            assert "160 tokens, the size of the KV cache" in end.error.message
            check_at_rest(engine)
            front.wait(lambda: front.metric("vllm:request_success_total", finished_reason="error") == 4)


def test_hang_ups_free_memory(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path, max_num_seqs=4)
    with running as engine, WorkerThread(running.workers) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        kept = front.submit(prompt(6), max_tokens=200, ignore_eos=True)
        gone = [front.submit(prompt(6, index), max_tokens=200, ignore_eos=True) for index in range(1, 7)]
        front.wait(lambda: len(worker.executed) > 3)
        for request in gone:
            front.parent.close(request)
            del front.all[request.rid]
        until(lambda: len(engine.frontends.child.requests) == 1, meanwhile=front.turn)
        until(lambda: engine.core.replicas[0].num_running <= 1, meanwhile=front.turn)
        front.wait_over()
        check(kept)
        check_at_rest(engine)
        front.wait(lambda: front.metric("vllm:request_success_total", finished_reason="abort") == 6)


def test_a_choice_that_nobody_needs_more_of(tmp_path: Path) -> None:
    """A stop string was found above: the tokenizer acknowledges with FINISHED."""
    running = RunningEngine(tmp_path)
    with running as engine, WorkerThread(running.workers) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        request = front.submit(prompt(6), n=2, max_tokens=200, ignore_eos=True)
        front.wait(lambda: len(worker.executed) > 3)
        assert request.lower is not None
        ids = request.rid, request.lower.attempt, request.lower.handle
        front.link.send(Ack([AckEntry(*ids, [FINISHED, 0])]))
        until(lambda: engine.core.replicas[0].num_running == 1)
        front.link.send(Abort(*ids[:2]))
        check_at_rest(engine)


def test_a_worker_that_can_never_work(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path)
    with FrontEnd(running.front) as front:
        running._thread.start()
        front.wait(lambda: front.hello is not None)
        with WorkerThread(running.workers, error="tensor model.norm.weight is missing"):
            until(lambda: not running._thread.is_alive(), meanwhile=front.turn)
        front.turn()
        assert isinstance(running.error, StartupError)
        assert "tensor model.norm.weight is missing" in str(running.error)
        assert front.hello is not None
        assert "model.norm.weight" in front.hello.status


def test_a_worker_that_cannot_work_where_others_have(tmp_path: Path) -> None:
    """One more, or the same one started again: the engine goes on with what it has, and waits for a better one."""
    running = RunningEngine(tmp_path)
    with running as engine, FrontEnd(running.front) as front:
        with WorkerThread(running.workers, name="a"):
            front.wait_ready()
            with WorkerThread(running.workers, name="b", error="no memory is left") as other:
                front.wait(lambda: other.epochs)
                front.submit(prompt(6), max_tokens=20, ignore_eos=True)
                front.wait_over()
            assert len(engine.core.replicas) == 1
        request = front.submit(prompt(6), max_tokens=20, ignore_eos=True)
        with WorkerThread(running.workers, name="a", error="no memory is left") as again:
            front.wait(lambda: again.epochs)
        with WorkerThread(running.workers, name="a"):
            front.wait_over()
        assert request.over
    assert running.error is None


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--max-model-len 300 is more than the model's 256 positions"):
        RunningEngine(tmp_path, max_model_len=300)
    with pytest.raises(StartupError, match="--max-num-batched-tokens 64 < max_model_len 256"):
        RunningEngine(tmp_path, enable_chunked_prefill=False)


def test_two_workers_share_the_queue(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path, max_num_seqs=2)
    with (
        running as engine,
        WorkerThread(running.workers, name="a") as one,
        WorkerThread(running.workers, name="b") as two,
        FrontEnd(running.front) as front,
    ):
        front.wait(lambda: len(engine.core.replicas) == 2)
        front.wait_ready()
        for index in range(12):
            front.submit(prompt(8, index), max_tokens=30, ignore_eos=True)
        front.wait_over()
        for request in front.all.values():
            check(request)
        assert one.executed
        assert two.executed
        for replica in engine.core.replicas:
            assert replica.kv.pool.num_free == replica.kv.pool.num_blocks - 1


def test_a_request_that_is_submitted_again_goes_on(tmp_path: Path) -> None:
    """Under a new attempt and handle the live sequence is kept: nothing is computed twice."""
    running = RunningEngine(tmp_path)
    with running as engine, WorkerThread(running.workers, num_blocks=200) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        requests = [front.submit(prompt(10, index), max_tokens=150, ignore_eos=True) for index in range(3)]
        for attempt in range(1, 4):
            done = len(worker.executed)
            front.wait(lambda done=done: len(worker.executed) > done + 20)
            for request in requests[:2]:
                front.parent.place(request, request.spec, Attempt(1, front.boot, attempt))
        front.wait_over()
        for request in requests:
            check(request)
        assert len(worker.executed) < 170
        check_at_rest(engine)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_rows_for_a_request_that_waits(tmp_path: Path, policy: str) -> None:
    """Another tokenizer has its first tokens, from an engine that is gone: it begins again, and counts once."""
    running = RunningEngine(tmp_path, max_num_seqs=1, scheduling_policy=policy)
    with two_front_ends(running) as (engine, worker, gone, front):
        first = gone.submit(prompt(6), max_tokens=240, ignore_eos=True)
        gone.wait(lambda: worker.executed)
        before = gone.submit(prompt(9, 3), max_tokens=20, ignore_eos=True)
        gone.wait(lambda: before.rid in gone.accepted_ids)
        request = front.submit_with_rows(before.rid, before.spec, {0: expected(before)[0][:5]})
        front.wait(lambda: request.rid in front.accepted_ids)
        gone.wait(lambda: first.over)
        front.wait_over()
        check(request)
        check_at_rest(engine)
        until(lambda: front.metric("vllm:request_success_total", finished_reason="length") == 2, meanwhile=front.turn)
        assert front.metric("vllm:request_success_total", finished_reason="abort") == 0
        assert front.metric("vllm:request_prompt_tokens_count") == 2


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("runs", [False, True])
def test_rows_that_cannot_be(tmp_path: Path, n: int, runs: bool) -> None:
    """Another tokenizer has ids that the model lacks: the request ends with an error, all choices of it, and counts
    once."""
    running = RunningEngine(tmp_path, max_num_seqs=n if runs else 1)
    with two_front_ends(running) as (engine, worker, gone, front):
        if not runs:
            front.submit(prompt(6), max_tokens=240, ignore_eos=True)
            front.wait(lambda: worker.executed)
        before = gone.submit(prompt(9, 3), rid="both", max_tokens=200, ignore_eos=True, n=n)
        gone.wait(lambda: before.logs[0].rows if runs else before.rid in gone.accepted_ids)
        request = front.submit_with_rows(before.rid, before.spec, {0: [5, VOCAB]})
        front.wait_over()
        error = next(log.end.error for log in request.logs if log.end is not None)
        assert error is not None
        assert error.param == "tokens"
        check_at_rest(engine)
        metrics = engine.core.metrics.samples([], 0)
        counted = {labels["finished_reason"]: value for name, labels, value in metrics if "request_success" in name}
        assert {reason: count for reason, count in counted.items() if count} == (
            {"error": 1} if runs else {"error": 1, "length": 1}
        )


def test_a_worker_that_leaves(tmp_path: Path) -> None:
    """It finishes what runs there and is dismissed; what waits goes to the other one, and nothing is moved."""
    running = RunningEngine(tmp_path, max_num_seqs=2)
    with (
        running as engine,
        WorkerThread(running.workers, name="a") as leaving,
        WorkerThread(running.workers, name="b") as staying,
        FrontEnd(running.front) as front,
    ):
        front.wait(lambda: len(engine.core.replicas) == 2)
        front.wait_ready()
        for index in range(10):
            front.submit(prompt(8, index), max_tokens=60, ignore_eos=True)
        front.wait(lambda: len(leaving.executed) > 3)
        leaving.leave()
        front.wait(lambda: leaving.dismissed)
        assert {init.rid for step in leaving.executed for init in step.new} != set(front.all)
        assert front.hello is not None
        assert front.hello.ready
        front.wait_over()
        for request in front.all.values():
            check(request)
        first = [init.rid for worker in (leaving, staying) for step in worker.executed for init in step.new]
        assert sorted(first) == sorted(front.all), "a request was moved"
        check_at_rest(engine)
        front.wait(lambda: front.metric("headrace:replica_steps_total", replica="a") is None)
        front.wait(lambda: front.metric("headrace:replica_steps_total", replica="b") == len(staying.executed))
    assert len(leaving.epochs) == 1


def test_the_last_worker_leaves_and_another_comes(tmp_path: Path) -> None:
    """The engine is not ready in between; a worker that leaves without work is dismissed at once."""
    running = RunningEngine(tmp_path, max_num_seqs=2)
    with running as engine, FrontEnd(running.front) as front:
        with WorkerThread(running.workers, name="a") as leaving:
            front.wait_ready()
            for index in range(4):
                front.submit(prompt(8, index), max_tokens=40, ignore_eos=True)
            front.wait(lambda: len(leaving.executed) > 3)
            leaving.leave()
            front.wait(lambda: front.hello is not None and not front.hello.ready)
            front.wait(lambda: leaving.dismissed)
            front.wait(lambda: sum(request.over for request in front.all.values()) == 2)
        until(lambda: not engine.workers.workers)
        with WorkerThread(running.workers, name="a") as coming:
            front.wait_over()
            coming.leave()
            front.wait(lambda: coming.dismissed)
        for request in front.all.values():
            check(request)
        assert not engine.core.replicas


def test_a_leaving_worker_dies(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path)
    with running as engine, FrontEnd(running.front) as front:
        with WorkerThread(running.workers, name="a") as leaving:
            front.wait_ready()
            for index in range(4):
                front.submit(prompt(8, index), max_tokens=200, ignore_eos=True)
            front.wait(lambda: len(leaving.executed) > 3)
            leaving.leave()
            front.wait(lambda: engine.core.replicas[0].leaving)
        with WorkerThread(running.workers, name="b"):
            front.wait_over()
            for request in front.all.values():
                check(request)
            check_at_rest(engine)


def test_a_killed_worker_is_noticed_at_once(tmp_path: Path) -> None:
    """Its sequences go on elsewhere, long before a beat is over; nobody else is disturbed."""
    running = RunningEngine(tmp_path, max_num_seqs=2, beat_s=60.0, lease_s=300.0)
    with (
        running as engine,
        WorkerThread(running.workers, name="b") as staying,
        FrontEnd(running.front) as front,
    ):
        with WorkerThread(running.workers, name="a") as killed:
            front.wait(lambda: len(engine.core.replicas) == 2)
            for index in range(8):
                front.submit(prompt(8, index), max_tokens=100, ignore_eos=True)
            front.wait(lambda: len(killed.executed) > 3)
            killed.deaf = True
        until(lambda: "a" not in engine.workers.workers)
        front.wait_over()
        for request in front.all.values():
            check(request)
        assert len(staying.epochs) == 1
        check_at_rest(engine)


def test_strangers_that_come_and_go_disturb_no_worker(tmp_path: Path) -> None:
    running = RunningEngine(tmp_path)
    with running as engine, WorkerThread(running.workers) as worker, FrontEnd(running.front) as front:
        front.wait_ready()
        for index in range(4):
            front.submit(prompt(8, index), max_tokens=200, ignore_eos=True)
        for index in range(20):
            stranger = Connector(running.workers, identity=f"stranger{index}/steps", boot=1)
            until(lambda link=stranger: link.send(hello("gpu_worker")), meanwhile=front.turn)
            stranger.close()
        front.wait_over()
        for request in front.all.values():
            check(request)
        until(lambda: list(engine.workers.workers) == ["w0"])
        assert len(worker.epochs) == 1
