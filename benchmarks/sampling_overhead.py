"""What sampling features cost: decode steps of the model runner with each feature, and with all of them, beside greedy.

    python benchmarks/sampling_overhead.py --model demo --dtype bfloat16 --threads 2 --json result.json

Every set of features has requests of its own, which all stay in their slots. Their prompts are English text: after
random ids a model is so unsure of the next token that top-p keeps thousands. A round is one step of each set, in random
order, so that what disturbs the machine disturbs all of them; the table shows medians over the rounds. ``throughput``
is tokens per second relative to greedy. No other process of the server runs. ``--clock cpu --threads 1`` counts the
seconds that the process computes, which a busy machine lengthens less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpu_worker.environment import prepare_environment
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import load_model_config
from shared.model_source import resolve_model
from shared.sampling import SamplingParams
from tokenizer_service.vocabulary import load_vocabulary

BLOCK_SIZE = 16
EPOCH = Epoch(1, 1)
ENDS = [2]
TEXT = """A water wheel turns the energy of flowing or falling water into power, often in a mill. The channel that leads
the water from a stream or a pond to the wheel is called the headrace, and the one that takes it away is the tailrace.
A wheel stands upright on its axle. Water that falls on it from above fills the buckets, and their weight turns it;
water that flows below strikes its blades, which gives less power but needs no dam. Mills like these ground corn, sawed
wood, pumped water out of mines and worked the bellows of furnaces, until steam engines took their place. """
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

TEMPERATURE: dict[str, Any] = {"temperature": 0.8, "seed": 1}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
BIAS: dict[str, Any] = {"logit_bias": [(1000 + 37 * i, i / 10.0) for i in range(10)]}
BAD_WORDS: dict[str, Any] = {"bad_words_token_ids": [[1200], [5, 1300], [5, 6, 1400], [7, 8, 9, 1500]]}
ENDINGS: dict[str, Any] = {"min_tokens": 100_000, "stop_token_ids": [11, 12, 13]}
ALLOWED: dict[str, Any] = {"allowed_token_ids": list(range(100, 1100))}
WITHOUT_TOP_K: dict[str, Any] = {
    **TEMPERATURE,
    **PENALTIES,
    **BIAS,
    **BAD_WORDS,
    **ENDINGS,
    "top_p": 0.9,
    "min_p": 0.05,
    "logprobs": 5,
}
ALL: dict[str, Any] = {**WITHOUT_TOP_K, "top_k": 50}

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": TEMPERATURE,
    "top_k 50": {**TEMPERATURE, "top_k": 50},
    "top_p 0.9": {**TEMPERATURE, "top_p": 0.9},
    "min_p 0.05": {**TEMPERATURE, "min_p": 0.05},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "presence penalty": {"temperature": 0.0, "presence_penalty": 0.1},
    "frequency penalty": {"temperature": 0.0, "frequency_penalty": 0.1},
    "logit_bias, 10 ids": {"temperature": 0.0, **BIAS},
    "allowed_token_ids, 1000": {"temperature": 0.0, **ALLOWED},
    "bad_words, 4": {"temperature": 0.0, **BAD_WORDS},
    "min_tokens, stop ids": {"temperature": 0.0, **ENDINGS},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "logprobs 20": {"temperature": 0.0, "logprobs": 20},
    "all": ALL,
    "all, logprobs 20": {**ALL, "logprobs": 20},
    "all without top_k": WITHOUT_TOP_K,
    "all, only top_p cuts": {**WITHOUT_TOP_K, "min_p": 0.0},
    "all, nothing cuts": {**WITHOUT_TOP_K, "min_p": 0.0, "top_p": 1.0},
    "all and allowed_token_ids": {**ALL, **ALLOWED},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One set of features."""

    name: str
    step_ms: float
    """Median."""
    throughput: float
    """Of the median step, relative to greedy."""


