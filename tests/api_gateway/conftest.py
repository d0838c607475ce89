"""A gateway on a real port in front of a fake tokenizer on a real socket."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))

from fake_tokenizer import CARD, FakeTokenizer, until

from api_gateway.__main__ import url_of
from api_gateway.app import make_app
from api_gateway.gateway import Gateway
from api_gateway.http_server import Runner, bind
from shared.config import Settings
from shared.messages import ModelCard


@dataclasses.dataclass
class Served:
    """A running gateway and what stands behind it."""

    url: str
    gateway: Gateway
    tokenizers: list[FakeTokenizer]
    http: aiohttp.ClientSession
    app: web.Application
    runner: Runner

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self.tokenizers[0]

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, Any]:
        """(status, JSON, headers)."""
        async with self.http.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.json(content_type=None), answer.headers

    async def get(self, path: str, **options: Any) -> tuple[int, str, Any]:
        async with self.http.get(self.url + path, **options) as answer:
            return answer.status, await answer.text(), answer.headers

    def gateway_routes(self) -> list[web.AbstractRoute]:
        return list(self.app.router.routes())

    def gateway_transports(self) -> list[Any]:
        assert self.runner.server is not None
        return [connection.transport for connection in self.runner.server.connections]

    async def metric(self, sample: str) -> float:
        _, page, _ = await self.get("/metrics")
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(sample))


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Any]:
    """``await start(setting=value, ...)`` starts one and waits until it is ready; all end at the exit."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, wait: bool = True, tokenizers: int = 1, card: ModelCard = CARD, **chosen: Any) -> Served:
            made = []
            for number in range(tokenizers):
                made.append(FakeTokenizer(f"ipc://{folder}/t{number}", card=card))
                await made[-1].start()
                stack.push_async_callback(made[-1].stop)
            endpoints = [tokenizer.endpoint for tokenizer in made]
            settings = Settings(**{"tokenizer_endpoint": endpoints, "beat_s": 0.2, "lease_s": 4.0, **chosen})
            gateway = Gateway(settings)
            app = make_app(gateway)
            runner = Runner(app)
            await runner.setup()
            listening = bind("127.0.0.1", 0)
            await web.SockSite(runner, listening).start()
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            stack.push_async_callback(runner.cleanup)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            if wait:
                await until(lambda: gateway.not_ready() is None)
            return Served(url_of(listening), gateway, made, http, app, runner)

        yield start


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Any]:
    """As ``serving``."""
    async with serving(tmp_path) as start:
        yield start


@pytest.fixture
async def served(serve: Any) -> Any:
    return await serve()
