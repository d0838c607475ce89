"""The real scheduler drives the real runner: whatever the schedule, the ids are those of transformers in float32.

No sockets: steps go straight from ``EngineCore.plan`` to ``ModelRunner.launch``, as late as the window allows.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import make_runner, reference_greedy
from tiny_models import ARCHITECTURES, VOCABULARY

from core_engine.core import CoreConfig, EngineCore
from core_engine.request import Request
from core_engine.scheduler import SchedulerConfig
from gpu_worker.runner import ModelRunner
from shared.messages import Epoch, Step, StepResult
from shared.sampling import SamplingParams

NUM_PROMPTS, OUTPUT = 16, 64
MAX_MODEL_LEN = 192
LARGE_POOL, SMALL_POOL = 200, 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
NO_IDS = np.empty(0, np.int32)


class Stack:
    """An ``EngineCore`` and a ``ModelRunner`` with a window of steps between them."""

    def __init__(self, runner: ModelRunner, *, budget: int, cache: bool, blocks: int, depth: int) -> None:
        self.runner = runner
        runner.reset()
        self.core = EngineCore(
            CoreConfig(
                scheduler=SchedulerConfig(
                    max_num_seqs=runner.num_slots - 2,
                    max_num_batched_tokens=budget,
                    max_prefill_tokens=budget,
                    max_model_len=MAX_MODEL_LEN,
                ),
                vocab_size=VOCABULARY,
                enable_prefix_caching=cache,
                steps_in_flight=depth,
            )
        )
        assert self.core.config.num_slots <= runner.num_slots
        self.core.begin_epoch("worker", Epoch(1, 1), blocks)
        self.replica = self.core.replicas[0]
        self.order = itertools.count()

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """The generated ids of each prompt, all submitted at once."""
        requests = []
        for prompt, each in zip(prompts, params, strict=True):
            ids = np.array(prompt, np.int32)
            request = Request(f"r{next(self.order)}", each, ids, next(self.order), 0.0, frozenset(each.stop_token_ids))
            self.core.submit(request, {0: NO_IDS})
            requests.append(request)
        outputs: dict[int, list[int]] = {id(request): [] for request in requests}
        window: deque[Step] = deque()
        while not all(request.finished for request in requests) or window:
            while (step := self.core.plan(self.replica)) is not None:
                window.append(step)
            assert window, "requests are left, but there is nothing to do"
            step = window.popleft()
            tokens = self.runner.launch(step).wait().tokens
            result = StepResult(step.epoch, step.number, np.asarray(tokens, np.int32), NO_IDS)
            settled = self.core.settle(self.replica, result)
            for sequence, token in zip(settled.sequences, settled.tokens.tolist(), strict=True):
                outputs[id(sequence.request)].append(token)
            self.replica.check()
        assert self.replica.num_running == 0
        assert self.replica.kv.pool.num_references == 0
        return [outputs[id(request)] for request in requests]


COMBINATIONS = [
    pytest.param(
        budget,
        cache,
        blocks,
        depth,
        id=f"budget{budget}-{'cache' if cache else 'nocache'}-{blocks}-{depth}",
        # Each of two settings with each of a third; the rest of the product is slow.
        marks=[pytest.mark.slow] if (index + cache + (blocks == SMALL_POOL) + depth) % 2 else [],
    )
    for index, budget in enumerate((7, 64, 2048))
    for cache in (True, False)
    for blocks in (LARGE_POOL, SMALL_POOL)
    for depth in (1, 2)
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: Any, tiny_models: Any) -> Path:
    return Path(tiny_models.folder(request.param))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=20, num_blocks_override=LARGE_POOL)


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """Prompts, some with a common beginning, and what transformers makes of them; outputs that fall into a loop, which
    would hide a wrong block or position, are left out."""
    draw = random.Random(3)
    shared = [draw.randrange(5, VOCABULARY) for _ in range(35)]
    found: dict[tuple[int, ...], list[int]] = {}
    while len(found) < NUM_PROMPTS:
        own = [draw.randrange(5, VOCABULARY) for _ in range(draw.randint(3, 60))]
        prompt = shared + own[:20] if len(found) % 4 == 0 else own
        output = reference_greedy(folder, prompt, OUTPUT)
        if len(set(output)) >= 20:
            found[tuple(prompt)] = output
    return found


@pytest.fixture(scope="module")
def prompts(references: dict[tuple[int, ...], list[int]]) -> list[list[int]]:
    return [list(prompt) for prompt in references]


@pytest.fixture(scope="module")
def expected(references: dict[tuple[int, ...], list[int]]) -> list[list[int]]:
    return list(references.values())


SEEDED = [
    SamplingParams(
        temperature=(0.5, 1.0, 1.5)[index % 3],
        top_k=(0, 20)[index % 2],
        top_p=(1.0, 0.9)[index // 2 % 2],
        min_p=(0.0, 0.02)[index // 4 % 2],
        seed=index - 8,
        max_tokens=OUTPUT,
        ignore_eos=True,
    )
    for index in range(NUM_PROMPTS)
]


@pytest.fixture(scope="module")
def expected_seeded(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """Each request alone, one step at a time, without a cache."""
    stack = Stack(runner, budget=2048, cache=False, blocks=LARGE_POOL, depth=1)
    return [stack.generate([prompt], [params])[0] for prompt, params in zip(prompts, SEEDED, strict=True)]


@pytest.mark.parametrize(("budget", "cache", "blocks", "depth"), COMBINATIONS)
def test_every_schedule_gives_the_same_ids(
    runner: ModelRunner,
    prompts: list[list[int]],
    expected: list[list[int]],
    expected_seeded: list[list[int]],
    budget: int,
    cache: bool,
    blocks: int,
    depth: int,
) -> None:
    stack = Stack(runner, budget=budget, cache=cache, blocks=blocks, depth=depth)
    assert stack.generate(prompts, [GREEDY] * NUM_PROMPTS) == expected
    metrics = {name: value for name, _, value in stack.core.metrics.samples(stack.core.replicas, 0)}
    preempted = metrics["vllm:num_preemptions_total"]
    assert (preempted > 0) == (blocks == SMALL_POOL)
    hits = metrics["vllm:prefix_cache_hits_total"]
    assert stack.generate(prompts, SEEDED) == expected_seeded
    metrics = {name: value for name, _, value in stack.core.metrics.samples(stack.core.replicas, 0)}
    assert (metrics["vllm:prefix_cache_hits_total"] > hits) == cache, "the second pass finds the prompts' blocks"


@pytest.mark.parametrize("damage", ["block", "position", "layer"])
def test_damage_is_seen(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The outputs are lively enough that one wrong block, position or layer changes them."""
    runner = make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=20, num_blocks_override=LARGE_POOL)
    launch = runner.launch
    launched = 0

    def damaged(step: Step) -> Any:
        nonlocal launched
        launched += 1
        if damage == "block" and launched == 20:
            table = stack.replica.slots.occupied()[0].blocks
            runner.cache.tensor[:, table[1].id] = 0.25
        return launch(step)

    if damage == "position":
        rotary = runner.rotary
        runner.rotary = lambda positions, lengths: rotary(positions + (positions > 40), lengths)  # type: ignore[assignment]
    if damage == "layer":
        del runner.model.layers[1]  # type: ignore[attr-defined]
    monkeypatch.setattr(runner, "launch", damaged)
    stack = Stack(runner, budget=2048, cache=True, blocks=LARGE_POOL, depth=2)
    assert stack.generate(prompts, [GREEDY] * NUM_PROMPTS) != expected
