"""How long a client of ``demo`` waits when a process is killed under its stream.

    python -m tests.chaos.recovery [--runs N] [--json FILE]

The wait is the longest time between two chunks from the kill on. A gateway takes its connections with it: there the
client sends its request again to the next gateway, or to the same one when it is back, and the wait ends with its first
chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shared.config import ENGINE, GATEWAY, TOKENIZER, WORKER
from tests.chaos.deployment import Deployment, deployed
from tests.chaos.workload import CONNECTION_ERRORS

TOKENS = 4000
KILL_AFTER = 20
"""Chunks before the kill."""
AFTERWARDS_S = 2.0
"""How long after the longest wait the stream is watched for a longer one."""
LIMIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """Which process is killed, beside how many of its kind."""

    kind: str
    count: int
    limit_s: float | None
    """What the wait should not exceed; None: the worker's load time + 1 s."""

    @property
    def name(self) -> str:
        return f"{self.kind}, {'another is there' if self.count > 1 else 'the only one'}"


CASES = (
    Case(TOKENIZER, 2, 1.0),
    Case(TOKENIZER, 1, 3.0),
    Case(GATEWAY, 2, 1.0),
    Case(GATEWAY, 1, 3.0),
    Case(ENGINE, 1, 3.0),
    Case(WORKER, 2, 1.0),
    Case(WORKER, 1, None),
)


@dataclass
class Measured:
    """Waits of a case, in seconds."""

    case: Case
    waits_s: list[float] = field(default_factory=list)
    limit_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "killed": self.case.name,
            "runs": len(self.waits_s),
            "median_s": round(statistics.median(self.waits_s), 3),
            "longest_s": round(max(self.waits_s), 3),
            "limit_s": round(self.limit_s, 3),
        }


def measure(case: Case, runs: int, folder: pathlib.Path, load_s: float) -> Measured:
    """``load_s``: how long a worker takes from its start to the first answer."""
    counts = {"gateways": 1, "tokenizers": 1, "workers": 1}
    if case.kind != ENGINE:
        counts[{GATEWAY: "gateways", TOKENIZER: "tokenizers", WORKER: "workers"}[case.kind]] = case.count
    found = Measured(case, limit_s=case.limit_s or load_s + 1.0)
    with deployed(Deployment(folder, "demo", **counts)) as deployment:
        for _ in range(runs):
            found.waits_s.append(asyncio.run(wait_of(deployment, case)))
            deployment.wait_ready()
            assert not deployment.busy(60.0)
            deployment.unexpected.clear()
            time.sleep(load_s if case.kind == WORKER else 2.0)  # so that the killed one is there again
    return found


async def wait_of(deployment: Deployment, case: Case) -> float:
    """Kill the process that serves one stream; how long that stream's client waits, in seconds."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:
        chunks = 0
        killed_at = last = longest = 0.0
        with contextlib.suppress(*CONNECTION_ERRORS):
            async for now in stream(session, deployment.url(0)):
                chunks += 1
                if chunks == KILL_AFTER:
                    deployment.kill(await asyncio.to_thread(_serving, deployment, case.kind))
                    killed_at = last = time.monotonic()
                elif killed_at:
                    longest, last = max(longest, now - last), now
                    if now - killed_at > AFTERWARDS_S + longest and longest > 0.0 and now - last < AFTERWARDS_S:
                        break
        if case.kind != GATEWAY:
            return longest
        return await _first_chunk(session, deployment) - killed_at


def _serving(deployment: Deployment, kind: str) -> str:
    return f"{GATEWAY}/0" if kind == GATEWAY else deployment.busiest(kind, 0.2)


async def _first_chunk(session: aiohttp.ClientSession, deployment: Deployment) -> float:
    for attempt in range(10_000):
        with contextlib.suppress(*CONNECTION_ERRORS, aiohttp.ClientResponseError):
            async for now in stream(session, deployment.url((attempt + 1) % len(deployment.ports))):
                return now
        await asyncio.sleep(0.02)
    raise TimeoutError("no gateway answered")


async def stream(session: aiohttp.ClientSession, url: str) -> AsyncIterator[float]:
    """The times at which chunks of a long answer come."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    async with session.post(url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield time.monotonic()


def load_time(folder: pathlib.Path) -> float:
    """Seconds until a deployment of ``demo`` is ready: the worker is the last."""
    began = time.monotonic()
    with deployed(Deployment(folder, "demo")):
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a client waits after a kill.")
    parser.add_argument("--runs", type=int, default=5, help="kills of each kind (default: 5)")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the times to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        load_s = load_time(folder / "load")
        found = []
        for number, case in enumerate(CASES):
            found.append(measure(case, options.runs, folder / str(number), load_s).to_json())
            print(json.dumps(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"load_s": round(load_s, 3), "cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
