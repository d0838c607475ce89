"""Many streams at once against a running server: whether all finish, and how long its probes take meanwhile.

    headrace serve demo --port 8000 &
    python -m benchmarks.many_streams --url http://127.0.0.1:8000 [--streams 1000] [--max-tokens 32]

All streams are opened at the same moment, each on a connection of its own. A process of its own asks ``/health``,
``/ready`` and ``/metrics`` in turn, each time on a new connection, from before the first stream to after the last.
Prints one JSON object: how the streams ended, and for each probe the quantiles of its time in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

PROBES = ("/health", "/ready", "/metrics")
PAUSE_S = 0.02
SPARE_FILES = 256


async def stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """How a stream ended: ``whole``, ``cut``, its status, or the name of an exception."""
    tokens, last = 0, b""
    try:
        async with http.post(url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                return str(answer.status)
            async for line in answer.content:
                if line.startswith(b"data: "):
                    tokens, last = tokens + len(_token_ids(line)), line.strip()
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__
    return "whole" if last == b"data: [DONE]" and tokens == body["max_tokens"] else "cut"


def _token_ids(line: bytes) -> list[int]:
    if line.startswith(b"data: [DONE]"):
        return []
    choices = json.loads(line[6:]).get("choices", [])
    return [token for choice in choices for token in choice["token_ids"]]


async def run_streams(url: str, count: int, max_tokens: int) -> collections.Counter[str]:
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
    options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=600)}
    async with aiohttp.ClientSession(**options) as http:
        ended = await asyncio.gather(*(stream(http, url, {**body, "seed": number}) for number in range(count)))
    return collections.Counter(ended)


async def probe(url: str, done: Connection) -> dict[str, list[float]]:
    """Seconds that each probe took, until ``done`` has a message; one that fails counts as infinite."""
    times: dict[str, list[float]] = {path: [] for path in PROBES}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        while not done.poll():
            for path in PROBES:
                begun = time.monotonic()
                try:
                    async with http.get(url + path) as answer:
                        await answer.read()
                    times[path].append(time.monotonic() - begun if answer.status == 200 else float("inf"))
                except aiohttp.ClientError:
                    times[path].append(float("inf"))
            await asyncio.sleep(PAUSE_S)
    return times


def run_probe(url: str, pipe: Connection) -> None:
    pipe.send(asyncio.run(probe(url, pipe)))


def quantiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    named = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(times)}
    return {"count": len(times)} | {name: round(1000 * seconds, 1) for name, seconds in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(args.streams + SPARE_FILES, hard), hard))
    ours, theirs = multiprocessing.Pipe()
    prober = multiprocessing.Process(target=run_probe, args=(args.url, theirs), daemon=True)
    prober.start()
    begun = time.monotonic()
    ended = asyncio.run(run_streams(args.url, args.streams, args.max_tokens))
    seconds = time.monotonic() - begun
    ours.send("done")
    probes = {path: quantiles(times) for path, times in ours.recv().items()}
    prober.join()
    print(json.dumps({"streams": dict(ended), "seconds": round(seconds, 2), "probes_ms": probes}))


if __name__ == "__main__":
    main()
