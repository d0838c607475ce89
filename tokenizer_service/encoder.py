"""Requests to prompts: encoding, chat templates, and the checks that need the prompt's length."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shared.errors import RequestError
from shared.messages import Int32, TextSpec
from shared.sampling import SamplingParams
from tokenizer_service.template_runner import TemplateRunner
from tokenizer_service.vocabulary import Vocabulary

THREADS = 4
"""Texts that are encoded at the same time; the threads hold no lock of Python's while they do."""


class Encoder:
    """Turns what clients send into token ids.

    Args:
        vocabulary: of the model.
        templates: renders chats.
        vocab_size: width of the logits; ids of a client must be below it.
        max_model_len: longest prompt + output in tokens.
    """

    def __init__(
        self, vocabulary: Vocabulary, templates: TemplateRunner, *, vocab_size: int, max_model_len: int
    ) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._bos_id = vocabulary.bos_id
        self._templates = templates
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(THREADS, "encode")

    async def ids(self, spec: TextSpec) -> Int32:
        """The token ids of ``spec``, int32; there may be none.

        A text gets the model's BOS unless it begins with one or ``add_special_tokens`` is false. A rendered chat gets
        nothing: its template says all.

        Raises:
            RequestError: an id out of range, a text that is not Unicode, a chat that cannot be rendered.
        """
        if spec.ids is not None:
            return self.checked_ids(np.frombuffer(spec.ids[: len(spec.ids) // 4 * 4], np.int32), "prompt")
        if spec.chat is not None:
            return await self._encode(await self._templates.render(spec.chat), False, "messages")
        return await self._encode(spec.text or "", spec.add_special_tokens, "prompt")

    async def prompt(self, spec: TextSpec) -> Int32:
        """The prompt of ``spec`` as token ids, int32; at least one.

        Raises:
            RequestError: as ``ids``, and for an empty prompt.
        """
        ids = await self.ids(spec)
        if not len(ids):
            raise RequestError("the prompt is empty, and this model needs at least one token", param_of(spec))
        return ids

    def fit(self, spec: TextSpec, prompt_tokens: int) -> SamplingParams:
        """The parameters of ``spec`` with ``max_tokens`` filled in, checked against the model's context.

        Raises:
            RequestError: prompt and output are longer than the context.
        """
        params, limit = spec.params, self._max_model_len
        params.validate(self._vocab_size)
        if prompt_tokens + 1 > limit:
            raise RequestError(
                f"prompt {prompt_tokens} + at least 1 output token > max_model_len {limit}", param_of(spec)
            )
        if params.max_tokens is None:
            return dataclasses.replace(params, max_tokens=limit - prompt_tokens)
        if prompt_tokens + params.max_tokens > limit:
            raise RequestError(
                f"max_tokens {params.max_tokens} + prompt {prompt_tokens} > max_model_len {limit}", "max_tokens"
            )
        return params

    def checked_ids(self, ids: Int32, param: str) -> Int32:
        """``ids`` if the model has all of them.

        Raises:
            RequestError: with the first id that is out of range, and its index.
        """
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            index = int(wrong[0])
            raise RequestError(f"{param}[{index}] = {ids[index]} is not a token id in 0..{self._vocab_size - 1}", param)
        return ids

    def strings(self, ids: Int32) -> list[str]:
        """The token of each id in the vocabulary's spelling."""
        return [self._tokenizer.id_to_token(i) or "" for i in ids.tolist()]

    def close(self) -> None:
        """End the threads once they are done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, text: str, add_special_tokens: bool, param: str) -> Int32:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{param} holds half of a surrogate pair, which is not a character", param) from None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_now, text, add_special_tokens)

    def _encode_now(self, text: str, add_special_tokens: bool) -> Int32:
        # encode would hold the interpreter's lock all the time; encode_batch does not.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids = np.array(encoding.ids, np.int32)
        if add_special_tokens and self._bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self._bos_id:
            return ids[1:]
        return ids


def param_of(spec: TextSpec) -> str:
    """The request field that the prompt comes from."""
    return "messages" if spec.chat is not None else "prompt"