class Bench:
    """A runner whose slots hold ``rows`` requests for each set of features."""

    def __init__(self, options: argparse.Namespace) -> None:
        source = resolve_model(options.model)
        config = load_model_config(source)
        from gpu_worker.loading.open_weights import open_weights

        weights = open_weights(source, config, "auto", 0)
        import torch

        from gpu_worker.build import build_runner

        self.rows, self.prompt, self.length = options.rows, options.prompt, options.prompt + options.rounds + 8
        self.names = [name for name in FEATURES if name == "greedy" or not options.only or name in options.only]
        self.blocks = -(-self.length // BLOCK_SIZE)
        num_slots = self.rows * len(self.names)
        worker = WorkerConfig(
            model=str(source.path),
            dtype=options.dtype,
            max_model_len=self.blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_slots=num_slots + 1,
            max_num_batched_tokens=self.rows * self.prompt,
            gpu_memory_utilization=0.9,
            kv_cache_bytes=None,
            num_blocks_override=1 + num_slots * self.blocks,
            seed=0,
            batch_invariant=False,
            enforce_eager=False,
        )
        torch.set_num_threads(1)
        self.runner = build_runner(worker, config, weights, "cpu")
        torch.set_num_threads(options.threads)
        self.vocab_size = config.vocab_size
        self.text: list[int] = load_vocabulary(source).tokenizer.encode(TEXT, add_special_tokens=False).ids
        self.steps = {name: self._start(index, name) for index, name in enumerate(self.names)}

    def _start(self, index: int, name: str) -> Step:
        """Compute the prompts of a set of features; the step that decodes a token of each of its requests."""
        params = SamplingParams(max_tokens=None, **FEATURES[name])
        params.validate(self.vocab_size)
        slots = range(index * self.rows, (index + 1) * self.rows)
        step = make_step(
            new=[SlotInit(s, f"r{s}", 0, self.prompt, self.prompt, 0, self.length, params, ENDS) for s in slots],
            new_tokens=[token for row in range(self.rows) for token in self._prompt(row)],
            prefill=[(s, 0, self.prompt) for s in slots],
            sample=list(enumerate(slots)),
            blocks=[(s, 1 + s * self.blocks + b) for s in slots for b in range(self.blocks)],
        )
        self.runner.launch(step).wait()
        return make_step(decode=slots, sample=list(enumerate(slots)))

    def _prompt(self, row: int) -> list[int]:
        """Each row begins elsewhere in the text."""
        first = row * len(self.text) // self.rows
        return [self.text[(first + index) % len(self.text)] for index in range(self.prompt)]

    def measure(self, rounds: int, clock: Callable[[], float], warm_up: int = 4) -> list[Result]:
        """Every set of features, in the order of the table."""
        seconds: dict[str, list[float]] = {name: [] for name in self.names}
        shuffled = random.Random(0)
        for number in range(warm_up + rounds):
            for name in shuffled.sample(self.names, len(self.names)):
                start = clock()
                self.runner.launch(self.steps[name]).wait()
                if number >= warm_up:
                    seconds[name].append(clock() - start)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        return [Result(name, medians[name] * 1e3, medians["greedy"] / medians[name]) for name in self.names]


def make_step(**parts: object) -> Step:
    """A step from lists; parts that are left out are empty."""
    arrays = {
        name: np.array(parts.get(name, []), np.int32).reshape((-1, columns) if columns else -1)
        for name, columns in Step.ARRAYS.items()
    }
    return Step(EPOCH, 1, parts.get("new", []), **arrays)  # type: ignore[arg-type]


def main() -> None:
    options = arguments()
    prepare_environment()
    results = Bench(options).measure(options.rounds, CLOCKS[options.clock])
    print(f"{options.rows} rows, {options.threads} threads, median of {options.rounds} rounds")
    print(f"{'':28}{'step ms':>9}{'more ms':>9}{'throughput':>12}")
    for result in results:
        more = result.step_ms - results[0].step_ms
        print(f"{result.name:28}{result.step_ms:9.2f}{more:9.2f}{result.throughput:11.3f}x")
    if options.json:
        report = {"rows": options.rows, "threads": options.threads, "model": options.model, "dtype": options.dtype}
        report["results"] = [dataclasses.asdict(result) for result in results]
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16, help="requests of each set")
    parser.add_argument("--prompt", type=int, default=45, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--only", nargs="+", choices=list(FEATURES), help="these sets, beside greedy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
