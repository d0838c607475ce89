"""Sixteen requests of every kind, made from a seed, and clients that read them and notice everything that is wrong."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.integration.streams import CHAT, COMPLETIONS, Joined

STREAMS = 16
WORDS = (
    "the water wheel",
    "turns when",
    "headrace is",
    "open and",
    "mill grinds",
    "corn for bread",
    "a river",
    "boats",
)
RETRY_S = 0.05
CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
TOLD = ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
"""What an answer says of a choice, and what must not change."""


class Wrong(Exception):
    """A client saw what no client may see."""


class ConnectionLost(Exception):
    """The connection closed before the answer had ended.

    Args:
        chunks: those that came before.
        asked: false if there was no connection in the first place.
    """

    def __init__(self, chunks: list[dict[str, Any]], asked: bool = True) -> None:
        super().__init__(f"connection lost after {len(chunks)} chunks")
        self.chunks, self.asked = chunks, asked


@dataclass
class Report:
    """What happened to the requests of a run."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    resent: int = 0
    """Requests whose gateway was killed; sent again."""
    refused: int = 0
    """503 before a request was taken; asked again."""
    wrong: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return len(self.answers) + len(self.wrong)


def make_requests(seed: int, model: str, tokens: tuple[int, int] = (30, 150)) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each: half streamed; some with n = 2, stop strings, logprobs, penalties; all reproducible."""
    rng = random.Random(seed)
    requests = []
    for index in range(STREAMS):
        words = " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": rng.randint(*tokens),
            "stream": index % 2 == 0,
            "ignore_eos": rng.random() < 0.7,
            "return_token_ids": True,
        }
        if rng.random() < 0.5:
            body |= {"temperature": 0}
        else:
            body |= {
                "temperature": rng.choice([0.7, 1.0, 1.3]),
                "top_p": rng.choice([0.9, 1.0]),
                "seed": rng.getrandbits(31),
            }
        if index % 4 == 1 or index % 8 == 2:
            body["n"] = 2 if body["temperature"] else 1
        if rng.random() < 0.3:
            body["stop"] = rng.choice([["qu"], ["th", "zz"], [" w"], ["er", "!?"]])
        if rng.random() < 0.2:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.2}
        is_chat = rng.random() < 0.4
        if rng.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
        if is_chat:
            requests.append((CHAT, body | {"messages": [{"role": "user", "content": words}]}))
        else:
            requests.append((COMPLETIONS, body | {"prompt": words}))
    return requests


class Clients:
    """Sends all requests at once, each to its gateway, and collects the answers.

    Args:
        urls: of the gateways; request ``i`` goes to gateway ``i`` modulo their number.
        life: (gateway) → something that changes when the gateway is killed. A connection may only close then, and the
            request is sent again to the next gateway: a gateway takes its connections with it.
    """

    def __init__(self, urls: list[str], life: Callable[[int], object]) -> None:
        self._urls, self._life = urls, life
        self.report = Report()

    async def run(self, requests: list[tuple[str, dict[str, Any]]], seconds: float) -> Report:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            jobs = [asyncio.create_task(self._serve(session, i, *asked)) for i, asked in enumerate(requests)]
            _, pending = await asyncio.wait(jobs, timeout=seconds)
            for index, job in enumerate(jobs):
                if job in pending:
                    job.cancel()
                    path, body = requests[index]
                    self.report.wrong.append(f"request {index} has not ended after {seconds:g} s: {path} {body}")
            await asyncio.gather(*jobs, return_exceptions=True)
        return self.report

    async def _serve(self, session: aiohttp.ClientSession, index: int, path: str, body: dict[str, Any]) -> None:
        partial: list[dict[str, Any]] = []
        gateway = index % len(self._urls)
        try:
            while True:
                life = self._life(gateway)
                try:
                    answer = await ask(session, self._urls[gateway] + path, body)
                except ConnectionLost as lost:
                    await asyncio.sleep(RETRY_S)
                    if self._life(gateway) == life and lost.asked:
                        raise Wrong(f"{lost}, but its gateway lives") from lost
                    self.report.resent += lost.asked
                    partial = max(partial, lost.chunks, key=len)
                    gateway = (gateway + 1) % len(self._urls)
                    continue
                if answer is None:
                    self.report.refused += 1
                    await asyncio.sleep(RETRY_S)
                    continue
                check_prefix(partial, answer)
                self.report.answers[index] = answer
                return
        except Wrong as wrong:
            self.report.wrong.append(f"request {index}: {wrong}")
        except AssertionError as error:
            self.report.wrong.append(f"request {index}: {error!r}")


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The whole answer; None: refused with 503, so that nothing was begun.

    Raises:
        ConnectionLost: it closed before the end.
        Wrong: an error, a broken stream, or something after its end.
    """
    chunks: list[dict[str, Any]] = []
    try:
        async with session.post(url, json=body) as response:
            if response.status == 503:
                return None
            if response.status != 200:
                raise Wrong(f"status {response.status}: {await response.text()}")
            if not body["stream"]:
                return whole(json.loads(await response.read()))
            ended = False
            async for line in response.content:
                ended = take(line, chunks, ended)
    except CONNECTION_ERRORS as error:
        raise ConnectionLost(chunks, asked=not isinstance(error, aiohttp.ClientConnectorError)) from error
    if not ended:
        raise ConnectionLost(chunks)
    return joined(chunks)


