"""An ``LLM`` whose processes are killed while it works."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import TinyModels
from waiting import wait_until

from headrace import LLM, EngineDead, RequestOutput, SamplingParams
from shared.config import ENGINE, TOKENIZER, WORKER

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": 400, "batch_invariant": True}
PROMPTS = [f"The water wheel number {i} turns" for i in range(12)]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, n=1 + (i % 4 == 3), max_tokens=250, ignore_eos=True, logprobs=i % 3)
    for i in range(12)
]


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> pathlib.Path:
    return tiny_models.folder("qwen3")


@pytest.fixture(
    scope="module", params=[pytest.param(1, id="one worker"), pytest.param(2, id="two workers", marks=pytest.mark.slow)]
)
def llm(request: pytest.FixtureRequest, model: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(model), data_parallel_size=request.param, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[Any]:
    return seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller sees, but times."""
    return [
        (each.prompt_token_ids, [(choice.token_ids, choice.text, choice.logprobs) for choice in each.outputs])
        for each in outputs
    ]


_until = functools.partial(wait_until, seconds=30.0, every_s=0.005)


def in_the_middle(llm: LLM) -> bool:
    """Whether some request has many of its rows, and none all of them."""
    rows = [len(log.ids) for job in list(llm._session.link._jobs.values()) if job.request for log in job.request.logs]
    return bool(rows) and min(rows) >= 60


def generate_and_disturb(llm: LLM, disturb: Callable[[], None]) -> list[Any]:
    with ThreadPoolExecutor(1) as pool:
        running: Future[list[RequestOutput]] = pool.submit(llm.generate, PROMPTS, PARAMS, use_tqdm=False)
        _until(lambda: in_the_middle(llm))
        disturb()
        assert not running.done()
        return seen(running.result(60))


def kill(llm: LLM, services: tuple[str, ...]) -> set[str]:
    """Kill every process of these services; their names."""
    pids = {name: pid for name, pid in llm._session.pids().items() if name.partition("/")[0] in services}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    return set(pids)


@pytest.mark.parametrize(
    "services", [(TOKENIZER,), (ENGINE,), (WORKER,), (TOKENIZER, ENGINE, WORKER)], ids=lambda names: "+".join(names)
)
def test_outputs_are_those_of_an_undisturbed_run(llm: LLM, undisturbed: list[Any], services: tuple[str, ...]) -> None:
    before, killed = llm._session.pids(), set()

    def disturb() -> None:
        killed.update(kill(llm, services))

    assert generate_and_disturb(llm, disturb) == undisturbed
    _until(lambda: llm._session.pids().keys() == before.keys())
    assert {name for name, pid in llm._session.pids().items() if pid != before[name]} == killed


def test_folder_of_sockets_may_vanish(llm: LLM, undisturbed: list[Any]) -> None:
    before = llm._session.pids()

    def remove() -> None:
        # Renamed first: a heartbeat that is written again while files are removed one by one would keep the folder.
        folder = llm._session._run_dir.path
        shutil.rmtree(folder.rename(folder.with_name(f"removed-{folder.name}")))

    assert generate_and_disturb(llm, remove) == undisturbed
    rebound = {TOKENIZER, ENGINE}
    _until(lambda: all(llm._session.pids().get(name) not in (None, before[name]) for name in rebound))
    assert seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == undisturbed


@pytest.mark.parametrize("service", [TOKENIZER, ENGINE, WORKER])
def test_process_that_cannot_be_kept_alive_is_named(model: pathlib.Path, service: str) -> None:
    with LLM(str(model), max_restarts=1, **OPTIONS) as llm, ThreadPoolExecutor(1) as pool:
        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        running = pool.submit(llm.generate, ["The mill"] * 200, endless, use_tqdm=False)
        _until(lambda: bool(llm._session.link._jobs))
        for _ in range(2):
            _until(lambda: service in llm._session.pids())
            pid = llm._session.pids()[service]
            os.kill(pid, signal.SIGKILL)
            _until(lambda pid=pid: llm._session.pids().get(service) != pid)  # type: ignore[misc]
        with pytest.raises(EngineDead, match=rf"{service} was killed by SIGKILL; giving up after 1 restarts"):
            running.result(60)
        with pytest.raises(EngineDead, match=r"giving up"):
            llm.generate("The mill", endless, use_tqdm=False)
