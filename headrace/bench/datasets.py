"""The prompts of a benchmark: random token ids, named workloads, or texts from a file, with vLLM's flags and rules."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.argument_types import count, positive
from headrace.bench.tokenizer import BenchTokenizer
from headrace.bench.workloads import WORKLOADS
from shared.errors import StartupError

DEFAULT_NUM_PROMPTS = 1000
SHAREGPT_MIN, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048
"""Fewest tokens of a prompt and of an answer, most of a prompt, most of both: the usual cut of ShareGPT."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to send."""

    prompt: str | list[int]
    """Text, or token ids."""
    prompt_len: int
    """Tokens of the prompt; of a text without the chat template."""
    expected_output_len: int
    """``max_tokens``."""


Loader = Callable[[argparse.Namespace, BenchTokenizer, int], list[SampleRequest]]
Ids = np.ndarray[Any, np.dtype[np.int64]]


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose the prompts: ``load_dataset`` reads them. ``--seed`` is the caller's."""
    flags = parser.add_argument_group("data set")
    flags.add_argument("--dataset-name", choices=tuple(LOADERS), default="random", help="(default: random)")
    flags.add_argument("--dataset-path", metavar="FILE", help="file of sharegpt (JSON), custom (JSONL), sonnet (text)")
    flags.add_argument(
        "--num-prompts", type=positive, metavar="N", help="requests (default: 1000; nano, uniform, …: their own)"
    )
    flags.add_argument("--input-len", type=positive, metavar="N", help="same as --random-input-len")
    flags.add_argument("--output-len", type=positive, metavar="N", help="output length of any data set")
    flags.add_argument("--disable-shuffle", action="store_true", help="take a file's prompts in their order")
    flags.add_argument("--no-oversample", action="store_true", help="repeat no prompt when a file has too few")
    flags.add_argument("--random-input-len", type=positive, default=1024, metavar="N", help="(default: 1024)")
    flags.add_argument("--random-output-len", type=positive, default=128, metavar="N", help="(default: 128)")
    flags.add_argument("--random-prefix-len", type=count, default=0, metavar="N", help="shared by all prompts (0)")
    flags.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are uniform in floor(L*(1-R))..ceil(L*(1+R)), 0 <= R < 1 (default: 0, all equal)",
    )
    flags.add_argument("--sharegpt-output-len", type=positive, metavar="N", help="instead of each answer's length")
    flags.add_argument(
        "--custom-output-len", type=int, default=256, metavar="N", help="-1: each line's output_tokens (default: 256)"
    )
    flags.add_argument("--sonnet-input-len", type=positive, default=550, metavar="N", help="(default: 550)")
    flags.add_argument("--sonnet-output-len", type=positive, default=150, metavar="N", help="(default: 150)")
    flags.add_argument("--sonnet-prefix-len", type=count, default=200, metavar="N", help="(default: 200)")
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        help_text = f"(default: {default})"
        flags.add_argument(f"--prefix-repetition-{name}", type=positive, default=default, metavar="N", help=help_text)


