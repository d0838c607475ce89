"""lm-eval against a server beside lm-eval on transformers: the same items, the same log-likelihoods, the same scores.

The server serves the built-in model in float32 and lm-eval asks it through ``local-completions``, in the ``PASSES`` one
after the other. The reference is lm-eval's own ``hf`` model: transformers reads the same GGUF file, in float32. Ends
with 1 if a log-likelihood is off by more than ``--tolerance``, or an ``is_greedy`` or an accuracy differs at all.

    lm_eval_check.py --lm-eval VENV/bin/lm-eval --work FOLDER [--json FILE] [-- FLAG OF headrace serve …]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lm_eval_items import TASKS, write_tasks
from tokenizer_folder import export_tokenizer

from headrace.local_server import local_server
from shared.model_source import BUILT_IN, resolve_model

MAX_LENGTH = 2048
SCORE_TOLERANCE = 1e-4
"""Relative; of perplexities, which are continuous. Accuracies must be equal."""

PASSES: dict[str, tuple[int, dict[str, Any]]] = {
    "one by one": (1, {"tokenizer_backend": "huggingface"}),
    "again, cache warm": (1, {"tokenizer_backend": "huggingface"}),
    "4 × 8 prompts": (8, {"tokenizer_backend": "huggingface", "num_concurrent": 4}),
    "4 × 1 as text": (1, {"num_concurrent": 4, "tokenized_requests": False}),
}
"""Prompts in one HTTP request, and further arguments of ``local-completions``."""


@dataclass(frozen=True)
class Outcome:
    """What one run of lm-eval gave."""

    scores: dict[str, float]
    """By ``task/metric``."""
    answers: dict[str, tuple[float, bool | None]]
    """Log-likelihood and is_greedy by ``task/document/choice``; texts have no is_greedy."""
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """One outcome beside the reference."""

    largest: float
    """Largest difference of a log-likelihood, in nats; infinite if the two did not answer the same requests."""
    where: str
    greedy: int
    """Requests whose is_greedy differs."""
    scores: int
    """Scores that differ."""

    def good(self, tolerance: float) -> bool:
        return self.largest <= tolerance and not self.greedy and not self.scores


def run_lm_eval(command: list[str], work: pathlib.Path, name: str) -> Outcome:
    """Run lm-eval on the tasks in ``work/tasks`` and read what it wrote; SystemExit with its log if it fails."""
    out = work / "results" / name.replace(" ", "_").replace(",", "").replace("×", "x")
    environ = os.environ | {"HF_HOME": str(work / "hf_home"), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    tasks = ["--tasks", ",".join(TASKS), "--include_path", str(work / "tasks")]
    start = time.monotonic()
    log = out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run(
            [*command, *tasks, "--log_samples", "--output_path", str(out)], env=environ, stdout=stream, stderr=stream
        )
    if done.returncode:
        raise SystemExit(f"lm-eval ended with {done.returncode}:\n{log.read_text()[-6000:]}")
    return read_outcome(out, time.monotonic() - start)


def read_outcome(folder: pathlib.Path, seconds: float) -> Outcome:
    """Read the newest results and samples under ``folder``."""
    results = json.loads(max(folder.rglob("results_*.json")).read_text())["results"]
    scores = {
        f"{task}/{metric.partition(',')[0]}": float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if "," in metric and "stderr" not in metric
    }
    answers: dict[str, tuple[float, bool | None]] = {}
    for task in TASKS:
        for line in max(folder.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines():
            sample = json.loads(line)
            for place, answer in enumerate(sample["filtered_resps"]):
                pair = (float(answer), None) if isinstance(answer, str | float) else read_pair(answer)
                answers[f"{task}/{sample['doc_id']}/{place}"] = pair
    return Outcome(scores, answers, seconds)


def read_pair(answer: list[Any]) -> tuple[float, bool]:
    return float(answer[0]), str(answer[1]) == "True"


def compare(outcome: Outcome, reference: Outcome) -> Comparison:
    """How far an outcome is from the reference."""
    if outcome.answers.keys() != reference.answers.keys() or outcome.scores.keys() != reference.scores.keys():
        return Comparison(math.inf, "the requests are not the same", 0, 0)
    differences = {key: abs(answer[0] - reference.answers[key][0]) for key, answer in outcome.answers.items()}
    # NaN is larger than everything here, or it would pass unseen.
    where = max(differences, key=lambda key: math.inf if math.isnan(differences[key]) else differences[key])
    return Comparison(
        largest=differences[where],
        where=where,
        greedy=sum(answer[1] != reference.answers[key][1] for key, answer in outcome.answers.items()),
        scores=sum(not same_score(key, value, reference.scores[key]) for key, value in outcome.scores.items()),
    )


def same_score(name: str, value: float, reference: float) -> bool:
    if name.split("/")[1].startswith("acc"):
        return value == reference
    return math.isclose(value, reference, rel_tol=SCORE_TOLERANCE)


def reference_command(lm_eval: str, tokenizer: pathlib.Path) -> list[str]:
    path = resolve_model(BUILT_IN).path
    arguments = {"pretrained": path.parent, "gguf_file": path.name, "tokenizer": tokenizer, "dtype": "float32"}
    return [lm_eval, "run", "--model", "hf", "--device", "cpu", "--batch_size", "1", *model_args(arguments)]


def peer_command(lm_eval: str, url: str, tokenizer: pathlib.Path, batch: int, more: Mapping[str, Any]) -> list[str]:
    arguments = {"model": BUILT_IN, "base_url": f"{url}/v1/completions", "tokenizer": tokenizer, **more}
    return [lm_eval, "run", "--model", "local-completions", "--batch_size", str(batch), *model_args(arguments)]


def model_args(arguments: Mapping[str, Any]) -> list[str]:
    pairs = {**arguments, "max_length": MAX_LENGTH}
    return ["--model_args", ",".join(f"{key}={value}" for key, value in pairs.items())]


def prefix_hits(url: str) -> float:
    """Prompt tokens that the server has found in its prefix cache so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def run_passes(lm_eval: str, work: pathlib.Path, tokenizer: pathlib.Path, flags: list[str]) -> dict[str, Outcome]:
    say = functools.partial(print, flush=True)
    outcomes = {}
    with local_server(BUILT_IN, say, ["--dtype=float32", *flags], progress=False) as url:
        for name, (batch, more) in PASSES.items():
            before = prefix_hits(url)
            outcomes[name] = run_lm_eval(peer_command(lm_eval, url, tokenizer, batch, more), work, name)
            hits = prefix_hits(url) - before
            say(f"{name}: {outcomes[name].seconds:.0f} s, {hits:.0f} prompt tokens from the prefix cache")
    return outcomes


