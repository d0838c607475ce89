"""A request that kills whatever process takes it up is failed alone; all others end as if it had not been there."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
from typing import Any

import aiohttp
import pytest

from shared.config import ENGINE, TOKENIZER, WORKER, Settings
from tests.chaos.deadly_process import RUN
from tests.chaos.deployment import Deployment, deployed
from tests.integration.streams import COMPLETIONS, Joined

FLAGS = ("--batch-invariant", "--kv-cache-bytes=64M", "--max-num-seqs=64")
BEAT_S, LEASE_S = 0.2, 30.0
LIMIT_S = 240.0
MOST_DEATHS = 2 + 3 + 1
"""Two make a suspect, three alone convict; and one that the request got on before by three tokens."""


def arm(deployment: Deployment, kind: str) -> None:
    """Let every process of a kind be killed by a prompt that holds ``RUN``."""
    for name in deployment.names(kind):
        argv = deployment.services[name].argv
        place = argv.index("-m") + 1
        argv[place : place + 1] = ["tests.chaos.deadly_process", kind]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(5, 200) for _ in range(rng.randint(4, 30))] for _ in range(count)]


async def answers(url: str, model: str, asked: list[list[int]]) -> list[list[int] | dict[str, Any]]:
    """Of each prompt, all at once: the ids of its stream, or the error that it ended with."""
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as session:
        return await asyncio.gather(*(answer(session, url, model, prompt) for prompt in asked))


async def answer(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int]) -> list[int] | dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with session.post(url + COMPLETIONS, json={**body, "stream": True, "return_token_ids": True}) as response:
        if response.status != 200:
            return dict((await response.json())["error"])
        events = [line[6:] for line in (await response.read()).splitlines() if line.startswith(b"data: ")]
    last = json.loads(events[-1]) if events[-1] != b"[DONE]" else json.loads(events[-2])
    if "error" in last:
        return dict(last["error"])
    assert events[-1] == b"[DONE]"
    joined = Joined([json.loads(event) for event in events[:-1]])
    assert joined.finish == {0: "length"}
    return joined.token_ids[0]


def check(folder: pathlib.Path, model: str, kind: str, count: int) -> None:
    deployment = Deployment(folder, model, flags=FLAGS, beat_s=BEAT_S, lease_s=LEASE_S)
    arm(deployment, kind)
    innocent = prompts(count - 1)
    deadly = [*innocent[0][:3], *RUN, 9]
    with deployed(deployment):
        url = deployment.url(0)
        expected = asyncio.run(answers(url, model, innocent))
        assert all(isinstance(ids, list) and len(ids) == 40 for ids in expected)
        place = count // 3
        got = asyncio.run(answers(url, model, [*innocent[:place], deadly, *innocent[place:]]))
        error = got.pop(place)
        assert isinstance(error, dict), f"the query of death was answered with {error}"
        assert (error["code"], error["type"]) == (500, "server_error")
        assert "the request was stopped" in error["message"]
        assert got == expected
        deaths = deployment.unexpected
        assert set(deaths) == {f"{kind}/0 ended with -9"}
        assert len(deaths) <= MOST_DEATHS < Settings().max_restarts
        deployment.unexpected = []
        assert deployment.busy(4 * LEASE_S) == ""
        # Whoever survived it serves on.
        assert asyncio.run(answers(url, model, innocent[:3])) == expected[:3]


@pytest.mark.parametrize(
    "kind", [pytest.param(TOKENIZER, marks=pytest.mark.slow), ENGINE, pytest.param(WORKER, marks=pytest.mark.slow)]
)
def test_a_query_of_death_among_eight(tmp_path: pathlib.Path, model: str, kind: str) -> None:
    check(tmp_path, model, kind, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [TOKENIZER, ENGINE, WORKER])
def test_a_query_of_death_among_64(tmp_path: pathlib.Path, model: str, kind: str) -> None:
    check(tmp_path, model, kind, 64)
