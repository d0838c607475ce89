"""What callers give as prompts → what a tokenizer or an engine is asked for, checked before anything is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import orjson

from api_gateway.fields import template_kwargs
from headrace.offline.errors import InvalidRequest
from headrace.sampling_params import SamplingParams
from shared import sampling
from shared.errors import RequestError
from shared.messages import Int32, ModelCard, TextSpec, TokenSpec
from shared.sampling import check_token_ids

Prompts: TypeAlias = str | Sequence[Any] | Mapping[str, Any]
"""One prompt or a sequence of them: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``."""

_DICT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_DICT_NEUTRAL = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds")


@dataclasses.dataclass(slots=True)
class Prompt:
    """One prompt. At least one of ``text``, ``ids`` and ``chat`` is set; ``ids`` count before ``text``."""

    place: str
    """How errors name it: ``prompt``, ``prompts[3]``, ``messages``, …"""
    text: str | None = None
    ids: Int32 | None = None
    chat: bytes | None = None
    """The ``chat`` of a ``TextSpec``."""
    cache_salt: str = ""


def read_prompts(prompts: Prompts) -> list[Prompt]:
    """Every form that ``LLM.generate`` takes.

    Raises:
        InvalidRequest: names the prompt that is of another form.
    """
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_read_prompt(prompts, "prompt")]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise InvalidRequest(
            f"prompts must be a text, token ids, a dict or a list of these, got {prompts!r}", "prompts"
        )
    return [_read_prompt(each, f"prompts[{index}]") for index, each in enumerate(prompts)]


def chat_prompts(
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template: None = None,
) -> list[Prompt]:
    """One conversation, or a sequence of them.

    Raises:
        InvalidRequest: names the message or option that is wrong.
    """
    if chat_template is not None:
        raise InvalidRequest(
            "chat_template is given to LLM(chat_template=FILE), for all conversations", "chat_template"
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt must not both be true", "continue_final_message"
        )
    options: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    if tools:
        options["tools"] = list(tools)
    if chat_template_kwargs:
        try:
            options["chat_template_kwargs"] = template_kwargs("chat_template_kwargs", dict(chat_template_kwargs))
        except RequestError as error:
            raise InvalidRequest(error.message, error.param) from None
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest(f"messages must be a list, got {messages!r}", "messages")
    if messages and isinstance(messages[0], Mapping):
        return [_read_chat(messages, "messages", options)]
    return [_read_chat(each, f"messages[{index}]", options) for index, each in enumerate(messages)]


def params_list(given: Any, count: int, default: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts.

    Raises:
        InvalidRequest: not one for all, nor one for each.
    """
    if given is None:
        return [default] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams or a list of them, got {given!r}", "sampling_params"
        )
    if len(given) != count:
        raise InvalidRequest(f"{len(given)} sampling_params for {count} prompts", "sampling_params")
    return list(given)


def priorities_list(given: Sequence[int] | None, count: int) -> list[int]:
    """The priority of each of ``count`` prompts. Raises ``InvalidRequest`` if there is not one for each."""
    if given is None:
        return [0] * count
    if len(given) != count:
        raise InvalidRequest(f"{len(given)} priorities for {count} prompts", "priority")
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
            raise InvalidRequest(f"priority must be an integer of 32 bits, got {value!r}", "priority")
    return list(given)


def text_spec(prompt: Prompt, params: sampling.SamplingParams, priority: int, card: ModelCard) -> TextSpec:
    """What a tokenizer is asked for.

    Raises:
        InvalidRequest: token ids that are out of range, or too many.
    """
    if prompt.ids is None:
        return TextSpec(
            params=params,
            text=prompt.text,
            chat=prompt.chat,
            priority=priority,
            cache_salt=prompt.cache_salt,
            echo=True,
            clamp_max_tokens=True,
        )
    prompt.ids, params = _fitted(prompt, prompt.ids, params, card)
    return TextSpec(params=params, ids=prompt.ids.tobytes(), priority=priority, cache_salt=prompt.cache_salt)


def token_spec(prompt: Prompt, params: sampling.SamplingParams, priority: int, card: ModelCard) -> TokenSpec:
    """What an engine is asked for, without a tokenizer in between.

    Raises:
        InvalidRequest: as ``text_spec``, and for whatever needs a tokenizer.
    """
    if prompt.ids is None:
        raise InvalidRequest(f"{prompt.place} must be token ids: skip_tokenizer_init is set", prompt.place)
    for name in ("stop", "bad_words"):
        if getattr(params, name):
            raise InvalidRequest(f"{name} needs a tokenizer: skip_tokenizer_init is set", name)
    prompt.ids, params = _fitted(prompt, prompt.ids, params, card)
    return TokenSpec(params=params, prompt=prompt.ids.tobytes(), priority=priority, cache_salt=prompt.cache_salt)


