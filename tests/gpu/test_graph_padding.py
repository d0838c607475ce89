"""Steps that are padded to the sizes of graphs: ids as without graphs, and nothing of the padding anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_harness import HALF, ON_GPU, Job, Stack, ids_of, make_cuda_runner
from tiny_models import TinyModels

from gpu_worker.shared_prefix import SharingLimits
from shared.sampling import SamplingParams

LARGEST_BATCH = 9 if ON_GPU else 3
LARGEST_RAMP = 40 if ON_GPU else 3
MAX_MODEL_LEN = 256
MODES = [pytest.param(torch.float32, False, id="float32"), pytest.param(HALF, True, id="half-batch-invariant")]
"""Where other rows of a step change a row's last bits, float32 keeps the ids; half precision only where they don't."""
MakeRunner = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels) -> Path:
    return tiny_models.folder("qwen3")


@pytest.fixture
def make(folder: Path) -> MakeRunner:
    def with_slots(**options: Any) -> Any:
        return make_cuda_runner(folder, num_blocks=600, max_model_len=MAX_MODEL_LEN, **options)

    return with_slots


def short_jobs(count: int) -> list[Job]:
    """Of many lengths, so that at almost every step one leaves and another one joins."""
    longest = 40 if ON_GPU else 6
    jobs = []
    for index in range(count):
        prompt = [20 + (37 * index + 11 * place) % 300 for place in range(1 + 13 * index % longest)]
        params = SamplingParams(temperature=0.0, max_tokens=2 + index % (7 if ON_GPU else 3), ignore_eos=True)
        if index % 4 == 3:
            params = dataclasses.replace(params, temperature=0.9, seed=index, repetition_penalty=1.1)
        jobs.append(Job(prompt, params))
    return jobs


def check_padding(runner: Any, stack: Stack, ids: list[list[int]]) -> None:
    """The padding slot is as empty as ever, and the engine counts real tokens only."""
    state = runner.state
    for tensor in (state.num_tokens, state.prompt_len, state.limit, state.token_ids, state.block_tables):
        assert not tensor[state.padding_slot].any()
    assert stack.metric("vllm:generation_tokens_total") == sum(len(each) for each in ids)
    assert stack.metric("vllm:request_success_total") == len(ids)


@pytest.mark.parametrize(("dtype", "batch_invariant"), MODES)
def test_every_small_batch(make: MakeRunner, dtype: torch.dtype, batch_invariant: bool) -> None:
    options = {"num_slots": LARGEST_BATCH + 2, "dtype": dtype, "batch_invariant": batch_invariant}
    largest_graph = LARGEST_BATCH - 1
    jobs = short_jobs((3 if ON_GPU else 2) * LARGEST_BATCH)
    eager = make(**options, max_rows=largest_graph, graphs=False)
    expected = ids_of(Stack(eager, max_num_seqs=1, depth=1).run(jobs))
    runner = make(**options, max_rows=largest_graph)
    assert runner.sizes == ([1, 2, 4, 8] if ON_GPU else [1, 2])
    for batch in range(1, LARGEST_BATCH + 1):
        stack = Stack(runner, max_num_seqs=batch)
        found = ids_of(stack.run(jobs[: 3 * batch]))
        assert found == expected[: 3 * batch], f"batches of {batch}"
        assert max(stack.decode_rows) == batch
        check_padding(runner, stack, found)


@pytest.mark.parametrize(("dtype", "batch_invariant"), MODES)
def test_a_batch_that_grows_and_shrinks_one_by_one(make: MakeRunner, dtype: torch.dtype, batch_invariant: bool) -> None:
    """Through every number of rows up to more than the largest graph holds, and down again."""
    batch = LARGEST_RAMP
    options = {"num_slots": batch + 2, "dtype": dtype, "batch_invariant": batch_invariant, "max_rows": 4 * batch // 5}
    jobs = []
    for index, job in enumerate(short_jobs(batch)):
        staying = 2 * (batch - index) + 2 * (7 * index % batch) + 2
        jobs.append(Job(job.prompt, dataclasses.replace(job.params, max_tokens=staying), arrives=2 * index))
    alone = [dataclasses.replace(job, arrives=0) for job in jobs]
    eager = make(**options, graphs=False)
    expected = ids_of(Stack(eager, max_num_seqs=1, depth=1, watched=False).run(alone))
    assert ids_of(Stack(eager, max_num_seqs=batch).run(jobs)) == expected
    runner = make(**options)
    stack = Stack(runner, max_num_seqs=batch)
    found = ids_of(stack.run(jobs))
    assert found == expected
    assert stack.decode_rows >= set(range(1, batch + 1))
    check_padding(runner, stack, found)


def test_rows_with_common_beginnings(make: MakeRunner) -> None:
    """Their pass over what they have in common is in the graph, while its members join and leave."""
    batch, length, most = (24, 150, 30) if ON_GPU else (2, 150, 1)
    beginnings = [[30 + 7 * salt + 3 * place % 290 for place in range(length)] for salt in range(3)]
    jobs = []
    for index in range(2 * batch if ON_GPU else 2):
        prompt = [*beginnings[index % 3 if ON_GPU else 0], 20 + index, *range(40, 40 + index % 5)]
        params = SamplingParams(temperature=0.0, max_tokens=9 + 5 * index % most, ignore_eos=True)
        # One after the other, so that the blocks of the first are there for the others.
        jobs.append(Job(prompt, params, arrives=index))
    options = {"num_slots": batch + 2, "max_rows": 3 * batch // 4 if ON_GPU else 2}
    expected = ids_of(Stack(make(**options, graphs=False), max_num_seqs=1, watched=False).run(jobs))
    runner = make(**options, graphs=ON_GPU, sharing=SharingLimits(members=2, tokens=32, saved=1))
    passes = []
    stack = Stack(
        runner, max_num_seqs=batch, caching=True, on_step=lambda step, names: passes.append(runner.state.has_groups)
    )
    found = ids_of(stack.run(jobs))
    assert found == expected
    assert any(passes)
    check_padding(runner, stack, found)
