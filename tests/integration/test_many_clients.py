"""Many streaming clients at once: each ends exactly once, and those that hang up leave nothing behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp


async def stream(session: aiohttp.ClientSession, url: str, index: int, tokens: int, hang_up_after: int = 0) -> int:
    """Read one stream to its end, or hang up after some chunks; returns the number of terminal markers seen."""
    body = {
        "model": "demo",
        "prompt": f"Client number {index} says",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "seed": index,
    }
    finished = done = chunks = 0
    async with session.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: "):
                assert line == b"\n" or line.startswith(b"id:"), line
                continue
            assert not done, "data after [DONE]"
            if line == b"data: [DONE]\n":
                done += 1
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            finished += chunk["choices"][0]["finish_reason"] is not None
            chunks += 1
            if hang_up_after and chunks >= hang_up_after:
                return 0
    assert finished == done == 1, (finished, done)
    return 1


def run(url: str, count: int, tokens: int, hang_up: int = 0) -> int:
    async def all_of_them() -> int:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(280)) as session:
            jobs = [stream(session, url, i, tokens, 3 if i < hang_up else 0) for i in range(count)]
            return sum(await asyncio.gather(*jobs))

    return asyncio.run(all_of_them())


def test_two_hundred_streams_end_exactly_once(demo: Any) -> None:
    assert run(demo.url, 200, 12) == 200
    demo.wait_idle(60)


def test_fifty_of_a_hundred_hang_up(demo: Any) -> None:
    before = demo.gauge("vllm:request_success_total")
    assert run(demo.url, 100, 24, hang_up=50) == 50
    demo.wait_idle(60)
    demo.wait_until(lambda: demo.gauge("vllm:request_success_total") >= before + 100)


def test_memory_is_back_when_everybody_hangs_up(demo: Any) -> None:
    """Long before the 100,000 tokens are computed, which nobody waits for."""
    before = demo.gauge("vllm:request_success_total")
    assert run(demo.url, 50, 2000, hang_up=50) == 0
    demo.wait_until(lambda: demo.gauge("vllm:request_success_total") >= before + 50)
    demo.wait_idle(30)
