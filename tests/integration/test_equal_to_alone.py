"""With ``--batch-invariant`` a request gives the same tokens and the same log-probabilities, to the bit, as alone.

The real scheduler drives the real runner. Each request runs alone first: all memory, no cache, no chunks, one step at a
time. Then all of them run together, under every combination of what an operator may set and a pool may force.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import make_runner
from tiny_models import ARCHITECTURES, VOCABULARY, TinyModels

from core_engine.admission import LEAST_RATIO
from core_engine.core import CoreConfig, EngineCore
from core_engine.host_memory import HostMemorySpec
from core_engine.queues import QUEUES
from core_engine.request import Request
from core_engine.scheduler import SchedulerConfig
from gpu_worker.runner import ModelRunner
from shared.messages import Epoch, FinishReason, Step, StepResult
from shared.sampling import SamplingParams

NO_IDS = np.empty(0, np.int32)
MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 8, 80, 16
JUST_ONE = MAX_MODEL_LEN // BLOCK_SIZE
HOST_BYTES = 1 << 20
POOLS = {"just_one": JUST_ONE, "twice": 2 * JUST_ONE, "ample": 20 * JUST_ONE}
"""Blocks, the null block not included."""
PREEMPTION: dict[str, dict[str, Any]] = {"recompute": {}, "swap": {"preemption_mode": "swap", "swap_space": 1.0}}
"""What else ``CoreConfig`` says for each way in which a preempted sequence comes back."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.3},
}
SHAPES = ((3, 20, 0), (60, 20, 0), (64, 16, 0), (40, 6, 7), (21, 12, 2), (48, 1, 9))
"""Of the requests: ids of the prompt, of the output at most, the step before which it arrives."""
SHARED, SHARERS = 35, (3, 5)


@dataclasses.dataclass(frozen=True)
class Job:
    name: str
    prompt: list[int]
    params: SamplingParams
    arrives: int
    """The step before which it is submitted."""


@dataclasses.dataclass
class Answer:
    """Of one choice."""

    ids: list[int] = dataclasses.field(default_factory=list)
    records: list[bytes] = dataclasses.field(default_factory=list)
    """Log-probability records of the ids: raw float32 numbers."""
    prompt_records: list[bytes] | None = None
    reason: FinishReason | None = None


class Stack:
    """An ``EngineCore`` and a ``ModelRunner``, with a window of steps between them."""

    def __init__(self, runner: ModelRunner, *, num_blocks: int, chunked: bool, depth: int = 2, **options: Any) -> None:
        runner.reset()
        self.runner = runner
        budget = 20 if chunked else MAX_MODEL_LEN
        scheduler = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=budget,
            max_prefill_tokens=budget,
            max_num_partial_prefills=2,
            enable_chunked_prefill=chunked,
            max_model_len=MAX_MODEL_LEN,
        )
        config = {"vocab_size": VOCABULARY, "block_size": BLOCK_SIZE, "watermark": 0.0, "steps_in_flight": depth}
        self.core = EngineCore(CoreConfig(scheduler=scheduler, **(config | options)))
        assert self.core.config.num_slots <= runner.num_slots
        assert num_blocks < runner.cache.num_blocks
        host = (
            HostMemorySpec(runner.host_pool.num_blocks, runner.cache.block_bytes) if "swap_space" in options else None
        )
        self.core.begin_epoch("worker", Epoch(1, 1), num_blocks + 1, host)
        self.replica = self.core.replicas[0]
        self.answers: dict[tuple[str, int], Answer] = {}
        self.requests: list[Request] = []
        self.num_prefilled = 0
        """Prompt tokens that were computed."""

    def run(self, jobs: list[Job]) -> dict[tuple[str, int], Answer]:
        """The answers by request and choice."""
        arriving, requests = deque(sorted(jobs, key=lambda job: job.arrives)), self.requests
        window: deque[Step] = deque()
        for clock in itertools.count():
            while arriving and (arriving[0].arrives <= clock or not window):
                self._submit(arriving.popleft(), len(requests))
            self.core.scheduler.admission.expected_ratio = LEAST_RATIO  # so hopeful that memory does run short
            while (step := self.core.plan(self.replica)) is not None:
                window.append(step)
            if not window:
                break
            self._settle(window.popleft())
            self.replica.check()
            waiting = list(self.core.waiting)
            live = [each for request in requests for each in request.sequences if each.finish_reason is None]
            assert sorted(each.arrival for each in live) == sorted(
                each.arrival for each in waiting + self.replica.slots.occupied() if each.finish_reason is None
            )
        assert all(request.finished for request in requests), "requests are left, but there is nothing to do"
        assert self.replica.num_running == self.replica.kv.pool.num_references == 0
        for sequence in itertools.chain.from_iterable(request.sequences for request in requests):
            answer = self.answers[sequence.request.rid, sequence.choice]
            answer.prompt_records, answer.reason = sequence.prompt_records, sequence.finish_reason
        return self.answers

    def metric(self, name: str) -> float:
        return sum(value for each, _, value in self.core.metrics.samples(self.core.replicas, 0) if each == name)

    def _submit(self, job: Job, order: int) -> None:
        stops, prompt = frozenset(job.params.stop_token_ids), np.array(job.prompt, np.int32)
        request = Request(job.name, job.params, prompt, order, 0.0, stops, priority=order % 3, tenant="ab"[order % 2])
        for sequence in self.core.submit(request, dict.fromkeys(range(job.params.n), NO_IDS)):
            self.answers[job.name, sequence.choice] = Answer()
        self.requests.append(request)

    def _settle(self, step: Step) -> None:
        output = self.runner.launch(step).wait()
        self.num_prefilled += int(step.prefill[:, 2].sum())
        tokens = np.asarray(output.tokens, np.int32)
        result = StepResult(
            step.epoch,
            step.number,
            tokens,
            NO_IDS,
            output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            transferred=output.transferred,
        )
        settled = self.core.settle(self.replica, result)
        answers = [self.answers[sequence.request.rid, sequence.choice] for sequence in settled.sequences]
        for answer, token in zip(answers, settled.tokens.tolist(), strict=True):
            answer.ids.append(token)
        for index, record in settled.records:
            answers[index].records.append(record)