def take(line: bytes, chunks: list[dict[str, Any]], ended: bool) -> bool:
    """Read one line of a stream; returns whether it has ended."""
    if not line.startswith(b"data: "):
        return ended
    if ended:
        raise Wrong(f"data after [DONE]: {line!r}")
    if line.rstrip() == b"data: [DONE]":
        return True
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise Wrong(f"the stream ended with an error: {chunk['error']}")
    chunks.append(chunk)
    return False


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """What a plain answer says, choice by choice."""
    found = {}
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        told = {name: choice.get(name) for name in TOLD} | {"text": text}
        if told["finish_reason"] is None:
            raise Wrong(f"a choice without an end: {choice}")
        found[choice["index"]] = told
    return found


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of a stream; each choice must have ended exactly once."""
    parts = Joined(chunks)
    if parts.finish.keys() != parts.text.keys():
        raise Wrong(f"choices {sorted(parts.text)} began, {sorted(parts.finish)} ended")
    found = {}
    for index, text in parts.text.items():
        found[index] = {
            "text": text,
            "token_ids": parts.token_ids[index],
            "logprobs": _columns(parts.logprobs.get(index, [])),
            "finish_reason": parts.finish[index],
            "stop_reason": parts.stop_reason[index],
        }
    return found


def _columns(objects: list[dict[str, Any]]) -> dict[str, list[Any]] | None:
    names = {name for each in objects for name, column in each.items() if column is not None}
    return {name: [value for each in objects for value in each[name]] for name in sorted(names)} or None


def check_prefix(chunks: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """What a client was shown before its connection closed must be how the whole answer begins."""
    if not chunks:
        return
    shown = Joined(chunks)
    for index, text in shown.text.items():
        if not answer[index]["text"].startswith(text):
            raise Wrong(f"choice {index} was shown {text!r}, and then it was {answer[index]['text']!r}")
        ids = shown.token_ids[index]
        if answer[index]["token_ids"][: len(ids)] != ids:
            raise Wrong(f"choice {index} was given ids {ids}, and then they were {answer[index]['token_ids']}")


def differences(expected: dict[int, dict[str, Any]], got: dict[int, dict[str, Any]]) -> list[str]:
    """Where answers differ from the undisturbed ones, in words."""
    words = []
    for index, answer in got.items():
        for choice, told in expected[index].items():
            for name in TOLD:
                if (now := answer.get(choice, {}).get(name)) != told[name]:
                    words.append(f"request {index}, choice {choice}: {name} was {told[name]!r}, now {now!r}")
                    break
        if answer.keys() != expected[index].keys():
            words.append(f"request {index}: choices {sorted(answer)} for {sorted(expected[index])}")
    return words
