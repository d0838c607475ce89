"""``headrace bench prefix``: requests that share prefixes, with the prefix cache and without it, or by its policies."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from core_engine.eviction import POLICIES
from headrace.argument_types import at_least
from headrace.bench import offline, prefix_policies
from headrace.bench.datasets import SampleRequest, add_dataset_flags, load_dataset
from headrace.bench.prefix_traces import TRACES
from headrace.bench.throughput import run_once
from headrace.bench.tokenizer import BenchTokenizer
from headrace.sampling_params import SamplingParams
from shared.config import Settings

WARMUP_REQUESTS, WARMUP_TOKENS = 4, 8
FORMULAS = """\
elapsed  = time from the call of generate() to its return, all requests at once
hit rate = prompt tokens found in the cache / prompt tokens
speed-up = elapsed without the cache / elapsed with it"""


def main(argv: Sequence[str]) -> int:
    """Parse, measure, print and write; returns an exit code. Flags are vLLM's of ``benchmark_prefix_caching``."""
    return offline.run(
        "prefix",
        argv,
        _add_flags,
        _measure_any,
        description="Measure what the prefix cache gains. Each prompt is a prefix that all share and ids of its own; "
        "every prompt is sent --repeat-count times, all at once. --enable-prefix-caching has no effect here: both are "
        "measured. With --trace: compare the eviction policies on a trace in a pool that is too small for it.",
    )


def _measure_any(settings: Settings, options: argparse.Namespace) -> Mapping[str, Any]:
    """Raises ``BenchError`` when a flag of the other kind is given, or one is missing."""
    if options.trace is not None:
        if options.num_prompts or options.input_length_range or options.dataset_path:
            raise offline.BenchError(
                "--trace makes its own prompts: leave out --num-prompts, --input-length-range and --dataset-path"
            )
        if options.write_trace and options.trace == "all":
            raise offline.BenchError("--write-trace writes one trace: name it with --trace")
        return prefix_policies.measure(settings, options)
    if options.blocks_only or options.write_trace:
        raise offline.BenchError(f"--{'blocks-only' if options.blocks_only else 'write-trace'} needs --trace")
    if not options.num_prompts or not options.input_length_range:
        raise offline.BenchError("give --num-prompts and --input-length-range, or --trace")
    return measure(settings, options)


def measure(settings: Settings, options: argparse.Namespace) -> Mapping[str, Any]:
    """Run the requests without and with the cache and print the figures; returns both, times in seconds."""
    shape = offline.shape_of(settings)
    tokenizer = offline.tokenizer_of(settings, shape)
    requests, prefix = make_requests(options, tokenizer, settings.seed)
    shape.check_length(max(r.prompt_len for r in requests) + options.output_len, "the longest prompt + --output-len")
    text = offline.makes_text(shape, options)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=options.output_len, detokenize=text)
    figures: dict[str, Any] = {}
    for name, enabled in (("off", False), ("on", True)):
        own = dataclasses.replace(settings, enable_prefix_caching=enabled)
        with offline.open_llm(own, tokenizer=text) as llm:
            run_once(llm, _warmup(requests, tokenizer, settings.seed), params, progress=False)
            if options.cache_prefix_first and prefix:
                run_once(llm, [SampleRequest(prefix, len(prefix), 1)], params, progress=False)
            found = run_once(llm, requests, params, progress=not options.disable_tqdm)
        figures[name] = found | {"hit_rate": found["cached_prompt_tokens"] / found["total_prompt_tokens"]}
        print(f"prefix cache {name + ':':<4} {_line(figures[name])}")
    figures["speedup"] = figures["off"]["elapsed_time"] / figures["on"]["elapsed_time"]
    print(f"Speed-up by the prefix cache: {figures['speedup']:.2f}\n\n{FORMULAS}")
    return figures


def make_requests(
    options: argparse.Namespace, tokenizer: BenchTokenizer, seed: int
) -> tuple[list[SampleRequest], list[int]]:
    """The requests in the order in which they are sent, and the prefix that they share.

    Raises:
        BenchError: the prefix is longer than the shortest prompt, or the file has too few prompts in the range.
        StartupError: the file cannot be read.
    """
    draw = random.Random(seed)
    if options.dataset_path is None:
        prompts, prefix = _random_prompts(options, tokenizer.vocab_size, draw)
    else:
        prompts, prefix = _prompts_of_file(options, tokenizer, seed), []
    repeated = prompts * options.repeat_count
    if options.sort:
        repeated.sort(key=len)
    else:
        draw.shuffle(repeated)
    return [SampleRequest(ids, len(ids), options.output_len) for ids in repeated], prefix