def make_jobs(n: int, sampling: str) -> list[Job]:
    """The second and the third fill the smallest pool, each alone; two that come later begin like the third one."""
    draw = random.Random(7)
    jobs = []
    for index, (length, output, arrives) in enumerate(SHAPES):
        begins = jobs[2].prompt[:SHARED] if index in SHARERS else []
        prompt = begins + draw.choices(range(5, VOCABULARY), k=length - len(begins))
        params = SamplingParams(
            n=n,
            max_tokens=output,
            seed=100 + index if sampling == "seeded" else None,
            ignore_eos=True,
            stop_token_ids=draw.choices(range(5, VOCABULARY), k=9) if index == 4 else [],
            logprobs=index % 3,
            prompt_logprobs=1 if index == 1 else None,
            **SAMPLING[sampling],
        )
        jobs.append(Job(f"r{index}", prompt, params, arrives))
    return jobs


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Runners:
    """A runner for each model, and what requests give alone there, computed when they are first asked for."""

    def __init__(self) -> None:
        self._runners: dict[tuple[Path, str], ModelRunner] = {}
        self._alone: dict[tuple[Path, str, int, str], dict[tuple[str, int], Answer]] = {}

    def of(self, folder: Path, dtype: str) -> ModelRunner:
        if (folder, dtype) not in self._runners:
            self._runners[folder, dtype] = make_runner(
                folder,
                dtype=dtype,
                batch_invariant=True,
                max_model_len=MAX_MODEL_LEN,
                num_slots=MAX_NUM_SEQS + 2,
                num_blocks_override=POOLS["ample"] + 1,
                host_bytes=HOST_BYTES,
            )
        return self._runners[folder, dtype]

    def alone(self, folder: Path, dtype: str, n: int, sampling: str) -> dict[tuple[str, int], Answer]:
        key = folder, dtype, n, sampling
        if key not in self._alone:
            runner, found = self.of(folder, dtype), {}
            for job in make_jobs(n, sampling):
                stack = Stack(runner, num_blocks=POOLS["ample"], chunked=False, depth=1, enable_prefix_caching=False)
                found |= stack.run([job])
            self._alone[key] = found
        return self._alone[key]


@pytest.fixture(scope="module")
def runners() -> Runners:
    return Runners()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    ("preemption", "chunked", "pool"),
    [("recompute", chunked, pool) for chunked in (True, False) for pool in POOLS]
    + [("swap", True, "just_one"), ("swap", True, "twice")],
)
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "nocache"])
def test_same_bits_as_alone(
    tiny_models: TinyModels, runners: Runners, pool: str, caching: bool, chunked: bool, preemption: str, n: int,
    sampling: str,
) -> None:  # fmt: skip
    folder = tiny_models.folder("qwen3", num_hidden_layers=2)
    options = PREEMPTION[preemption] | {"enable_prefix_caching": caching}
    stack = Stack(runners.of(folder, "float32"), num_blocks=POOLS[pool], chunked=chunked, **options)
    found = stack.run(make_jobs(n, sampling))
    assert found == runners.alone(folder, "float32", n, sampling)
    if n == 4:
        texts = [tuple(found["r0", choice].ids) for choice in range(n)]
        assert len(set(texts)) == (n if sampling == "seeded" else 1)
        assert stack.metric("headrace:forks_total") > 0
    assert (stack.metric("vllm:prefix_cache_hits_total") > 0) == caching or pool == "just_one"
    if pool != "ample":
        assert stack.metric("vllm:num_preemptions_total") > 0
        assert (stack.metric("headrace:swapped_preemptions_total") > 0) == (preemption == "swap")


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 64])
def test_a_prompt_that_comes_three_times(tiny_models: TinyModels, runners: Runners, length: int) -> None:
    """What is cached of it are whole blocks, as much each time, and never its last token."""
    folder = tiny_models.folder("qwen3", num_hidden_layers=2)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    prompt = random.Random(length).choices(range(5, VOCABULARY), k=length)
    stack = Stack(runners.of(folder, "float32"), num_blocks=POOLS["ample"], chunked=True)
    for index in range(3):
        before = stack.num_prefilled
        stack.run([Job(f"r{index}", prompt, params, 0)])
        cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE if index else 0
        assert stack.requests[index].sequences[0].cached_tokens == cached
        assert stack.num_prefilled - before == length - cached
        assert stack.answers[f"r{index}", 0] == stack.answers["r0", 0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(QUEUES))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_model_policy_and_depth(
    tiny_models: TinyModels, runners: Runners, architecture: str, dtype: str, depth: int, policy: str
) -> None:
    folder = tiny_models.folder(architecture)
    for pool, caching, chunked, preemption, n, sampling in itertools.product(
        POOLS, (True, False), (True, False), PREEMPTION, (1, 4), SAMPLING
    ):
        options = PREEMPTION[preemption] | {"enable_prefix_caching": caching, "policy": policy, "depth": depth}
        stack = Stack(runners.of(folder, dtype), num_blocks=POOLS[pool], chunked=chunked, **options)
        found = stack.run(make_jobs(n, sampling))
        assert found == runners.alone(folder, dtype, n, sampling), (pool, caching, chunked, preemption, n, sampling)
