"""vLLM's own ``vllm bench serve`` and ``headrace bench serve``, in turn, with the same load on the same server.

Each round has a file of prompts of its own, which both clients send in its order with the same flags, as text, to a
server of the built-in model without a prefix cache: so the work is the same, and who is first gains nothing. The table
has the median of the rounds and that of their ratios, in which a slow drift of the machine's speed cancels.
Ends with 1 if a request failed, if the clients do not count the same tokens, or if a ratio is off by more than
``--tolerance``.

    client_bench.py --vllm VENV/bin/vllm --work FOLDER [--rounds 3] [--json FILE] [-- FLAG OF headrace serve …]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tokenizer_folder import export_tokenizer

from headrace.local_server import local_server
from shared.model_source import BUILT_IN, resolve_model
from tokenizer_service.gguf_vocabulary import load_gguf_vocabulary

EQUAL = ("completed", "failed", "total_input_tokens", "total_output_tokens")
"""Keys of the result that must be the same number."""
CLOSE = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{kind}_{latency}_ms" for latency in ("ttft", "tpot", "itl") for kind in ("mean", "median")),
)
"""Keys whose ratios must be within the tolerance."""
SHOWN = tuple(f"p99_{latency}_ms" for latency in ("ttft", "tpot", "itl"))
"""Keys that are only printed: the 99th percentile of some dozens of requests is one request."""

Result = dict[str, Any]
Round = dict[str, Result]
"""The result of each client by its name."""


def write_prompts(path: pathlib.Path, count: int, input_len: int, output_len: int, seed: int) -> None:
    """A custom data set: texts of random words and output lengths, both from half to one and a half of the given."""
    tokenizer = load_gguf_vocabulary(resolve_model(BUILT_IN).path).tokenizer
    words = [piece[1:] for piece in sorted(tokenizer.get_vocab()) if re.fullmatch("Ġ[a-z]{2,}", piece)]
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(rng.choices(words, k=rng.randint(input_len // 2, input_len * 3 // 2)))
            out = rng.randint(output_len // 2, output_len * 3 // 2)
            file.write(json.dumps({"prompt": text, "output_tokens": out}) + "\n")


def bench(command: Sequence[str], result: pathlib.Path, environ: dict[str, str]) -> Result:
    """Run one client, which writes its result to ``result``; SystemExit with its output if it fails."""
    files = ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
    done = subprocess.run([*command, *files], env=os.environ | environ, capture_output=True, text=True)
    result.with_suffix(".log").write_text(done.stdout + done.stderr)
    if done.returncode or not result.exists():
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")
    found: Result = json.loads(result.read_text())
    return found


def load_flags(options: argparse.Namespace, url: str, tokenizer: pathlib.Path, prompts: pathlib.Path) -> list[str]:
    """What both clients are told, word for word."""
    return [
        *("--backend", "openai", "--base-url", url, "--model", BUILT_IN, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "-1"),
        *("--num-prompts", str(options.num_prompts), "--max-concurrency", str(options.max_concurrency)),
        *("--num-warmups", str(options.max_concurrency), "--seed", str(options.seed), "--temperature", "0"),
        *("--disable-shuffle", "--ignore-eos", "--disable-tqdm"),
    ]


def run_rounds(options: argparse.Namespace, work: pathlib.Path, tokenizer: pathlib.Path) -> list[Round]:
    say = functools.partial(print, flush=True)
    ours = [sys.executable, "-P", "-m", "headrace.cli", "bench", "serve"]
    # Our client leaves prompts as they are; vLLM's has to be told to.
    theirs = [options.vllm, "bench", "serve", "--skip-chat-template"]
    environ = {"HF_HOME": str(work / "hf_home"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    flags = ["--no-enable-prefix-caching", *options.flags]
    rounds: list[Round] = []
    with local_server(BUILT_IN, say, flags, progress=False) as url:
        for turn in range(options.rounds):
            prompts = work / f"prompts_{turn}.jsonl"
            write_prompts(prompts, options.num_prompts, options.input_len, options.output_len, options.seed + turn)
            common = load_flags(options, url, tokenizer, prompts)
            clients = [("vllm", theirs), ("headrace", ours)]
            results = {
                name: bench([*command, *common], work / f"{name}_{turn}.json", environ)
                for name, command in (clients if turn % 2 == 0 else reversed(clients))
            }
            rounds.append(results)
            told = ", ".join(f"{name} {result['output_throughput']:.1f} tok/s" for name, result in results.items())
            say(f"round {turn + 1}: {told}")
    return rounds


def report(rounds: Sequence[Round], tolerance: float) -> bool:
    """Print the two results side by side; whether they agree."""
    print(f"\n{'median of the rounds':24}{'vllm':>12}{'headrace':>12}{'headrace ÷ vllm':>18}")
    good = True
    for key in (*CLOSE, *SHOWN):
        ratios = [turn["headrace"][key] / turn["vllm"][key] for turn in rounds]
        ratio = statistics.median(ratios)
        close = abs(ratio - 1) <= tolerance
        good &= close or key in SHOWN
        verdict = "" if key in SHOWN else "  ok" if close else "  FAILED"
        medians = [statistics.median(turn[name][key] for turn in rounds) for name in ("vllm", "headrace")]
        spread = f"({min(ratios):.3f}–{max(ratios):.3f})"
        print(f"{key:24}{medians[0]:12.2f}{medians[1]:12.2f}{ratio:18.3f} {spread}{verdict}")
    for key in EQUAL:
        counts = [(turn["vllm"][key], turn["headrace"][key]) for turn in rounds]
        same = all(theirs == ours for theirs, ours in counts)
        good &= same
        print(f"{key:24}{sum(c[0] for c in counts):12}{sum(c[1] for c in counts):12}{'ok' if same else 'FAILED':>18}")
    good &= not any(result["failed"] for turn in rounds for result in turn.values())
    print("They agree" if good else "They do NOT agree", f"within {tolerance:.0%}.")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the program vllm of an environment with its client")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for everything that is written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=128, help="mean words of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="mean tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--json", type=pathlib.Path, help="where to write the results of all rounds")
    parser.add_argument("flags", nargs="*", help="more flags of headrace serve, after --")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    export_tokenizer(work / "tokenizer")
    rounds = run_rounds(options, work, work / "tokenizer")
    good = report(rounds, options.tolerance)
    if options.json:
        kept = [
            {name: {key: result[key] for key in (*EQUAL, "duration", *CLOSE, *SHOWN)} for name, result in turn.items()}
            for turn in rounds
        ]
        load = {key: getattr(options, key) for key in ("num_prompts", "max_concurrency", "input_len", "output_len")}
        options.json.write_text(json.dumps({"load": load, "cores": os.cpu_count(), "rounds": kept}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
