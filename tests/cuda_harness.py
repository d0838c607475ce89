"""The real scheduler and the GPU's runner in one process, with a sentinel wherever no request has written.

Natively where there is a GPU. Elsewhere the kernels run in Triton's interpreter if ``TRITON_INTERPRET`` is set; it is
read when their modules are imported, so that this one imports them late.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from runner_harness import worker_config

from core_engine.core import CoreConfig, EngineCore
from core_engine.request import Request
from core_engine.request import Sequence as Choice
from core_engine.scheduler import SchedulerConfig
from gpu_worker import kernels
from gpu_worker.attention.base import AttentionShape
from gpu_worker.host_pool import HostPool
from gpu_worker.kv_cache import KVCache
from gpu_worker.loading.load_model import load_model
from gpu_worker.loading.open_weights import open_weights
from gpu_worker.shared_prefix import SharingLimits
from shared.messages import Epoch, FinishReason, Step, StepResult
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

BLOCK_SIZE = 16
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16
"""The interpreter multiplies the bits of bfloat16 matrices as integers."""
NO_IDS = np.empty(0, np.int32)
ChoiceName: TypeAlias = tuple[str, int]
"""Name of a request, number of a choice."""
SENTINELS = {1: (torch.uint8, 0x7F), 2: (torch.int16, 0x7FC5), 4: (torch.int32, 0x7FC00005)}
"""By the bytes of a number: a NaN as an integer. One that is read makes NaN of whatever it meets."""


def make_cuda_runner(
    folder: Path,
    *,
    num_slots: int,
    num_blocks: int,
    max_model_len: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    graphs: bool = True,
    batch_invariant: bool = False,
    max_rows: int | None = None,
    sharing: SharingLimits | None = None,
    num_host_blocks: int = 0,
) -> Any:
    """A ``CudaRunner`` on the GPU, or with interpreted kernels on the CPU.

    Args:
        cache_dtype: of the KV cache; None: ``dtype``.
        max_rows: decode rows of the largest graph; None: ``num_slots``.
        sharing: as of ``CudaRunner``.
        num_host_blocks: of a pool in host memory; 0: there is none.
    """
    from gpu_worker.attention.triton_paged import TritonPagedAttention
    from gpu_worker.cuda_runner import CudaRunner

    source = local_source(folder, str(folder))
    shape, config = load_model_config(source), worker_config(folder)
    attention = TritonPagedAttention(
        AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE, batch_invariant),
        DEVICE,
        cache_dtype=cache_dtype or dtype,
        dtype=dtype,
        max_rows=num_slots,
        max_context=max_model_len,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "uses_kernels", lambda device: True)
        weights = open_weights(source, shape, config.load_format, config.seed)
        model = load_model(shape, weights, attention, dtype, DEVICE, batch_invariant, cache_dtype)
    cache = KVCache(shape.num_layers, attention, cache_dtype or dtype, DEVICE, 0, num_blocks)
    runner = CudaRunner(
        shape,
        model,
        attention,
        cache,
        block_size=BLOCK_SIZE,
        num_slots=num_slots,
        max_model_len=max_model_len,
        max_rows=max_rows,
        graphs=graphs,
        sharing=sharing,
    )
    if num_host_blocks:
        total = num_host_blocks * cache.block_bytes
        runner.use_cache(cache, HostPool(shape.num_layers, attention, cache_dtype or dtype, DEVICE, total))
    return runner


class WrittenPlaces:
    """Follows the steps of a runner: which places of the KV cache they may write, and that they write no others.

    A place is one token's keys and values in all layers. All of them hold the sentinel at first.
    """

    def __init__(self, runner: Any) -> None:
        cache, (kind, self.sentinel) = runner.cache, SENTINELS[runner.cache.tensor.element_size()]
        self.numbers = cache.tensor.view(kind)
        assert self.numbers.shape[1:4:2] == (cache.num_blocks, runner.config.num_kv_heads)
        self.numbers.fill_(self.sentinel)
        self.written = np.zeros((cache.num_blocks, BLOCK_SIZE), np.bool_)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.limits: dict[int, int] = {}

    def launched(self, step: Step) -> None:
        for slot in step.released.tolist():
            self.tables.pop(slot, None)
        for request in step.new:
            self.tables[request.slot] = []
            self.lengths[request.slot], self.limits[request.slot] = request.num_tokens, request.limit
        for slot, block in step.blocks.tolist():
            self.tables[slot].append(block)
        for source, destination in step.copies.tolist():
            self.written[destination] = self.written[source]  # of the whole block, whatever it held
        for slot, start, count in step.prefill.tolist():
            self._write(slot, np.arange(start, start + count))
        for slot in step.decode.tolist():
            self._write(slot, np.array([self.lengths[slot] - 1]))
        for slot in step.sample[:, 1].tolist():
            self.lengths[slot] = min(self.lengths[slot] + 1, self.limits[slot])

    def _write(self, slot: int, positions: np.ndarray) -> None:
        table = np.array(self.tables[slot])
        self.written[table[positions // BLOCK_SIZE], positions % BLOCK_SIZE] = True

    def check(self) -> None:
        """Whatever no request wrote is untouched, in every layer, and whatever one wrote is there."""
        holds = (self.numbers == self.sentinel).movedim(4, 2).flatten(3)
        untouched, absent = (each.cpu().numpy() for each in (holds.all(3).all(0), holds.any(3).any(0)))
        assert not np.argwhere(~untouched & ~self.written).tolist(), "(block, place) written for nobody"
        assert not np.argwhere(absent & self.written).tolist(), "(block, place) that was never written"


@dataclasses.dataclass
class Job:
    """A request of a test."""

    prompt: Sequence[int]
    params: SamplingParams
    arrives: int = 0
    """The step before which it is submitted."""
    abort_at: int | None = None
    """Tokens after which it is aborted."""
    rest_at: int | None = None
    """Tokens after which it is preempted, to go on at once."""


@dataclasses.dataclass
class Answer:
    ids: list[int] = dataclasses.field(default_factory=list)
    records: list[bytes] = dataclasses.field(default_factory=list)
    """Log-probability records of the ids."""
    prompt_records: list[bytes] = dataclasses.field(default_factory=list)
    """Those of the prompt's ids from the second on."""
    preemptions: int = 0
    rested: bool = False
    reason: FinishReason | None = None


