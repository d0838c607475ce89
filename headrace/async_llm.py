"""``AsyncLLM``: an ``LLM`` for asyncio programs, whose loop is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from headrace.llm import LLM
from headrace.offline.errors import InvalidRequest
from headrace.offline.metrics import Metric
from headrace.offline.prompts import Prompts
from headrace.offline.streams import AsyncStream
from headrace.sampling_params import SamplingParams
from shared.config import Settings
from shared.messages import ModelCard


class AsyncLLM:
    """``async with AsyncLLM("demo") as llm: async for output in llm.generate(prompt, params): …``

    Takes what ``LLM`` takes. Any number of streams may run at once. Since they are read while they grow,
    ``target_itl_ms`` has the server's default unless it is given.
    """

    def __init__(self, model: str = "demo", **keywords: Any) -> None:
        self._make: Callable[[], LLM] = partial(LLM, model, **({"target_itl_ms": None} | keywords))
        self._llm: LLM | None = None

    @classmethod
    def from_settings(cls, settings: Settings, *, skip_tokenizer_init: bool = False) -> AsyncLLM:
        """As ``LLM.from_settings``."""
        llm = cls.__new__(cls)
        llm._make = partial(LLM.from_settings, settings, skip_tokenizer_init=skip_tokenizer_init)
        llm._llm = None
        return llm

    async def start(self) -> None:
        """Start the processes and wait until they are ready. Raises as ``LLM``."""
        if self._llm is None:
            self._llm = await asyncio.to_thread(self._make)

    async def close(self) -> None:
        """Abort what runs and end the processes."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def card(self) -> ModelCard:
        """As ``LLM.card``."""
        return self._started.card

    def generate(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncStream:
        """As ``LLM.generate_async``; arguments in vLLM's order."""
        return self._started.generate_async(prompt, sampling_params, request_id=request_id, priority=priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **options: Any,
    ) -> AsyncStream:
        """As ``LLM.chat_async``."""
        return self._started.chat_async(messages, sampling_params, request_id=request_id, priority=priority, **options)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End running requests; their streams end with an output whose ``finish_reason`` is ``abort``."""
        self._started.abort(request_id)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As ``LLM.tokenize``."""
        return await asyncio.to_thread(self._started.tokenize, text, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """As ``LLM.detokenize``."""
        return await asyncio.to_thread(self._started.detokenize, token_ids)

    async def get_metrics(self) -> list[Metric]:
        """As ``LLM.get_metrics``."""
        return await asyncio.to_thread(self._started.get_metrics)

    def get_default_sampling_params(self) -> SamplingParams:
        """As ``LLM.get_default_sampling_params``."""
        return self._started.get_default_sampling_params()

    @property
    def _started(self) -> LLM:
        if self._llm is None:
            raise InvalidRequest("start() comes first, or async with")
        return self._llm
