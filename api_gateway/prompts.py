"""The prompts of a completions request, and token ids wherever a client may send them."""

from __future__ import annotations

from typing import Any

import numpy as np

from api_gateway.fields import show
from api_gateway.limits import Limits
from shared.errors import RequestError
from shared.messages import Int32
from shared.sampling import SamplingParams, check_token_ids

MAX_PROMPTS = 1024
"""Prompts in one completions request, and choices over all of them."""


def read_prompts(value: Any, params: SamplingParams, limits: Limits) -> list[str | Int32]:
    """``prompt`` in its four forms, as a list of texts or of id arrays.

    Raises:
        RequestError: 400 with the index of the first bad element, or with the lengths of one that has no room.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"prompt must be a string, an array of strings or of token ids, got {show(value)}", "prompt")
    if not value:
        raise RequestError("prompt must not be empty", "prompt")
    first = value[0]
    if isinstance(first, int) and not isinstance(first, bool):
        return [_prompt_ids(value, "prompt", params, limits)]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    prompts: list[str | Int32] = []
    for index, item in enumerate(value):
        if type(item) is not type(first) or not isinstance(item, str | list):
            raise RequestError(
                f"prompt[{index}] is {show(item)}; prompt must hold strings, token ids or arrays of token ids", "prompt"
            )
        prompts.append(item if isinstance(item, str) else _prompt_ids(item, f"prompt[{index}]", params, limits))
    return prompts


def read_token_ids(ids: list[Any], place: str, vocab_size: int | None, param: str | None = None) -> Int32:
    """Ids as an array; ``place`` says where they are, ``param`` names the field if that is another.

    Raises:
        RequestError: with the first bad id and its index.
    """
    bound = 2**31 if vocab_size is None else vocab_size
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= bound):
        try:
            check_token_ids([item if isinstance(item, int) else show(item) for item in ids], vocab_size, place)
        except RequestError as error:
            raise RequestError(error.message, param or place) from None
    return np.array(ids, dtype=np.int32)


def _prompt_ids(ids: list[Any], place: str, params: SamplingParams, limits: Limits) -> Int32:
    if not ids:
        raise RequestError(f"{place} must not be empty", "prompt")
    _check_room(len(ids), place, params, limits)
    return read_token_ids(ids, place, limits.vocab_size, "prompt")


def _check_room(prompt_len: int, place: str, params: SamplingParams, limits: Limits) -> None:
    """Refuse a prompt that is too long, and one that leaves no room for the tokens that are wanted."""
    bound, kept = limits.max_model_len, params.truncate_prompt_tokens
    if bound is None or kept == -1:
        return
    prompt_len = prompt_len if kept is None else min(prompt_len, kept)
    wanted = max(1, params.max_tokens or 0)
    if prompt_len + 1 > bound:
        raise RequestError(f"{place} has {prompt_len} tokens; max_model_len is {bound}", "prompt")
    if prompt_len + wanted > bound:
        raise RequestError(f"max_tokens {wanted} + prompt {prompt_len} > max_model_len {bound}", "max_tokens")
