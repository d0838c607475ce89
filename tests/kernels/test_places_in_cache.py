"""The GPU's runner writes keys and values where its requests are and nowhere else. ``tests/gpu`` has more."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cuda_harness import HALF, Job, Stack, ids_of, make_cuda_runner
from runner_harness import make_runner
from tiny_models import TinyModels

from shared.messages import Step
from shared.sampling import SamplingParams

MAX_MODEL_LEN = 48
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
JOBS = [Job([40 + 7 * index + place for place in range(length)], PARAMS) for index, length in enumerate((17, 3, 14))]


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels) -> Path:
    """One layer: the interpreter is slow."""
    return tiny_models.folder("qwen3", num_hidden_layers=1)


def make(folder: Path, **options: Any) -> Any:
    return make_cuda_runner(folder, num_slots=5, num_blocks=12, max_model_len=MAX_MODEL_LEN, **options)


@pytest.mark.parametrize(("max_rows", "graphs"), [(4, True), (2, False)], ids=["padded", "beyond-the-largest"])
def test_steps_write_for_requests_only(folder: Path, max_rows: int, graphs: bool) -> None:
    cpu = make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=5, num_blocks_override=12)
    expected = ids_of(Stack(cpu, max_num_seqs=3, watched=False).run(JOBS))
    runner = make(folder, graphs=graphs, max_rows=max_rows)
    stack = Stack(runner, max_num_seqs=3)
    assert ids_of(stack.run(JOBS)) == expected
    assert stack.decode_rows == {3}
    assert not runner.state.num_tokens[runner.state.padding_slot]
    assert stack.metric("vllm:generation_tokens_total") == 9


def test_chunks_and_preemptions_write_for_requests_only(folder: Path) -> None:
    runner = make(folder, dtype=HALF, batch_invariant=True, graphs=False)
    params = dataclasses.replace(PARAMS, max_tokens=4)
    jobs = [Job(job.prompt, params, rest_at=1 if index == 0 else None) for index, job in enumerate(JOBS)]
    expected = ids_of(Stack(runner, max_num_seqs=1, watched=False).run([Job(job.prompt, params) for job in JOBS]))
    stack = Stack(runner, max_num_seqs=3, budget=20, caching=True)
    found = stack.run(jobs)
    assert ids_of(found) == expected
    assert found[0].preemptions == 1


@pytest.mark.parametrize(("length", "graphs"), [(16, False), (17, False), (21, True)])
def test_choices_fork_and_copy_on_write(folder: Path, length: int, graphs: bool) -> None:
    """Four choices share a prompt, beside another request; alone each of them gives the same."""
    cpu = make_runner(folder, max_model_len=MAX_MODEL_LEN, num_slots=7, num_blocks_override=16)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    jobs = [JOBS[1], Job([60 + place for place in range(length)], params)]
    alone = [Stack(cpu, max_num_seqs=1, watched=False).run([job]) for job in jobs]
    expected = [answer.ids for answers in alone for answer in answers]
    assert len({tuple(ids) for ids in expected[1:]}) > 1
    assert ids_of(Stack(cpu, max_num_seqs=5, watched=False).run(jobs)) == expected
    runner = make_cuda_runner(folder, num_slots=7, num_blocks=16, max_model_len=MAX_MODEL_LEN, graphs=graphs)
    stack = Stack(runner, max_num_seqs=5)
    assert ids_of(stack.run(jobs)) == expected
    assert stack.metric("headrace:forks_total") == 3


@pytest.mark.parametrize("damage", ["a free block", "a tail", "nothing written"])
def test_damage_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    runner = make(folder, graphs=False)
    launch = runner.launch

    def damaged(step: Step) -> Any:
        launched = launch(step)
        cache, places = runner.cache.tensor, stack.places
        assert places is not None
        if damage == "a free block":
            cache[0, 0, 1, 1, 3, 5] = 0.0
        elif damage == "a tail":
            block, place = next(zip(*(~places.written & places.written[:, :1]).nonzero(), strict=True))
            cache[0, block, 0, 0, place] = 1.0
        else:
            block, place = next(zip(*places.written.nonzero(), strict=True))
            places.numbers[0, block, 0, 0, place, 0] = places.sentinel
        return launched

    monkeypatch.setattr(runner, "launch", damaged)
    stack = Stack(runner, max_num_seqs=3)
    # One step only: the next one would read what is damaged.
    job = Job(JOBS[0].prompt, dataclasses.replace(PARAMS, max_tokens=1))
    with pytest.raises(AssertionError, match="never written" if damage == "nothing written" else "written for nobody"):
        stack.run([job])
