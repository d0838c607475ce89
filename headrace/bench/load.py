"""When requests are sent, and how many of them run at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from headrace.bench.datasets import SampleRequest
from headrace.bench.metrics import RequestRecord

Send = Callable[[SampleRequest], Awaitable[RequestRecord]]


def arrival_times(n: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each of ``n`` requests arrives.

    The gaps are gamma distributed with shape ``burstiness`` and mean 1/``rate``: at 1 a Poisson process, below it
    burstier, above it more even, at infinity exactly even. As in vLLM all times are scaled so that the last one is at
    n/``rate``, whatever was drawn. At an infinite rate all are 0.

    Args:
        rate: requests/s, above 0.
        burstiness: above 0.
    """
    if rate == float("inf"):
        return [0.0] * n
    if burstiness == float("inf"):
        gaps = np.full(n, 1.0 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), n)
    times = np.cumsum(gaps)
    scaled: list[float] = (times * (n / rate / times[-1])).tolist()
    return scaled


async def run_load(
    send: Send,
    samples: Sequence[SampleRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[], object],
) -> tuple[list[RequestRecord], float]:
    """Send every sample at its time; the records in the same order, and the seconds until the last answer.

    Args:
        arrivals: of ``arrival_times``.
        max_concurrency: requests between send and end at most; the others wait, and that wait is ``queued_s``.
        on_done: called when a request is over.
    """
    slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(sample: SampleRequest) -> RequestRecord:
        arrived = time.perf_counter()
        async with slots:
            record = await send(sample)
        record.queued_s = record.sent - arrived
        on_done()
        return record

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for sample, arrival in zip(samples, arrivals, strict=True):
            if (wait := began + arrival - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(sample)))
    return [task.result() for task in tasks], time.perf_counter() - began