def _random_prompts(
    options: argparse.Namespace, vocab_size: int, draw: random.Random
) -> tuple[list[list[int]], list[int]]:
    low, high = options.input_length_range
    if options.prefix_len > low:
        raise offline.BenchError(
            f"--prefix-len {options.prefix_len} is more than the shortest prompt of --input-length-range {low}:{high}"
        )
    prefix = [draw.randrange(vocab_size) for _ in range(options.prefix_len)]
    prompts = []
    for _ in range(options.num_prompts):
        length = draw.randint(low, high)
        prompts.append(prefix + [draw.randrange(vocab_size) for _ in range(length - len(prefix))])
    return prompts, prefix


def _prompts_of_file(options: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[list[int]]:
    """Ids of the first questions of a ShareGPT file, shuffled, whose length is in the range."""
    if options.prefix_len:
        raise offline.BenchError("--prefix-len is for random prompts; leave it out with --dataset-path")
    flags = argparse.ArgumentParser()
    add_dataset_flags(flags)
    everything = ["--num-prompts", str(sys.maxsize), "--no-oversample", "--output-len", str(options.output_len)]
    asked = flags.parse_args(["--dataset-name=sharegpt", "--dataset-path", options.dataset_path, *everything])
    samples = load_dataset(asked, tokenizer, seed)
    low, high = options.input_length_range
    texts = [s.prompt for s in samples if isinstance(s.prompt, str) and low <= s.prompt_len <= high]
    if len(texts) < options.num_prompts:
        raise offline.BenchError(
            f"{options.dataset_path} has {len(texts)} prompts of {low} to {high} tokens, fewer than --num-prompts "
            f"{options.num_prompts}"
        )
    return [tokenizer.encode(text) for text in texts[: options.num_prompts]]


def _warmup(requests: Sequence[SampleRequest], tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    """A few requests of the same lengths that share no prefix with the measured ones."""
    draw = random.Random(f"warm-up {seed}")
    taken = requests[:WARMUP_REQUESTS]
    prompts = [[draw.randrange(tokenizer.vocab_size) for _ in range(request.prompt_len)] for request in taken]
    return [SampleRequest(ids, len(ids), WARMUP_TOKENS) for ids in prompts]


def _add_flags(parser: argparse.ArgumentParser) -> None:
    whole = at_least(1)
    parser.add_argument("--dataset-path", metavar="FILE", help="take prompts from a ShareGPT file, not random ones")
    parser.add_argument("--num-prompts", type=whole, help="different prompts")
    parser.add_argument("--repeat-count", type=whole, default=1, help="times that each is sent (default: 1)")
    parser.add_argument(
        "--input-length-range",
        type=_length_range,
        metavar="MIN:MAX",
        help="tokens of a prompt, the prefix included",
    )
    parser.add_argument(
        "--prefix-len", type=at_least(0), default=0, help="tokens that all prompts begin with (default: 0)"
    )
    parser.add_argument("--output-len", type=whole, default=10, help="tokens of an output (default: 10)")
    parser.add_argument("--sort", action="store_true", help="send by length instead of shuffled")
    parser.add_argument(
        "--cache-prefix-first", action="store_true", help="send the shared prefix alone before, not counted"
    )
    traces = parser.add_argument_group("eviction policies")
    traces.add_argument(
        "--trace",
        choices=[*TRACES, "all"],
        help="multi-turn chats, shared system prompts with a long tail, or one-off documents between a hot set",
    )
    traces.add_argument(
        "--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="to compare (default: all)"
    )
    traces.add_argument("--num-requests", type=whole, default=1000, help="of a trace (default: 1000)")
    traces.add_argument(
        "--pool-share",
        type=_share,
        default=1 / 3,
        metavar="X",
        help="KV blocks, as a share of what the trace wants (default: a third); --num-gpu-blocks-override wins",
    )
    traces.add_argument(
        "--take-turns",
        action="store_true",
        help="keep an engine for each policy and send a request to one after the other, so that they share the "
        "machine's moods; on a CPU",
    )
    traces.add_argument(
        "--write-trace", metavar="FILE.jsonl", help="write the trace for headrace simulate --max-concurrency 1"
    )
    traces.add_argument(
        "--blocks-only", action="store_true", help="drive the block manager without a model: hit rates only"
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return share


def _length_range(text: str) -> tuple[int, int]:
    low, separator, high = text.partition(":")
    try:
        found = int(low), int(high)
    except ValueError:
        separator = ""
    if not separator or not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX with 1 <= MIN <= MAX")
    return found


def _line(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['elapsed_time']:.3f} s, {figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s, hit rate {figures['hit_rate']:.1%}"
    )
