"""When the requests of a load are sent."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from headrace.bench.datasets import SampleRequest
from headrace.bench.load import arrival_times, run_load
from headrace.bench.metrics import RequestRecord

N = 20_000


def test_at_an_infinite_rate_all_arrive_at_once() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    """Mean 1/rate and coefficient of variation 1/√burstiness; of Poisson arrivals a share 1/e has longer gaps."""
    gaps = np.diff(arrival_times(N, 50.0, burstiness, 0), prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    if burstiness == 1.0:
        assert (gaps > 1 / 50).mean() == pytest.approx(np.exp(-1), abs=0.01)


def test_an_infinite_burstiness_is_an_even_pace() -> None:
    assert arrival_times(4, 2.0, float("inf"), 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("seed", range(5))
def test_the_last_arrives_on_time_whatever_was_drawn(seed: int) -> None:
    assert arrival_times(30, 10.0, 1.0, seed)[-1] == pytest.approx(3.0)


def test_the_seed_decides() -> None:
    assert arrival_times(9, 1.0, 1.0, 3) == arrival_times(9, 1.0, 1.0, 3) != arrival_times(9, 1.0, 1.0, 4)


async def test_concurrency_is_bounded_and_the_wait_for_it_is_told_apart() -> None:
    running = most = done = 0

    async def send(sample: SampleRequest) -> RequestRecord:
        nonlocal running, most
        running += 1
        most = max(most, running)
        record = RequestRecord(sent=time.perf_counter(), prompt_tokens=sample.prompt_len)
        await asyncio.sleep(0.01)
        running -= 1
        return record

    def on_done() -> None:
        nonlocal done
        done += 1

    samples = [SampleRequest([0], n, 1) for n in range(6)]
    records, duration_s = await run_load(send, samples, [0.0] * 6, 2, on_done)
    assert [record.prompt_tokens for record in records] == list(range(6))
    assert (most, done) == (2, 6)
    assert records[0].queued_s < records[5].queued_s >= 0.02
    assert duration_s >= 0.03


async def test_requests_wait_for_their_arrival() -> None:
    async def send(sample: SampleRequest) -> RequestRecord:
        return RequestRecord(sent=time.perf_counter())

    began = time.perf_counter()
    records, _ = await run_load(send, [SampleRequest([0], 1, 1)] * 2, [0.0, 0.05], None, lambda: None)
    assert records[1].sent - began >= 0.045
