"""Requests to prompts: encoding, chat templates, and the checks that need the prompt's length."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from shared.errors import RequestError
from shared.messages import Int32, TextSpec
from shared.sampling import SamplingParams
from tokenizer_service.bad_words import BadWords
from tokenizer_service.template_runner import TemplateRunner
from tokenizer_service.vocabulary import Vocabulary

T = TypeVar("T")

THREADS = 4
"""Texts that are encoded at the same time; the threads hold no lock of Python's while they do."""


class Prompt(NamedTuple):
    """What a model is to continue."""

    ids: Int32
    """At least one."""
    text: str | None
    """As the client wrote it; None: it came as ids or as a chat, or it was truncated."""


class Encoder:
    """Turns what clients send into token ids.

    Args:
        vocabulary: of the model.
        templates: renders chats.
        texts: [width of the logits] the bytes of each id's token, None where it has none. Ids of a client must be
            below that width.
        max_model_len: longest prompt + output in tokens.
        default_max_tokens: longest output of a request that does not say; None: all that the context holds.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: TemplateRunner,
        *,
        texts: Sequence[bytes | None],
        max_model_len: int,
        default_max_tokens: int | None = None,
    ) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._bad_words = BadWords(vocabulary)
        self._bos_id = vocabulary.bos_id
        self._templates = templates
        self._texts = texts
        self._vocab_size = len(texts)
        self._max_model_len = max_model_len
        self._default_max_tokens = default_max_tokens
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

    async def prompt(self, spec: TextSpec) -> Prompt:
        """The prompt of ``spec``: the last ``truncate_prompt_tokens`` ids of it, a BOS at its beginning included.

        Raises:
            RequestError: as ``ids``, for an empty prompt, and for more tokens to keep than the context holds.
        """
        keep = self._tokens_to_keep(spec.params)
        ids = await self.ids(spec)
        if not len(ids):
            raise RequestError("the prompt is empty, and this model needs at least one token", param_of(spec))
        if keep is not None and len(ids) > keep:
            return Prompt(ids[-keep:], None)
        return Prompt(ids, spec.text)

    async def params(self, spec: TextSpec, prompt_tokens: int) -> SamplingParams:
        """What an engine needs of the parameters of ``spec``: as ``fit``, and with the ids of bad words.

        Raises:
            RequestError: as ``fit``, and for a word without tokens.
        """
        params = self.fit(spec, prompt_tokens)
        if not params.bad_words:
            return params
        for index, word in enumerate(params.bad_words):
            _check_unicode(word, f"bad_words[{index}]", "bad_words")
        found = await self._run(self._bad_words.ids, params.bad_words)
        known = params.bad_words_token_ids
        return dataclasses.replace(params, bad_words=[], bad_words_token_ids=known + found)

    def fit(self, spec: TextSpec, prompt_tokens: int) -> SamplingParams:
        """The parameters of ``spec`` with ``max_tokens`` filled in, checked against the model's context.

        A beam search that leaves it out may stay without: the engine knows how much memory there is for all beams.

        Raises:
            RequestError: prompt and output are longer than the context, or a parameter is out of range.
        """
        params, limit = spec.params, self._max_model_len
        params.validate(self._vocab_size)
        self._check_tokens_exist(params)
        if prompt_tokens + 1 > limit:
            raise RequestError(
                f"prompt {prompt_tokens} + at least 1 output token > max_model_len {limit}", param_of(spec)
            )
        params = dataclasses.replace(params, truncate_prompt_tokens=None)
        if params.max_tokens is None:
            room = limit - prompt_tokens
            if self._default_max_tokens is None and params.beam_width is not None:
                return params
            return dataclasses.replace(params, max_tokens=min(room, self._default_max_tokens or room))
        if prompt_tokens + params.max_tokens <= limit:
            return params
        if spec.clamp_max_tokens:
            room = limit - prompt_tokens
            return dataclasses.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        raise RequestError(
            f"max_tokens {params.max_tokens} + prompt {prompt_tokens} > max_model_len {limit}", "max_tokens"
        )

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

    def _tokens_to_keep(self, params: SamplingParams) -> int | None:
        """The longest that the prompt may be after truncation; None: it is not truncated."""
        asked, limit = params.truncate_prompt_tokens, self._max_model_len
        if asked is not None and asked > limit:
            raise RequestError(f"truncate_prompt_tokens {asked} > max_model_len {limit}", "truncate_prompt_tokens")
        if asked is None or asked > 0:
            return asked
        # Beside the output that is wanted; an engine needs room for one token in any case.
        return max(1, limit - max(1, params.max_tokens or 1))

    def _check_tokens_exist(self, params: SamplingParams) -> None:
        """Refuse to prefer ids that no text can be made of."""
        named = {"logit_bias": [token_id for token_id, _ in params.logit_bias]}
        named["allowed_token_ids"] = params.allowed_token_ids or []
        for param, ids in named.items():
            for token_id in ids:
                if self._texts[token_id] is None:
                    raise RequestError(f"{param}: the id {token_id} has no token in this vocabulary", param)

    async def _encode(self, text: str, add_special_tokens: bool, param: str) -> Int32:
        _check_unicode(text, param, param)
        ids = await self._run(self._encode_now, text, add_special_tokens)
        return self.checked_ids(ids, param)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _encode_now(self, text: str, add_special_tokens: bool) -> Int32:
        # encode would hold the interpreter's lock all the time; encode_batch does not.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids = np.array(encoding.ids, np.int32)
        if add_special_tokens and self._bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self._bos_id:
            return ids[1:]
        return ids


def _check_unicode(text: str, name: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds half of a surrogate pair, which is not a character", param) from None


def param_of(spec: TextSpec) -> str:
    """The request field that the prompt comes from."""
    return "messages" if spec.chat is not None else "prompt"
