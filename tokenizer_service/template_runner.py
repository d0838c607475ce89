"""Renders chats in a child process, which is killed and replaced when a template takes too long."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from shared.errors import ErrorCode, RequestError

_ROOT = str(Path(__file__).parents[1])
"""Where the child finds this package, installed or not."""

TIME_LIMIT_S = 5.0
"""For one chat."""


class TemplateRunner:
    """Owns the child. One chat at a time; others wait for their turn.

    Args:
        templates: by name; empty: the model has none.
        special_tokens: variables such as ``bos_token``.
        limit_s: time for one chat.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], limit_s: float = TIME_LIMIT_S
    ) -> None:
        self._load = {"templates": dict(templates), "special_tokens": dict(special_tokens)}
        self._limit_s = limit_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._number = 0
        """Of the last request; its answer has the same, so that nobody gets the prompt of somebody else."""

    async def start(self) -> dict[str, str]:
        """Start the child, in place of one that a chat has needed already; returns the errors of templates that do not
        compile, by name."""
        async with self._turn:
            return await self._start() if self._load["templates"] else {}

    async def render(self, chat: bytes) -> str:
        """The prompt of a chat (``TextSpec.chat``).

        Raises:
            RequestError: with the template's own words; also when there is none, or when it took too long.
        """
        if not self._load["templates"]:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        wanted = asyncio.Event()
        wanted.set()
        try:
            # What was begun goes on without its caller: a chat that is aborted costs no child.
            answer = await asyncio.shield(self._in_turn(chat, wanted))
        except asyncio.CancelledError:
            wanted.clear()
            raise
        if "error" in answer:
            raise RequestError(answer["error"], "messages")
        return str(answer["text"])

    async def close(self) -> None:
        """End the child."""
        async with self._turn:
            await self._kill()

    async def _in_turn(self, chat: bytes, wanted: asyncio.Event) -> dict[str, Any]:
        async with self._turn:
            return await self._ask_within_limit(chat) if wanted.is_set() else {}

    async def _ask_within_limit(self, chat: bytes) -> dict[str, Any]:
        try:
            if self._child is None or self._child.returncode is not None:
                await self._start()
            return await asyncio.wait_for(self._ask({"chat": chat}), self._limit_s)
        except TimeoutError:
            await self._kill()
            raise RequestError(f"the chat template took longer than {self._limit_s:g} s", "messages") from None
        except (asyncio.IncompleteReadError, OSError):
            await self._kill()
            raise RequestError("the process that renders chat templates died", "messages", ErrorCode.INTERNAL) from None
        except BaseException:
            await self._kill()
            raise

    async def _start(self) -> dict[str, str]:
        await self._kill()
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "tokenizer_service.template_child",
            str(self._limit_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))},
        )
        try:
            answer = await self._ask(self._load)
        except BaseException:
            await self._kill()
            raise
        return dict(answer["errors"])

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._number += 1
        body = msgpack.packb({**request, "number": self._number})
        self._child.stdin.write(len(body).to_bytes(4, "little") + body)
        await self._child.stdin.drain()
        size = int.from_bytes(await self._child.stdout.readexactly(4), "little")
        answer = dict(msgpack.unpackb(await self._child.stdout.readexactly(size)))
        if answer.pop("number") != self._number:
            raise ConnectionError("the answer belongs to another request")
        return answer

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()
