"""``headrace bench prefix --trace``: eviction policies compared on traces, in an engine or in its block manager alone.

The requests of a trace come one after another, so that the time to first token is that of what the cache lacked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from core_engine.kv_cache_manager import KVCacheManager
from core_engine.request import Request
from core_engine.request import Sequence as EngineSequence
from headrace.async_llm import AsyncLLM
from headrace.bench import offline
from headrace.bench.prefix_traces import TRACES, Sessions, Turn, as_trace, blocks_wanted, longest
from headrace.sampling_params import RequestOutputKind, SamplingParams
from headrace.simulate.trace import write_trace
from shared.config import Settings
from shared.sampling import SamplingParams as EngineParams

NULL_BLOCK = 1
FORMULAS = """\
hit rate = prompt tokens found in the cache / prompt tokens, of all requests, one after another
TTFT     = time from the call of generate() to the first token
pool     = KV blocks; wanted: the fewest with which nothing that comes again would be computed twice"""


def measure(settings: Settings, options: argparse.Namespace) -> Mapping[str, Any]:
    """Replay each trace under each policy and print the figures; returns them, times in ms."""
    shape = offline.shape_of(settings)
    names = list(TRACES) if options.trace == "all" else [options.trace]
    figures: dict[str, Any] = {}
    for name in names:
        draw = random.Random(f"{name} {settings.seed}")
        turns = TRACES[name](draw, options.num_requests, shape.config.vocab_size, options.output_len)
        wanted = blocks_wanted(turns, settings.block_size)
        num_blocks = settings.num_gpu_blocks_override or round(wanted * options.pool_share) + NULL_BLOCK
        _check(shape, settings, turns, num_blocks)
        if options.write_trace:
            write_trace(options.write_trace, as_trace(turns))
        figures[name] = {"num_requests": len(turns), "blocks_wanted": wanted, "num_blocks": num_blocks, "policies": {}}
        print(f"{name}: {len(turns)} requests, a pool of {num_blocks} blocks, {wanted} wanted")
        rivals = [
            dataclasses.replace(settings, prefix_cache_policy=policy, num_gpu_blocks_override=num_blocks)
            for policy in options.policies
        ]
        for together in [rivals] if options.take_turns else [[own] for own in rivals]:
            if options.blocks_only:
                found = [{"hit_rate": replay_blocks(turns, own, shape.config.vocab_size)} for own in together]
            else:
                found = asyncio.run(_replay(turns, together, options))
            for own, each in zip(together, found, strict=True):
                figures[name]["policies"][own.prefix_cache_policy] = each
                print(f"  {own.prefix_cache_policy + ':':<5} {_line(each)}", flush=True)
    print(f"\n{FORMULAS}")
    return figures


def replay_blocks(turns: Sequence[Turn], settings: Settings, vocab_size: int) -> float:
    """The hit rate of a trace in the engine's block manager, without a model: answers are random ids."""
    assert settings.num_gpu_blocks_override is not None
    kv = KVCacheManager(settings.num_gpu_blocks_override, settings.block_size, eviction=settings.prefix_cache_policy)
    draw, sessions = random.Random(settings.seed), Sessions()
    num_cached = num_prompt = 0
    for order, turn in enumerate(turns):
        prompt = np.array(sessions.prompt(turn), np.int32)
        request = Request(str(order), EngineParams(), prompt, order, 0.0, frozenset())
        sequence = EngineSequence(request, 0, np.empty(0, np.int32), len(prompt) + turn.output_len)
        cached = kv.allocate(sequence)
        assert cached is not None, "nobody else holds a block"
        num_cached += cached
        num_prompt += len(prompt)
        output = [draw.randrange(vocab_size) for _ in range(turn.output_len)]
        tokens = np.concatenate([prompt, np.array(output, np.int32)])
        # The KV of the last token is never written.
        while len(sequence.blocks) < kv.blocks_for(len(tokens) - 1):
            kv.grow(sequence)
        kv.commit(sequence, tokens, len(tokens) - 1)
        kv.release(sequence)
        sessions.answered(turn, output)
    return num_cached / num_prompt


async def _replay(
    turns: Sequence[Turn], rivals: Sequence[Settings], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The same in engines with the model, that take turns at each request; answers are what they say."""
    async with contextlib.AsyncExitStack() as stack:
        runs = []
        for own in rivals:
            llm = await stack.enter_async_context(AsyncLLM.from_settings(own, skip_tokenizer_init=True))
            # Shorter than a block, so that it is not cached.
            await _ask(llm, list(range(own.block_size // 2)), 1)
            runs.append(_Run(llm))
        names = ", ".join(own.prefix_cache_policy for own in rivals)
        for turn in offline.progress(turns, names, options):
            for run in runs:
                await run.take(turn)
    return [run.figures() for run in runs]


class _Run:
    """A trace in one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._sessions = Sessions()
        self._num_cached = self._num_prompt = 0
        self._ttfts_ms: list[float] = []

    async def take(self, turn: Turn) -> None:
        prompt = self._sessions.prompt(turn)
        ttft, cached, output = await _ask(self._llm, prompt, turn.output_len)
        self._ttfts_ms.append(1000 * ttft)
        self._num_cached += cached
        self._num_prompt += len(prompt)
        self._sessions.answered(turn, output)

    def figures(self) -> dict[str, Any]:
        return {
            "hit_rate": self._num_cached / self._num_prompt,
            "mean_ttft_ms": float(np.mean(self._ttfts_ms)),
            "ttft_percentiles_ms": offline.percentiles(self._ttfts_ms),
        }


async def _ask(llm: AsyncLLM, ids: list[int], output_len: int) -> tuple[float, int, list[int]]:
    """Seconds to the first token, prompt tokens that were cached, ids of the output."""
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    began = time.perf_counter()
    first, cached, output = 0.0, 0, []
    async for part in llm.generate({"prompt_token_ids": ids}, params):
        first = first or time.perf_counter()
        cached = part.num_cached_tokens or cached
        output += part.outputs[0].token_ids
    return first - began, cached, output


def _check(shape: offline.Shape, settings: Settings, turns: Sequence[Turn], num_blocks: int) -> None:
    length = longest(turns)
    shape.check_length(length, "the longest request of the trace")
    if (num_blocks - NULL_BLOCK) * settings.block_size < length:
        raise offline.BenchError(
            f"{num_blocks} KV blocks of {settings.block_size} tokens cannot hold the longest request, {length} tokens; "
            f"raise --pool-share or --num-requests"
        )


def _line(found: Mapping[str, Any]) -> str:
    line = f"hit rate {found['hit_rate']:.1%}"
    if "mean_ttft_ms" in found:
        median, high = (found["ttft_percentiles_ms"][key] for key in ("50", "90"))
        line += f", TTFT mean {found['mean_ttft_ms']:.1f} ms, median {median:.1f} ms, 90% {high:.1f} ms"
    return line
