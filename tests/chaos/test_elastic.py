"""Processes of each kind come and go under 64 streams: no error, and every answer is as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp

from shared.config import GATEWAY, TOKENIZER, WORKER
from tests.chaos.chaos_run import BEAT_S, LEASE_S, RUN_LIMIT_S, aftermath, clients_of, warm_up
from tests.chaos.clients import Clients, session
from tests.chaos.deployment import Deployment, cpu_ticks, deployed
from tests.chaos.workload import STREAMS, Answer, Request, changes, make_requests

COUNT = 64
FLAGS = ("--batch-invariant", "--kv-cache-bytes=64M", "--num-gpu-blocks-override=1024")
SHUTDOWN_S = 30
"""The default of ``--shutdown-timeout``."""
PATIENCE_S = 60.0
ENOUGH_STEPS = 20
ENOUGH_TICKS = 10
"""Of CPU time, which is 0.1 s: a process has served."""


def streams(model: str) -> list[Request]:
    """All streamed; greedy and seeded, one choice and two."""
    requests = [request for seed in range(500, 500 + COUNT // STREAMS) for request in make_requests(seed, model)]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return [request._replace(body=request.body | streamed) for request in requests]


class Load:
    """Clients that ask for their streams again and again, and compare each answer with the undisturbed one."""

    def __init__(self, clients: Clients, requests: Sequence[Request], expected: dict[int, Answer]) -> None:
        self.clients = clients
        self.wrong: list[str] = []
        self.answers = 0
        self._requests, self._expected = requests, expected
        self._over = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For as long as the block; then each stream runs to its end."""
        async with session() as opened:
            tasks = [asyncio.create_task(self._client(opened, i, asked)) for i, asked in enumerate(self._requests)]
            try:
                yield
                self._over = True
                async with asyncio.timeout(RUN_LIMIT_S):
                    await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _client(self, opened: aiohttp.ClientSession, index: int, request: Request) -> None:
        while not self._over:
            answer = await self.clients.ask(opened, request, index // 2)
            self.wrong += [f"request {index}: {words}" for words in changes(self._expected[index], answer)]
            self.answers += 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


async def dismissed(deployment: Deployment, *names: str) -> list[int | None]:
    """How these processes ended after SIGTERM; None: not within their time."""
    for name in names:
        deployment.dismiss(name)
    return await asyncio.gather(*(asyncio.to_thread(deployment.status, name, SHUTDOWN_S + 5) for name in names))


def test_one_worker_then_three_then_one(tmp_path: pathlib.Path, model: str) -> None:
    workers = [f"{WORKER}/{i}" for i in range(3)]
    deployment = Deployment(
        tmp_path, model, workers=3, waiting=workers[1:], flags=FLAGS, beat_s=BEAT_S, lease_s=LEASE_S
    )

    def steps() -> dict[str, float]:
        return deployment.samples("headrace:replica_steps_total", "replica")

    def running() -> dict[str, float]:
        return deployment.samples("headrace:replica_requests_running", "replica")

    async def scale(load: Load) -> None:
        async with load.running():
            await until(lambda: sum(steps().values()) >= ENOUGH_STEPS)
            # Not in a thread: a process ends with the thread that started it.
            for name in workers[1:]:
                deployment.begin(name)
            await until(lambda: len(steps()) == 3 and min(steps().values()) >= ENOUGH_STEPS)
            await until(lambda: min(running().values()) > 0)
            assert await dismissed(deployment, workers[0], workers[1]) == [0, 0]
            await until(lambda: len(steps()) == 1)
            (before,) = steps().values()
            await until(lambda: sum(steps().values()) >= before + ENOUGH_STEPS)

    with deployed(deployment):
        baseline = warm_up(deployment, model)
        load = undisturbed(deployment, model)
        asyncio.run(scale(load))
        assert_nothing_happened(load)
        assert (load.clients.report.refused, load.clients.report.cut) == (0, 0)
        assert aftermath(deployment, baseline) == []


def test_one_gateway_and_tokenizer_then_two_then_one(tmp_path: pathlib.Path, model: str) -> None:
    """The gateways know the address of both tokenizers from the start, and take those that are there."""
    waiting = (f"{GATEWAY}/1", f"{TOKENIZER}/1")
    deployment = Deployment(
        tmp_path, model, gateways=2, tokenizers=2, waiting=waiting, flags=FLAGS, beat_s=BEAT_S, lease_s=LEASE_S
    )

    def have_served(names: Sequence[str], before: dict[str, int]) -> bool:
        return all(cpu_ticks(deployment.services[name].pid) >= before[name] + ENOUGH_TICKS for name in names)

    async def scale(load: Load) -> None:
        async with load.running():
            for name in waiting:
                deployment.begin(name)
            await asyncio.to_thread(deployment.wait_ready)
            started = {name: cpu_ticks(deployment.services[name].pid) for name in waiting}
            await until(lambda: have_served(waiting, started))
            assert await dismissed(deployment, f"{GATEWAY}/0", f"{TOKENIZER}/0") == [0, 0]
            dismissed_at = {name: cpu_ticks(deployment.services[name].pid) for name in waiting}
            await until(lambda: have_served(waiting, dismissed_at))

    with deployed(deployment):
        baseline = warm_up(deployment, model)
        load = undisturbed(deployment, model)
        asyncio.run(scale(load))
        assert_nothing_happened(load)
        # A connection that the gateway had not accepted when it closed its port is no broken answer.
        assert load.clients.report.broken == 0
        assert aftermath(deployment, baseline) == []


def undisturbed(deployment: Deployment, model: str) -> Load:
    requests = streams(model)
    expected = asyncio.run(clients_of(deployment).run(requests, RUN_LIMIT_S))
    assert (expected.wrong, expected.cut, len(expected.answers)) == ([], 0, COUNT)
    return Load(clients_of(deployment), requests, expected.answers)


def assert_nothing_happened(load: Load) -> None:
    assert load.wrong == []
    assert load.answers >= COUNT
