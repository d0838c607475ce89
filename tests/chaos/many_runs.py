"""Hundreds of runs of ``chaos_run``, one JSON line each; ``scripts/chaos.sh`` calls it.

    python -m tests.chaos.many_runs RUNS SEED [--jobs N] --work FOLDER

Run ``i`` has the seed SEED + i, so ``RUNS 1`` with the seed of a failure repeats it. What FOLDER already has is not run
again. Ends with status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.chaos.chaos_run import BEAT_S, ENGINE_FLAGS, LEASE_S, Outcome, run_once, warm_up
from tests.chaos.deployment import Deployment
from tests.tiny_models import make_checkpoint

SHAPES = ((2, 2, 1), (1, 2, 2), (2, 1, 1), (1, 1, 1))
"""Gateways, tokenizers and workers of the deployments; a quarter of the runs each."""
BLOCK = 60
"""Seeds after which each shape gets a new deployment."""


def deployment_of(folder: pathlib.Path, model: str, shape: tuple[int, int, int]) -> Deployment:
    """A deployment of the tiny model in batch-invariant mode, with short beats and leases."""
    gateways, tokenizers, workers = shape
    return Deployment(
        folder,
        model,
        gateways=gateways,
        tokenizers=tokenizers,
        workers=workers,
        flags=ENGINE_FLAGS,
        beat_s=BEAT_S,
        lease_s=LEASE_S,
    )


def run_seeds(
    folder: pathlib.Path, model: str, shape: tuple[int, int, int], seeds: Iterable[int]
) -> Generator[Outcome, None, None]:
    """The outcomes of the seeds, in one deployment; after a failure the next seed gets a new one."""
    deployment: Deployment | None = None
    baseline: dict[str, int] = {}
    try:
        for seed in seeds:
            if deployment is None:
                deployment = deployment_of(folder / f"{shape}-{seed}", model, shape)
                deployment.start()
                baseline = warm_up(deployment, model)
            outcome = run_once(deployment, model, seed, baseline)
            if outcome.wrong:
                outcome.wrong += deployment.stop()
                deployment = None
            yield outcome
    finally:
        if deployment is not None and (wrong := deployment.stop()):
            raise AssertionError(f"at the end: {wrong}")


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of all runs."""
    faults: Counter[str] = Counter()
    for line in lines:
        for fault in line["faults"]:
            kind = fault["name"].partition("/")[0]
            faults[f"{kind} {'killed' if fault['stopped_s'] is None else 'stopped'}"] += 1
    hits = sum(fault["unfinished"] > 0 for line in lines for fault in line["faults"])
    return {
        "runs": len(lines),
        "failed": sorted(line["seed"] for line in lines if line["wrong"]),
        "faults": dict(sorted(faults.items())),
        "faults_under_load": hits,
        "requests_sent_again": sum(line["resent"] for line in lines),
        "requests_resumed": sum(line["resumed"] for line in lines),
        "requests_found_again": sum(line["found_again"] for line in lines),
        "requests_refused_first": sum(line["refused"] for line in lines),
        "longest_run_s": round(max((line["disturbed_s"] for line in lines), default=0.0), 1),
        "longest_settle_s": round(max((line["settle_s"] for line in lines), default=0.0), 1),
    }


def run_all(
    folder: pathlib.Path, model: str, wanted: range, done: set[int], jobs: int, write: Callable[[dict[str, Any]], None]
) -> None:
    """Run what is not done yet, in ``jobs`` deployments at a time, and write each outcome."""
    lock = threading.Lock()

    def run(number: int, seeds: list[int]) -> None:
        # All in this thread: a process dies with the thread that started it.
        with contextlib.closing(run_seeds(folder, model, SHAPES[number], seeds)) as outcomes:
            for outcome in outcomes:
                with lock:
                    write(outcome.to_json() | {"gateways, tokenizers, workers": SHAPES[number]})

    with ThreadPoolExecutor(jobs) as pool:
        begun = []
        for first, number in itertools.product(range(wanted.start, wanted.stop, BLOCK), range(len(SHAPES))):
            block = range(first, min(first + BLOCK, wanted.stop))
            seeds = [seed for seed in block if seed % len(SHAPES) == number and seed not in done]
            begun.append(pool.submit(run, number, seeds))
    for each in begun:
        each.result()


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and stop processes under load, many times.")
    parser.add_argument("runs", type=int, nargs="?", default=300)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of the first run")
    parser.add_argument("--jobs", type=int, default=1, help="deployments at a time")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for runs, logs and the summary")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model, record = options.work / "model", options.work / "runs.jsonl"
    if not (model / "tokenizer.json").exists():
        make_checkpoint(model, "llama")
    record.touch()
    done = {json.loads(line)["seed"] for line in record.read_text().splitlines()}
    wanted = range(options.seed, options.seed + options.runs)
    print(f"chaos: seeds {wanted.start} to {wanted.stop - 1}, {len(done & set(wanted))} of them done", flush=True)
    with record.open("a") as out:

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=out, flush=True)
            print(f"seed {line['seed']}: {'; '.join(line['wrong']) or 'ok'}", flush=True)

        run_all(options.work, str(model), wanted, done, options.jobs, write)
    lines = [line for line in map(json.loads, record.read_text().splitlines()) if line["seed"] in wanted]
    found = summary(lines)
    (options.work / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