class Stack:
    """An ``EngineCore`` and a runner with a window of steps between them; the runner forgets its former requests.

    Attributes:
        decode_rows: the numbers of rows of all steps that only decoded.
        places: of the KV cache; None: they are not watched.
    """

    def __init__(
        self,
        runner: Any,
        *,
        max_num_seqs: int,
        budget: int = 256,
        caching: bool = False,
        depth: int = 2,
        watched: bool = True,
        on_step: Callable[[Step, list[str]], None] | None = None,
    ) -> None:
        """
        Args:
            budget: tokens of a step at most.
            on_step: called when a step has run, with the step and the names of the requests of its sample rows.
        """
        runner.reset()
        self.runner, self.on_step = runner, on_step
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_tokens=budget,
            max_num_partial_prefills=4,
            max_model_len=runner.max_model_len,
        )
        config = CoreConfig(
            scheduler=scheduler,
            vocab_size=runner.config.vocab_size,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            steps_in_flight=depth,
        )
        assert config.num_slots <= runner.num_slots
        self.core = EngineCore(config)
        self.core.begin_epoch("worker", Epoch(1, 1), runner.cache.num_blocks)
        self.replica = self.core.replicas[0]
        self.places = WrittenPlaces(runner) if watched else None
        self.decode_rows: set[int] = set()
        self._order = itertools.count()

    def run(self, jobs: Sequence[Job], names: Sequence[str] | None = None) -> list[Answer]:
        """Run all to their ends; the answers of all choices, request by request.

        Args:
            names: of the requests, which those without a seed draw by; None: "0", "1", ….
        """
        names = names or [str(index) for index in range(len(jobs))]
        by_arrival = sorted(zip(names, jobs, strict=True), key=lambda each: each[1].arrives)
        arriving, wanted = deque(by_arrival), dict(by_arrival)
        answers: dict[ChoiceName, Answer] = {}
        live: dict[ChoiceName, Choice] = {}
        window: deque[tuple[Step, Any, list[str]]] = deque()
        clock = 0
        while arriving or live or window:
            while arriving and (arriving[0][1].arrives <= clock or not (live or window)):
                name, job = arriving.popleft()
                numbers = range(job.params.n)
                for choice in self.core.submit(self._request(name, job), dict.fromkeys(numbers, NO_IDS)):
                    live[name, choice.choice], answers[name, choice.choice] = choice, Answer()
            while (step := self.core.plan(self.replica)) is not None:
                sampled = [self.replica.slots.sequence_at(slot).request.rid for slot in step.sample[:, 1].tolist()]
                window.append((step, self._launch(step), sampled))
            assert window, "requests are left, but there is nothing to do"
            self._settle(*window.popleft(), answers)
            clock += 1
            for key, choice in list(live.items()):
                if self._is_over(choice, wanted[key[0]], answers[key]):
                    del live[key]
        assert self.replica.num_running == 0
        assert self.replica.kv.pool.num_references == 0
        if self.places is not None:
            self.places.check()
        return [answers[name, number] for name in names for number in range(wanted[name].params.n)]

    def metric(self, name: str) -> float:
        """The sum of a counter of the engine."""
        return sum(value for each, _, value in self.core.metrics.samples(self.core.replicas, 0) if each == name)

    def _request(self, name: str, job: Job) -> Request:
        stops = frozenset(job.params.stop_token_ids)
        return Request(name, job.params, np.array(job.prompt, np.int32), next(self._order), 0.0, stops)

    def _launch(self, step: Step) -> Any:
        if not len(step.prefill):
            self.decode_rows.add(len(step.decode))
        if self.places is not None:
            self.places.launched(step)
        return self.runner.launch(step)

    def _settle(self, step: Step, launched: Any, sampled: list[str], answers: dict[ChoiceName, Answer]) -> None:
        output = launched.wait()
        assert len(output.tokens) == len(step.sample)
        if self.on_step is not None:
            self.on_step(step, sampled)
        result = StepResult(
            step.epoch, step.number, output.tokens, NO_IDS, output.logprobs, prompt_logprobs=output.prompt_logprobs
        )
        settled = self.core.settle(self.replica, result)
        for choice, token in zip(settled.sequences, settled.tokens.tolist(), strict=True):
            answers[choice.request.rid, choice.choice].ids.append(token)
        for index, record in settled.records:
            choice = settled.sequences[index]
            answers[choice.request.rid, choice.choice].records.append(record)
        for choice, found in settled.found:
            answer = answers[choice.request.rid, choice.choice]
            answer.ids, answer.records = found.ids, found.records

    def _is_over(self, choice: Choice, job: Job, answer: Answer) -> bool:
        if job.abort_at is not None and len(answer.ids) >= job.abort_at:
            self.core.end(choice, FinishReason.ABORT)
        if job.rest_at is not None and len(answer.ids) >= job.rest_at and not answer.rested:
            answer.rested = True
            if choice.finish_reason is None and choice.slot is not None:
                self.core.rest(choice, True)
                self.core.rest(choice, False)
        answer.preemptions, answer.reason = choice.num_preemptions, choice.finish_reason
        answer.prompt_records = choice.prompt_records or []
        return choice.finish_reason is not None


def ids_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]
