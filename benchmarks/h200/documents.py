"""Questions about documents: what sharing and paging are worth where prompts are long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from benchmarks.h200.work import Work, generate
from headrace import LLM, SamplingParams
from headrace.bench.workloads import Request, random_prompts
from headrace.offline.metrics import Gauge, Metric

USERS, SHARED, OWN, OUTPUT = 50, 500, 7500, 300


def documents(llm: LLM, work: Work, case: str) -> Iterator[dict[str, float]]:
    """``documents``: requests per second of 50 × (8,000 in, 500 of them shared, 300 out) at once.

    ``documents_reserved`` is the same where nothing is shared, and only so many run at a time as the KV cache has room
    for if each of them gets memory for the longest request that the model takes. ``kv_documents`` and
    ``kv_documents_reserved``: tokens of the cache that are taken for them at most.
    """
    shared, own, output = work.scaled(SHARED), work.scaled(OWN), work.scaled(OUTPUT, 2)
    generate(llm, [Request([7] * 16, 2)])  # the engine tells of its cache once it has worked
    num_blocks, block_size = _cache(llm.get_metrics())
    blocks_of_longest = -(-llm.card.max_model_len // block_size)
    at_once = max(1, num_blocks // blocks_of_longest)
    for _ in range(work.repeat):
        lengths = [shared] + [own] * work.scaled(USERS, 4)
        prefix, *questions = random_prompts(lengths, llm.card.vocab_size, work.seed())
        prompts = [prefix + ids for ids in questions]
        seconds, held = asyncio.run(_run(llm, prompts, output, len(prompts), shares=True))
        apart_s, _ = asyncio.run(_run(llm, prompts, output, at_once, shares=False))
        yield {
            case: len(prompts) / seconds,
            f"{case}_reserved": len(prompts) / apart_s,
            f"kv_{case}": held * block_size,
            f"kv_{case}_reserved": min(at_once, len(prompts)) * blocks_of_longest * block_size,
        }


async def _run(
    llm: LLM, prompts: Sequence[list[int]], output: int, at_once: int, *, shares: bool
) -> tuple[float, float]:
    """Seconds until all are answered, and the most blocks that were seen held."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    seats, done = asyncio.Semaphore(at_once), asyncio.Event()
    salt = time.monotonic_ns()

    async def answer(number: int, ids: list[int]) -> None:
        async with seats:
            prompt = {"prompt_token_ids": ids, "cache_salt": f"{salt}" if shares else f"{salt}-{number}"}
            async for _ in llm.generate_async(prompt, params):
                pass

    async def watch() -> float:
        most = 0.0
        while not done.is_set():
            metrics = await asyncio.to_thread(llm.get_metrics)
            most = max(most, sum(each.value for each in metrics if isinstance(each, Gauge) and _is_held(each)))
        return most

    watching = asyncio.ensure_future(watch())
    began = time.perf_counter()
    await asyncio.gather(*(answer(number, ids) for number, ids in enumerate(prompts)))
    seconds = time.perf_counter() - began
    done.set()
    return seconds, await watching


def _is_held(metric: Metric) -> bool:
    return metric.name == "headrace:replica_kv_blocks_held"


def _cache(metrics: Sequence[Metric]) -> tuple[int, int]:
    """Blocks of the KV cache, and tokens of a block."""
    labels = next(metric.labels for metric in metrics if metric.name == "vllm:cache_config_info")
    return int(labels["num_gpu_blocks"]) - 1, int(labels["block_size"])
