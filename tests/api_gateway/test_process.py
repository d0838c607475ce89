"""``python -m api_gateway`` as its own process, on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_tokenizer import FakeTokenizer, until

ROOT = Path(__file__).parents[2]


class Process:
    """The service, its log so far, and where it answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self.url = ""

    async def ready(self) -> str:
        """Its URL, once it has said how to use it."""
        await until(lambda: "curl" in self.log, 60)
        self.url = self.log.partition("curl -N ")[2].partition("/v1")[0]
        return self.url

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log += line.decode()


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Any]:
    started: list[Process] = []
    readers: list[asyncio.Task[None]] = []

    async def start(*flags: str, files: int | None = None) -> Process:
        def limit_files() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "api_gateway", f"--tokenizer-endpoint=ipc://{tmp_path}/t", "--beat-s=0.2"),
            *flags,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=limit_files,
        )
        made = Process(process)
        started.append(made)
        readers.append(asyncio.create_task(made.read_log()))
        return made

    yield start
    for made in started:
        if made.process.returncode is None:
            made.process.kill()
            await made.process.wait()
    await asyncio.gather(*readers)


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    made = FakeTokenizer(f"ipc://{tmp_path}/t", step_s=0.01)
    await made.start()
    yield made
    await made.stop()


async def test_serves_and_drains(launch: Any, tokenizer: FakeTokenizer) -> None:
    served = await launch("--port=0", "--served-model-name", "tiny", "--log-format=json", "--shutdown-timeout=5")
    url = await served.ready()
    said = [json.loads(line) for line in served.log.splitlines()]
    assert [line["url"] for line in said if line["event"] == "listening"] == [url]
    assert said[-1]["event"].startswith(f"ready; try: curl -N {url}/v1/chat/completions")
    async with aiohttp.ClientSession() as http:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "stream": True}
        async with http.post(url + "/v1/chat/completions", json=body) as stream:
            await stream.content.readline()
            async with http.post(url + "/v1/completions", json={"prompt": "hold", "stream": True}) as stuck:
                served.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(30):
                    while (answer := await http.get(url + "/ready")).status == 200:
                        await asyncio.sleep(0.02)
                assert (await answer.json())["status"] == "the server is shutting down"
                assert b'"finish_reason":"length"' in await stream.read()
                assert b'"code":503' in await stuck.read()
    assert await asyncio.wait_for(served.process.wait(), 30) == 0
    await until(lambda: not tokenizer.child.requests)


async def test_with_keys_it_says_where_to_put_one_and_never_which(launch: Any, tokenizer: FakeTokenizer) -> None:
    served = await launch("--port=0", "--api-key=sesame")
    url = await served.ready()
    assert f"curl -N {url}/v1/chat/completions -H 'Authorization: Bearer YOUR-API-KEY'" in served.log
    assert "sesame" not in served.log


async def test_a_killed_client_is_noticed(launch: Any, tokenizer: FakeTokenizer) -> None:
    served = await launch("--port=0")
    port = int((await served.ready()).rpartition(":")[2])
    for stream in (False, True):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps({"prompt": "endless", "max_tokens": 500, "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await until(lambda: tokenizer.running == 1)
        writer.transport.abort()
        await until(lambda: tokenizer.running == 0)


async def test_a_second_sigterm_ends_it_at_once(launch: Any, tokenizer: FakeTokenizer) -> None:
    served = await launch("--port=0")
    url = await served.ready()
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json={"prompt": "hold", "stream": True}),
    ):
        served.process.send_signal(signal.SIGTERM)
        await until(lambda: "stopping" in served.log)
        served.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(served.process.wait(), 30) == 128 + signal.SIGTERM


async def test_a_port_in_use_is_said_at_once(launch: Any) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        served = await launch(f"--port={port}")
        assert await asyncio.wait_for(served.process.wait(), 60) not in (0, None)
        await until(lambda: "in use" in served.log.lower())
        assert str(port) in served.log


async def test_few_open_files_mean_refusals_and_no_failures(launch: Any, tokenizer: FakeTokenizer) -> None:
    served = await launch("--port=0", files=160)
    url = await served.ready()
    port = int(url.rpartition(":")[2])
    assert "the limit of open files is low" in served.log
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask() -> tuple[int, str | None]:
            async with http.post(url + "/v1/completions", json={"prompt": "hold", "stream": True}) as answer:
                if answer.status == 200:
                    streaming.append(answer)
                    await leave.wait()
                return answer.status, answer.headers.get("Retry-After")

        streaming: list[Any] = []
        leave = asyncio.Event()
        asking = [asyncio.create_task(ask()) for _ in range(130)]
        await until(lambda: len(streaming) == 96 and sum(task.done() for task in asking) == 34, 60)
        for path in ("/health", "/ready"):
            async with http.get(url + path) as answer:
                assert answer.status == 200
        leave.set()
        answers = await asyncio.gather(*asking)
        assert answers.count((200, None)) == 96
        assert answers.count((429, "1")) == 34
        await until(lambda: tokenizer.running == 0)
        idle = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port) for _ in range(300)), return_exceptions=True
        )
        for connection in idle:
            if isinstance(connection, tuple):
                connection[1].transport.abort()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}) as answer:
                        assert answer.status == 200
                        break
                await asyncio.sleep(0.05)
    assert served.process.returncode is None
    assert "Traceback" not in served.log