def load_dataset(args: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    """The requests that the flags of ``add_dataset_flags`` describe, the same for the same flags and seed.

    Raises:
        StartupError: a file cannot be read or has no usable prompt, or flags contradict each other.
    """
    if not 0.0 <= args.random_range_ratio < 1.0:
        raise StartupError(f"--random-range-ratio must be in [0, 1), got {args.random_range_ratio:g}")
    takes_file = args.dataset_name in FROM_FILE
    if takes_file != (args.dataset_path is not None):
        what = "needs" if takes_file else "takes no"
        raise StartupError(f"--dataset-name {args.dataset_name} {what} --dataset-path")
    return LOADERS[args.dataset_name](args, tokenizer, seed)


def num_prompts(args: argparse.Namespace) -> int:
    """How many requests a data set without a size of its own makes."""
    return DEFAULT_NUM_PROMPTS if args.num_prompts is None else int(args.num_prompts)


def output_len(args: argparse.Namespace, own: int) -> int:
    """``--output-len``, or else the data set's own flag."""
    return own if args.output_len is None else int(args.output_len)


def _random(args: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    rng = np.random.default_rng(seed)
    allowed = _plain_ids(tokenizer)
    n, ratio = num_prompts(args), args.random_range_ratio
    input_len = args.random_input_len if args.input_len is None else args.input_len
    inputs = _lengths(rng, n, input_len, ratio)
    outputs = _lengths(rng, n, output_len(args, args.random_output_len), ratio)
    prefix = _draw(rng, allowed, args.random_prefix_len)
    prompts = (prefix + _draw(rng, allowed, length) for length in inputs)
    return [SampleRequest(prompt, len(prompt), out) for prompt, out in zip(prompts, outputs, strict=True)]


def _lengths(rng: np.random.Generator, n: int, mean: int, ratio: float) -> list[int]:
    low, high = max(1, int(np.floor(mean * (1 - ratio)))), int(np.ceil(mean * (1 + ratio)))
    lengths: list[int] = rng.integers(low, high + 1, n).tolist()
    return lengths


def _prefix_repetition(args: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    rng = np.random.default_rng(seed)
    allowed = _plain_ids(tokenizer)
    num_prefixes = args.prefix_repetition_num_prefixes
    per_prefix = num_prompts(args) // num_prefixes
    if per_prefix == 0:
        raise StartupError(f"--num-prompts {num_prompts(args)} < --prefix-repetition-num-prefixes {num_prefixes}")
    prefixes = [_draw(rng, allowed, args.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    prompts = [p + _draw(rng, allowed, args.prefix_repetition_suffix_len) for p in prefixes for _ in range(per_prefix)]
    if not args.disable_shuffle:
        random.Random(seed).shuffle(prompts)
    out = output_len(args, args.prefix_repetition_output_len)
    return [SampleRequest(prompt, len(prompt), out) for prompt in prompts]


def _plain_ids(tokenizer: BenchTokenizer) -> Ids:
    return np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_ids))


def _draw(rng: np.random.Generator, allowed: Ids, n: int) -> list[int]:
    drawn: list[int] = allowed[rng.integers(0, len(allowed), n)].tolist()
    return drawn


def _workload(args: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    made = WORKLOADS[args.dataset_name].make(args.num_prompts, tokenizer.vocab_size, seed)
    if args.num_prompts is not None and args.num_prompts > len(made):
        raise StartupError(f"{args.dataset_name} has {len(made)} requests, not --num-prompts {args.num_prompts}")
    return [SampleRequest(ids, len(ids), output_len(args, out)) for ids, out in made]


def _sharegpt(args: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    """The first turn of each conversation is the prompt and the length of the second the output length."""
    entries = _read(args.dataset_path, json.loads)
    turns = [entry.get("conversations", ()) for entry in entries if isinstance(entry, dict)]
    turns = _shuffled(args, [turn for turn in turns if len(turn) >= 2], seed)
    fixed = args.sharegpt_output_len if args.output_len is None else args.output_len

    def samples() -> Iterable[SampleRequest]:
        for question, answer, *_ in turns:
            prompt_len = len(tokenizer.encode(question["value"]))
            out = len(tokenizer.encode(answer["value"])) if fixed is None else fixed
            if _usual_length(prompt_len, out, fixed is not None):
                yield SampleRequest(question["value"], prompt_len, out)

    return _filled(args, samples(), seed)


def _usual_length(prompt_len: int, out: int, fixed: bool) -> bool:
    long_enough = prompt_len >= SHAREGPT_MIN and (fixed or out >= SHAREGPT_MIN)
    return long_enough and prompt_len <= SHAREGPT_MAX_PROMPT and prompt_len + out <= SHAREGPT_MAX_TOTAL


def _custom(args: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    """A JSON object a line: ``prompt``, and ``output_tokens`` when --custom-output-len is -1."""
    lines = _read(args.dataset_path, lambda text: [json.loads(line) for line in text.splitlines() if line.strip()])
    fixed = output_len(args, args.custom_output_len)

    def samples() -> Iterable[SampleRequest]:
        for number, entry in enumerate(lines, 1):
            out = entry.get("output_tokens") if isinstance(entry, dict) and fixed == -1 else fixed
            if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not isinstance(out, int):
                raise StartupError(
                    f"{args.dataset_path}: object {number} needs prompt (text) and a length: {entry!r:.80}"
                )
            yield SampleRequest(entry["prompt"], len(tokenizer.encode(entry["prompt"])), out)

    return _filled(args, _shuffled(args, list(samples()), seed), seed)


def _sonnet(args: argparse.Namespace, tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    """Lines of a poem: the first ones as a shared prefix, then lines drawn at random, up to the input length."""
    lines = _read(args.dataset_path, lambda text: text.splitlines(keepends=True))
    base = "Pick as many lines as you can from these poem lines:\n"
    target = args.sonnet_input_len if args.input_len is None else args.input_len
    mean = sum(len(tokenizer.encode(line, add_special_tokens=False)) for line in lines) / max(len(lines), 1)
    room = target - len(tokenizer.encode(base))
    if room <= 0 or mean == 0:
        raise StartupError(f"--sonnet-input-len {target} leaves no room for a line of {args.dataset_path}")
    num_shared = max(0, round((args.sonnet_prefix_len - target + room) / mean))
    rng = random.Random(seed)
    samples: list[SampleRequest] = []
    for _ in range(num_prompts(args)):
        chosen = lines[:num_shared] + rng.choices(lines, k=max(0, round(room / mean) - num_shared))
        while (prompt_len := len(tokenizer.encode(prompt := base + "".join(chosen)))) > target:
            chosen.pop()
        samples.append(SampleRequest(prompt, prompt_len, output_len(args, args.sonnet_output_len)))
    return samples


def as_texts(samples: Sequence[SampleRequest], tokenizer: BenchTokenizer, seed: int) -> list[SampleRequest]:
    """The samples with texts in place of ids.

    Encoding the text of random ids rarely gives these ids again, nor as many. Decoding, encoding and cutting or filling
    up are repeated until the length is right, ten times at most; ``prompt_len`` is what came out.
    """
    rng = np.random.default_rng(seed)
    allowed = _plain_ids(tokenizer)
    return [
        sample if isinstance(sample.prompt, str) else _as_text(sample, sample.prompt, tokenizer, rng, allowed)
        for sample in samples
    ]


def _as_text(
    sample: SampleRequest,
    ids: list[int],
    tokenizer: BenchTokenizer,
    rng: np.random.Generator,
    allowed: Ids,
) -> SampleRequest:
    target = len(ids)
    for _ in range(10):
        text = tokenizer.decode(ids)
        ids = tokenizer.encode(text, add_special_tokens=False)
        length = len(ids)
        if length == target:
            break
        ids = ids[:target] + _draw(rng, allowed, max(0, target - length))
    return replace(sample, prompt=text, prompt_len=length)


def _read(path: str, parse: Callable[[str], Any]) -> list[Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = parse(file.read())
    except (OSError, ValueError) as error:
        raise StartupError(f"--dataset-path {path} cannot be read: {error}") from error
    if not isinstance(found, list):
        raise StartupError(f"--dataset-path {path} holds no list")
    return found


def _shuffled(args: argparse.Namespace, items: list[Any], seed: int) -> list[Any]:
    if not args.disable_shuffle:
        random.Random(seed).shuffle(items)
    return items


def _filled(args: argparse.Namespace, samples: Iterable[SampleRequest], seed: int) -> list[SampleRequest]:
    """The first ones; if there are too few, some of them once more."""
    wanted = num_prompts(args)
    taken = [sample for sample, _ in zip(samples, range(wanted), strict=False)]
    if not taken:
        raise StartupError(f"--dataset-path {args.dataset_path} has no prompt of a usable length")
    if len(taken) < wanted and not args.no_oversample:
        taken += random.Random(seed).choices(taken, k=wanted - len(taken))
    return taken


LOADERS: dict[str, Loader] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "sonnet": _sonnet,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
    **dict.fromkeys(WORKLOADS, _workload),
}
FROM_FILE = frozenset({"sharegpt", "sonnet", "custom"})
EOS_IGNORED = frozenset({"random", *WORKLOADS})
"""Data sets whose outputs have the lengths that they ask for: end-of-text tokens are ignored."""