def _fitted(
    prompt: Prompt, ids: Int32, params: sampling.SamplingParams, card: ModelCard
) -> tuple[Int32, sampling.SamplingParams]:
    """Ids and parameters that fit the context: the prompt cut as asked, the output as the context's end demands."""
    place, limit = prompt.place, card.max_model_len
    if not len(ids):
        raise InvalidRequest(f"{place} is empty; at least one token is needed", place)
    if ids.min() < 0 or ids.max() >= card.vocab_size:
        try:
            check_token_ids(ids.tolist(), card.vocab_size, place)
        except RequestError as error:
            raise InvalidRequest(error.message, place) from None
    least = 1 if params.max_tokens is None else min(1, params.max_tokens)
    keep = params.truncate_prompt_tokens
    if keep is not None:
        ids = ids[-(keep if keep > 0 else limit - (params.max_tokens or 1)) :]
    if len(ids) + least > limit:
        raise InvalidRequest(f"{place} has {len(ids)} tokens; max_model_len is {limit}", place)
    room = limit - len(ids)
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    return ids, dataclasses.replace(
        params, max_tokens=most, min_tokens=min(params.min_tokens, most), truncate_prompt_tokens=None
    )


def _is_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and len(value) > 0 and isinstance(value[0], int | np.integer) and not isinstance(value[0], bool)


def _read_prompt(value: Any, place: str) -> Prompt:
    if isinstance(value, str):
        return Prompt(place, text=_checked_text(value, place))
    if isinstance(value, Mapping):
        return _read_mapping(value, place)
    if _is_ids(value):
        return Prompt(place, ids=_read_ids(value, place))
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes) and not len(value):
        raise InvalidRequest(f"{place} is empty; at least one token is needed", place)
    raise InvalidRequest(f"{place} must be a text, a list of token ids or a dict, got {value!r}", place)


def _read_mapping(value: Mapping[str, Any], place: str) -> Prompt:
    for key in value:
        if key in _DICT_NEUTRAL and not value[key]:
            continue
        if key not in _DICT_KEYS:
            raise InvalidRequest(f"{place}[{key!r}] is not supported; known are {', '.join(_DICT_KEYS)}", place)
    text, ids, salt = value.get("prompt"), value.get("prompt_token_ids"), value.get("cache_salt") or ""
    if text is None and ids is None:
        raise InvalidRequest(f"{place} has neither prompt nor prompt_token_ids", place)
    if not isinstance(salt, str):
        raise InvalidRequest(f"{place}['cache_salt'] must be a text, got {salt!r}", place)
    if text is not None:
        _checked_text(text, f"{place}['prompt']")
    return Prompt(
        place, text=text, ids=None if ids is None else _read_ids(ids, f"{place}['prompt_token_ids']"), cache_salt=salt
    )


def _checked_text(text: Any, place: str) -> str:
    if not isinstance(text, str):
        raise InvalidRequest(f"{place} must be a text, got {text!r}", place)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{place} holds half of a surrogate pair, which is not a character", place) from None
    return text


def _read_ids(value: Any, place: str) -> Int32:
    if isinstance(value, str | bytes | Mapping):
        raise InvalidRequest(f"{place} must be a list of token ids, got {value!r}", place)
    try:
        ids = np.asarray(value)
    except ValueError:
        ids = np.array([None])
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequest(f"{place} must be a list of token ids", place)
    if not len(ids):
        raise InvalidRequest(f"{place} is empty; at least one token is needed", place)
    if ids.min() < 0 or ids.max() >= 2**31:
        index = int(np.flatnonzero((ids < 0) | (ids >= 2**31))[0])
        raise InvalidRequest(f"{place}[{index}] = {ids[index]} is not a token id", place)
    return ids.astype(np.int32)


def _read_chat(messages: Any, place: str, options: Mapping[str, Any]) -> Prompt:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest(f"{place} must be a list of messages that is not empty", place)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{place}[{index}] must be a dict with role and content", place)
    try:
        chat = orjson.dumps({"messages": list(messages), **options})
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{place} cannot be sent: {error}", place) from None
    return Prompt(place, chat=chat)
