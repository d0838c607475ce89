"""Workloads with fixed lengths and seeds, so that every engine and every run does the same work.

=========  ==========================================================================  ================  ===========
name       requests                                                                    tokens in / out   temperature
=========  ==========================================================================  ================  ===========
nano       256, in and out U(100, 1024); nano-vllm's ``bench.py``                      142,827/133,966   0.6
uniform    256 × (1024 in, 128 out)                                                    262,144/32,768    0
mix        1,000, lognormal lengths clipped to 4…1024, means 220 in and 190 out        196,305/184,096   0
decode     N × (128 in, 256 out), all at once                                          N × 128/N × 256   0
=========  ==========================================================================  ================  ===========

The lengths never change. The ids do with the seed, so that a prefix cache finds nothing of one run in the next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NANO_REQUESTS, NANO_LOW, NANO_HIGH, NANO_LAST_ID = 256, 100, 1024, 10_000
FIRST_ID, LAST_IDS = 1000, 2000
"""Ids below the first and the last ones of a vocabulary are often control tokens; they are left out of it."""
DECODE_INPUT, DECODE_OUTPUT = 128, 256


class Request(NamedTuple):
    """A prompt and how many tokens follow it, EOS ignored."""

    prompt_token_ids: list[int]
    output_len: int


class Workload(NamedTuple):
    """A named set of requests, sent all at once."""

    make: Callable[[int | None, int, int], list[Request]]
    """Number of requests (None: the workload's own), vocabulary size and seed, to requests."""
    temperature: float


def nano(count: int | None, vocab_size: int, seed: int) -> list[Request]:
    """nano-vllm's ``bench.py`` at seed 0, id for id; other seeds give other ids and the same lengths.

    ``count`` takes the first ones only. Ids are 10,000 at most, or wrapped into a smaller vocabulary.
    """
    draw = random.Random(0)
    prompts = []
    for _ in range(NANO_REQUESTS):
        length = draw.randint(NANO_LOW, NANO_HIGH)
        prompts.append([draw.randint(0, NANO_LAST_ID) for _ in range(length)])
    outputs = [draw.randint(NANO_LOW, NANO_HIGH) for _ in range(NANO_REQUESTS)]
    if seed:
        draw = random.Random(seed)
        prompts = [[draw.randint(0, NANO_LAST_ID) for _ in prompt] for prompt in prompts]
    requests = zip(prompts, outputs, strict=True)
    return [Request([token % vocab_size for token in ids], length) for ids, length in requests][:count]


def uniform(count: int | None, vocab_size: int, seed: int) -> list[Request]:
    """``count`` × (1024 in, 128 out), by default 256."""
    return fixed(256 if count is None else count, 1024, 128, vocab_size, seed)


def decode(count: int | None, vocab_size: int, seed: int) -> list[Request]:
    """``count`` × (128 in, 256 out), by default 1."""
    return fixed(1 if count is None else count, DECODE_INPUT, DECODE_OUTPUT, vocab_size, seed)


def mix(count: int | None, vocab_size: int, seed: int) -> list[Request]:
    """The first ``count`` of 1,000 requests with lognormal lengths."""
    pairs = lognormal_lengths()[:count]
    prompts = random_prompts([length for length, _ in pairs], vocab_size, seed)
    return [Request(ids, length) for ids, (_, length) in zip(prompts, pairs, strict=True)]


WORKLOADS = {
    "nano": Workload(nano, 0.6),
    "uniform": Workload(uniform, 0.0),
    "mix": Workload(mix, 0.0),
    "decode": Workload(decode, 0.0),
}


def fixed(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[Request]:
    """``count`` requests of one shape with random ids."""
    return [Request(ids, output_len) for ids in random_prompts([input_len] * count, vocab_size, seed)]


def lognormal_lengths(
    count: int = 1000,
    mean_input: float = 220,
    mean_output: float = 190,
    sigma: float = 1.0,
    low: int = 4,
    high: int = 1024,
    seed: int = 0,
) -> list[tuple[int, int]]:
    """Pairs of prompt and output length: lognormal of the given means before they are clipped to ``low``…``high``."""
    draw = np.random.default_rng(seed)

    def lengths(mean: float) -> list[int]:
        # The mean of a lognormal distribution is exp(mu + sigma² / 2).
        values = draw.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
        return [int(value) for value in np.clip(np.rint(values), low, high)]

    inputs = lengths(mean_input)
    return list(zip(inputs, lengths(mean_output), strict=True))


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of those lengths with ids drawn from the middle of the vocabulary, or from all of a small one."""
    draw = np.random.default_rng(seed)
    low, high = (FIRST_ID, vocab_size - LAST_IDS) if vocab_size > FIRST_ID + LAST_IDS else (0, vocab_size)
    prompts: list[list[int]] = [draw.integers(low, high, length).tolist() for length in lengths]
    return prompts
