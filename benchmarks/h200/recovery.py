"""How long streams stand still when their worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.h200.work import Work
from headrace import LLM, SamplingParams
from headrace.bench.workloads import random_prompts
from headrace.offline.streams import AsyncStream
from headrace.sampling_params import RequestOutputKind
from shared.config import WORKER

PROMPT, OUTPUT, BEFORE = 512, 512, 64
"""Tokens of a prompt, of an output, and of each output before the kill."""


def recovery(folder: Path, work: Work, case: str) -> Iterator[dict[str, float]]:
    """``recovery_bN``: seconds from ``kill -9`` of the only worker until the last of N streams goes on.

    That is a new process, the weights from files in the page cache, and every prompt with its output so far once more.

    Raises:
        RuntimeError: a stream did not end with all of its tokens.
    """
    count = int(case.removeprefix("recovery_b"))
    prompt, output = work.scaled(PROMPT), work.scaled(OUTPUT, 32)
    with LLM(str(folder), dtype="bfloat16", max_model_len=prompt + output, skip_tokenizer_init=True) as llm:
        for _ in range(work.repeat):
            prompts = random_prompts([prompt] * count, llm.card.vocab_size, work.seed())
            first, last = asyncio.run(_killed(llm, prompts, output, work.scaled(BEFORE, 4)))
            yield {case: last, f"{case}_first": first}


async def _killed(llm: LLM, prompts: Sequence[list[int]], output: int, before: int) -> tuple[float, float]:
    """Seconds from the kill, when every stream has ``before`` tokens, until the first and the last of them go on."""
    params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
    streams = [_Stream(llm.generate_async({"prompt_token_ids": ids}, params)) for ids in prompts]
    readers = [asyncio.ensure_future(stream.read()) for stream in streams]
    while min(stream.num_tokens for stream in streams) < before:
        await asyncio.sleep(0.001)
    for name, pid in llm._session.pids().items():
        if name.partition("/")[0] == WORKER:
            os.kill(pid, signal.SIGKILL)
    killed_at = time.perf_counter()
    await asyncio.gather(*readers)
    if any(stream.num_tokens != output for stream in streams):
        raise RuntimeError(f"not every stream has {output} tokens")
    # What was on its way at the kill still arrives: a stream goes on after its longest gap.
    waits = [stream.longest_gap_ends_at - killed_at for stream in streams]
    return min(waits), max(waits)


class _Stream:
    """A request that is read to its end."""

    def __init__(self, outputs: AsyncStream) -> None:
        self.num_tokens = 0
        self.longest_gap_ends_at = 0.0
        self._outputs = outputs

    async def read(self) -> None:
        before = longest = 0.0
        async for output in self._outputs:
            now = time.perf_counter()
            self.num_tokens += len(output.outputs[0].token_ids)
            if before and now - before > longest:
                longest, self.longest_gap_ends_at = now - before, now
            before = now
