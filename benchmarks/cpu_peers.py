"""Headrace against llama.cpp's server and HF generate on a CPU, side by side, on the built-in model.

Three cases: 16 requests of 45 prompt tokens and 64 output tokens at once (cold prompts), one request alone, and one
prompt of 512 tokens with one output token. Headrace and llama.cpp are asked through HTTP, HF generates in its own
process (for the 16: one static batch). The three take turns in every round, so that a change in the machine's speed
meets all of them; the table has the median of the rounds.

    python benchmarks/cpu_peers.py --peers-python PEERS/bin/python [--rounds 3] [--json FILE]

``PEERS`` is a virtual environment with ``pip install xllamacpp`` (llama.cpp's server as a Python package).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

PROMPT_TOKENS, OUTPUT_TOKENS, BATCH, LONG_PROMPT = 45, 64, 16, 512
CASES = {
    "batch": "16 × 64 tokens at once, tok/s",
    "single": "1 × 64 tokens, tok/s",
    "prefill": "512-token prompt, tok/s",
}


def random_prompt(length: int) -> list[int]:
    """Ids that no cache has seen, all of them ordinary tokens of the built-in model."""
    return [random.randrange(1000, 45000) for _ in range(length)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def model_path() -> str:
    from shared.model_source import resolve_model

    return str(resolve_model("demo").path)


# -- the peers ---------------------------------------------------------------------------------------------------------

LLAMA_SERVER = """
import sys, time, xllamacpp
path, port, parallel, threads = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.hostnames = path, port, ["127.0.0.1"]
params.n_parallel, params.n_ctx, params.n_gpu_layers = parallel, 1024 * parallel, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print("listening", server.listening_address, flush=True)
time.sleep(100000)
"""

HF_CHILD = """
import json, pathlib, sys, time, torch, transformers
path = pathlib.Path(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
print("ready", flush=True)
for line in sys.stdin:
    prompts, new = json.loads(line)
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                             do_sample=False, pad_token_id=2)
    took = time.perf_counter() - start
    assert out.shape[1] == ids.shape[1] + new
    print(took, flush=True)
"""


@contextmanager
def process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(command, text=True, **options)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for(url: str, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{url} did not answer within {seconds} s")


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> int:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(url + "/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {answer}")
        return int(answer["usage"]["completion_tokens"])


def http_case(url: str, case: str) -> float:
    """Tokens per second of one run of a case against an OpenAI-compatible server."""

    async def run() -> float:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            if case == "prefill":
                prompts, tokens = [random_prompt(LONG_PROMPT)], 1
            else:
                prompts, tokens = (
                    [random_prompt(PROMPT_TOKENS) for _ in range(BATCH if case == "batch" else 1)],
                    OUTPUT_TOKENS,
                )
            start = time.perf_counter()
            done = await asyncio.gather(*(complete(session, url, prompt, tokens) for prompt in prompts))
            took = time.perf_counter() - start
            if any(count != tokens for count in done):
                raise SystemExit(f"{url} generated {done}, not {tokens} each")
            return (LONG_PROMPT if case == "prefill" else sum(done)) / took

    return asyncio.run(run())


def hf_case(child: subprocess.Popen[str], case: str) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    if case == "prefill":
        prompts, new = [random_prompt(LONG_PROMPT)], 1
    else:
        prompts, new = [random_prompt(PROMPT_TOKENS) for _ in range(BATCH if case == "batch" else 1)], OUTPUT_TOKENS
    child.stdin.write(json.dumps([prompts, new]) + "\n")
    child.stdin.flush()
    took = float(child.stdout.readline())
    return (LONG_PROMPT if case == "prefill" else new * len(prompts)) / took


# -- the run -----------------------------------------------------------------------------------------------------------


def measure(engines: dict[str, Callable[[str], float]], rounds: int) -> dict[str, dict[str, list[float]]]:
    for name, run in engines.items():
        for case in CASES:
            print(f"warm-up {name} {case}: {run(case):.0f}", flush=True)
    results: dict[str, dict[str, list[float]]] = {case: {name: [] for name in engines} for case in CASES}
    for turn in range(rounds):
        for case in CASES:
            for name, run in engines.items():
                results[case][name].append(run(case))
                print(f"round {turn + 1} {case:8} {name:10} {results[case][name][-1]:8.1f}", flush=True)
                time.sleep(0.5)
    return results


def report(results: dict[str, dict[str, list[float]]]) -> str:
    names = list(next(iter(results.values())))
    lines = ["| case | " + " | ".join(names) + " | " + " | ".join(f"headrace ÷ {n}" for n in names[1:]) + " |"]
    lines.append("|---" * (2 * len(names)) + "|")
    for case, by_name in results.items():
        middle = {name: statistics.median(values) for name, values in by_name.items()}
        cells = [f"{middle[n]:.0f} ({min(by_name[n]):.0f}–{max(by_name[n]):.0f})" for n in names]
        ratios = [f"{middle['headrace'] / middle[n]:.2f}" for n in names[1:]]
        lines.append("| " + " | ".join([CASES[case], *cells, *ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers-python", help="python of an environment with xllamacpp (default: this one)", default=sys.executable
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="a running Headrace server (default: start one with `headrace serve demo`)")
    parser.add_argument("--serve-args", default="", help="more flags for `headrace serve`")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    path, threads = model_path(), os.cpu_count() or 1
    llama_port, our_port = free_port(), free_port()
    url = options.url or f"http://127.0.0.1:{our_port}"
    ours = [sys.executable, "-P", "-m", "headrace.cli", "serve", "demo", "--port", str(our_port), "--dtype", "bfloat16"]
    with tempfile.TemporaryFile("w+") as log:
        quiet: dict[str, Any] = {"stdout": log, "stderr": log}
        llama = [options.peers_python, "-c", LLAMA_SERVER, path, str(llama_port), str(BATCH), str(threads)]
        with (
            process(llama, **quiet),
            process(
                [sys.executable, "-c", HF_CHILD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            ) as hf,
            process(ours + options.serve_args.split() if not options.url else ["sleep", "100000"], **quiet),
        ):
            assert hf.stdout is not None
            while hf.stdout.readline().strip() != "ready":
                if hf.poll() is not None:
                    raise SystemExit("HF could not load the model")
            wait_for(f"http://127.0.0.1:{llama_port}/health")
            wait_for(f"{url}/ready")
            engines: dict[str, Callable[[str], float]] = {
                "headrace": lambda case: http_case(url, case),
                "llama.cpp": lambda case: http_case(f"http://127.0.0.1:{llama_port}", case),
                "HF": lambda case: hf_case(hf, case),
            }
            results = measure(engines, options.rounds)
    print(report(results))
    if options.json:
        machine = {
            "machine": platform.processor() or platform.machine(),
            "cores": threads,
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"host": machine, "cases": CASES, "tokens_per_s": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
