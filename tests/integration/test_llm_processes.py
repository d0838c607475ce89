"""How an ``LLM`` begins and ends: without a tokenizer, in asyncio programs, in scripts, when it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from runner_harness import reference_greedy
from tiny_models import TinyModels
from waiting import wait_until

from headrace import LLM, AsyncLLM, EngineDead, SamplingParams
from shared.errors import StartupError

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": 400}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, skip_special_tokens=False)
TEXT = "The water wheel turns"
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> pathlib.Path:
    return tiny_models.folder("qwen3")


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_tokenizer(model: pathlib.Path) -> None:
    prompts = [[5, 6, 7], [40], list(range(60, 90))]
    with LLM(str(model), skip_tokenizer_init=True, **OPTIONS) as bare:
        pids = bare._session.pids()
        assert set(pids) == {"core_engine", "gpu_worker"}
        outputs = bare.generate(prompts, GREEDY, use_tqdm=False)
        found = [output.outputs[0].token_ids for output in outputs]
        assert found == [reference_greedy(model, prompt, 12) for prompt in prompts]
        assert {output.outputs[0].text for output in outputs} == {""}
        [scored] = bare.generate(prompts[0], SamplingParams(logprobs=1, prompt_logprobs=1), use_tqdm=False)
        [first, *_] = scored.outputs[0].logprobs or []
        assert {found.decoded_token for found in first.values()} == {None}
        assert [output.outputs[0].token_ids for output in bare.stream(prompts[0], GREEDY)][-1] == found[0]
        with pytest.raises(ValueError, match="token ids"):
            bare.generate("text", GREEDY)
        with pytest.raises(ValueError, match="tokenizer"):
            bare.tokenize("text")
        stream = bare.stream([1, 2, 3], LONG)
        next(stream)
    assert not any(map(alive, pids.values()))
    with pytest.raises(EngineDead, match="closed"):
        list(stream)
    with pytest.raises(EngineDead, match="closed"):
        bare.generate([1], GREEDY)
    bare.close()


def test_start_that_fails_says_why_and_leaves_nothing(model: pathlib.Path) -> None:
    before = threading.active_count()
    with pytest.raises(StartupError, match=r"max-model-len 100000 .* 512"):
        LLM(str(model), max_model_len=100_000, **OPTIONS)
    wait_until(lambda: threading.active_count() <= before)  # threads of earlier tests may end as well


async def test_async_llm(model: pathlib.Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    async with AsyncLLM(str(model), **OPTIONS) as llm:
        assert ticks > 20  # the loop went on while the processes started
        outputs = [output async for output in llm.generate(TEXT, GREEDY, "my-id")]
        assert outputs[-1].request_id == "my-id"
        assert outputs[-1].outputs[0].text == await llm.detokenize(outputs[-1].outputs[0].token_ids)
        assert await llm.tokenize(TEXT) == outputs[-1].prompt_token_ids
        assert await llm.get_metrics()
    ticking.cancel()


QUICKSTART = """
from headrace import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

# Create an LLM.
llm = LLM(model={model!r})
# Generate texts from the prompts.
# The output is a list of RequestOutput objects
# that contain the prompt, generated text, and other information.
outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
print("\\nGenerated Outputs:\\n" + "-" * 60)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt:    {{prompt!r}}")
    print(f"Output:    {{generated_text!r}}")
    print("-" * 60)
"""
"""vLLM's examples/offline_inference/basic/basic.py with the import changed."""

STAYING = """
import os, sys, time
from headrace import LLM, SamplingParams

llm = LLM({model!r}, threads=1)
print(os.getpid(), *llm._session.pids().values(), flush=True)
llm.generate([[1, 2, 3]] * 4000, SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False)
"""


def start_script(folder: pathlib.Path, code: str, model: pathlib.Path) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(code.format(model=str(model)))
    environ = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environ
    )


def test_script_of_vllm_runs_with_its_import_changed(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    with start_script(tmp_path, QUICKSTART, model) as script:
        out, err = script.communicate(timeout=100)
    assert script.returncode == 0, err
    assert out.count("Prompt:") == out.count("Output:") == 4
    assert "Traceback" not in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["script.py"]


def test_no_process_outlives_its_caller(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    codes = {signal.SIGINT: -2, signal.SIGKILL: -9}
    with contextlib.ExitStack() as stack:
        scripts = {}
        for signum in codes:
            folder = tmp_path / signum.name
            folder.mkdir()
            scripts[signum] = stack.enter_context(start_script(folder, STAYING, model))
        for signum, script in scripts.items():
            assert script.stdout is not None
            assert script.stderr is not None
            caller, *pids = map(int, script.stdout.readline().split())
            assert len(pids) == 3
            time.sleep(0.3)
            os.kill(caller, signum)
            assert script.wait(30) == codes[signum]
            wait_until(lambda pids=pids: not any(map(alive, pids)))  # type: ignore[misc]
            assert ("KeyboardInterrupt" in script.stderr.read()) == (signum == signal.SIGINT)


def test_replicas_share_a_batch_and_one_of_them_may_die(model: pathlib.Path) -> None:
    prompts = [[5 + i, 6, 7] for i in range(12)]
    with LLM(str(model), skip_tokenizer_init=True, data_parallel_size=2, **OPTIONS) as llm:
        before = llm._session.pids()
        assert set(before) == {"core_engine", "gpu_worker/0", "gpu_worker/1"}
        streams = [llm.stream(prompt, LONG) for prompt in prompts]
        for stream in streams:
            next(stream)
        os.kill(before["gpu_worker/0"], signal.SIGKILL)
        found = [list(stream)[-1].outputs[0].token_ids for stream in streams]
        assert found == [reference_greedy(model, prompt, 400) for prompt in prompts]
        wait_until(lambda: llm._session.pids().get("gpu_worker/0") not in (None, before["gpu_worker/0"]))
        after = llm._session.pids()
        assert {name for name, pid in after.items() if before[name] != pid} == {"gpu_worker/0"}
    assert not any(map(alive, after.values()))