def report(outcomes: Mapping[str, Outcome], reference: Outcome, tolerance: float) -> dict[str, Comparison]:
    """Print the scores and the differences; returns the comparisons."""
    names = list(reference.scores)
    print(f"\n{'':20}" + "".join(f"{name.removeprefix('headrace_'):>22}" for name in names))
    for label, outcome in {"transformers": reference, **outcomes}.items():
        print(f"{label:20}" + "".join(f"{outcome.scores.get(name, math.nan):22.6f}" for name in names))
    print()
    comparisons = {name: compare(outcome, reference) for name, outcome in outcomes.items()}
    for name, found in comparisons.items():
        verdict = "ok" if found.good(tolerance) else "FAILED"
        print(
            f"{name:20} largest difference {found.largest:.2e} nats at {found.where}; "
            f"is_greedy differs {found.greedy} times, scores {found.scores} times: {verdict}"
        )
    print(f"{len(reference.answers)} log-likelihoods each; the limit is {tolerance:g}")
    return comparisons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, help="the program lm-eval of an environment with torch")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for everything that is written")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="of a log-likelihood, in nats")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the scores and differences")
    parser.add_argument("flags", nargs="*", help="more flags of headrace serve, after --")
    options = parser.parse_args()
    work = options.work.resolve()
    print(f"{write_tasks(work / 'tasks')} items")
    tokenizer = work / "tokenizer"
    export_tokenizer(tokenizer)
    reference = run_lm_eval(reference_command(options.lm_eval, tokenizer), work, "transformers")
    print(f"transformers: {reference.seconds:.0f} s", flush=True)
    outcomes = run_passes(options.lm_eval, work, tokenizer, options.flags)
    comparisons = report(outcomes, reference, options.tolerance)
    if options.json:
        differences = {name: asdict(found) for name, found in comparisons.items()}
        scores = {name: outcome.scores for name, outcome in {"transformers": reference, **outcomes}.items()}
        options.json.write_text(json.dumps({"differences": differences, "scores": scores}, indent=1) + "\n")
    return 0 if all(found.good(options.tolerance) for found in comparisons.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
