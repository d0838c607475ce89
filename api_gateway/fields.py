"""Which fields each endpoint takes, in one table, and how each is checked.

A field of a request body is one of four:

- *taken*: checked, and it does what OpenAI or vLLM say it does;
- *neutral only*: known, it would change the answer, and it is not supported: any value but one that changes nothing
  is refused by name;
- *without effect*: known, it cannot change the answer; accepted and not looked at;
- unknown: accepted, and named in the ``x-ignored-fields`` header.

``null`` is the same as leaving an optional field out.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from shared.errors import RequestError
from shared.sampling import MAX_BEAM_WIDTH, MAX_CHOICES, MAX_LOGIT_BIAS, MAX_LOGPROBS, check_count

Check: TypeAlias = Callable[[str, Any], Any]
"""(field name, JSON value) -> the value as it is used; raises RequestError."""

MAX_REQUEST_ID = 128
MAX_CACHE_SALT = 256
MAX_SECONDS = 7 * 86400.0
_DECIMAL = re.compile("0|[1-9][0-9]{0,18}")
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
        "truncation",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """How one field is read. ``default`` stands for it when it is left out or null."""

    check: Check
    default: Any = None
    required: bool = False


Table: TypeAlias = Mapping[str, Field]


def read_fields(
    body: Mapping[str, Any], table: Table, defaults: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Check ``body`` against ``table``; ``defaults`` go before the table's own.

    Returns:
        The value of each field of the table, and the names of the fields that are not in it.

    Raises:
        RequestError: names the first field that is missing, of the wrong type, out of range or not supported.
    """
    values: dict[str, Any] = {}
    given = defaults or {}
    for name, field in table.items():
        value = body.get(name)
        if value is not None:
            values[name] = field.check(name, value)
        elif field.required:
            raise RequestError(f"{name} is required", name)
        else:
            values[name] = given.get(name, field.default)
    return values, [name for name in body if name not in table]


def show(value: Any) -> str:
    """A JSON value for an error message: short, whatever the client sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if isinstance(value, list):
        return "an array"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)[:40]


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {show(value)}", name)
    return value


def number(name: str, value: Any) -> float:
    """A finite number; its range is ``SamplingParams``' to check."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a number, got {show(value)}", name)
    return float(value)


def integer(low: int = -(2**63), high: int = 2**63 - 1) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} must be an integer, got {show(value)}", name)
        if not low <= value <= high:
            raise RequestError(f"{name} must be in [{low}, {high}], got {value}", name)
        return value

    return check


def text(limit: int) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a string, got {show(value)}", name)
        if len(value) > limit:
            raise RequestError(f"{name} has {len(value)} characters; at most {limit} are allowed", name)
        return value

    return check


def seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RequestError(f"{name} must be a number of seconds above 0, got {show(value)}", name)
    return float(min(value, MAX_SECONDS))


def request_id(name: str, value: Any) -> str:
    """A client's own id: it goes into a header and into logs, so only printable ASCII."""
    checked: str = text(MAX_REQUEST_ID)(name, value)
    if not checked or not checked.isascii() or not checked.isprintable():
        raise RequestError(f"{name} must be printable ASCII characters", name)
    return checked


def stop_strings(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise RequestError(f"{name} must be a string or an array of strings, got {show(value)}", name)
    return texts


def strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"{name} must be an array of strings, got {show(value)}", name)
    return value


def integers(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RequestError(f"{name} must be an array of integers", name)
    return value


def logit_bias(name: str, value: Any) -> list[tuple[int, float]]:
    """A JSON object from token ids (as strings) to numbers; the ranges are ``SamplingParams``' to check."""
    entries = mapping(name, value)
    check_count(len(entries), MAX_LOGIT_BIAS, name)
    biases = []
    for key, bias in entries.items():
        if not _DECIMAL.fullmatch(key):
            raise RequestError(f"{name} key {show(key)} is not a token id", name)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
            raise RequestError(f"{name}[{key}] must be a number, got {show(bias)}", name)
        biases.append((int(key), float(bias)))
    return biases


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {show(value)}", name)
    return value


def template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Variables of the chat template; names that would steer the renderer itself are refused."""
    checked = mapping(name, value)
    reserved = sorted(RESERVED_TEMPLATE_KWARGS & checked.keys())
    if reserved:
        raise RequestError(f"{name} must not contain {reserved[0]}", name)
    return checked


def text_format(name: str, value: Any) -> None:
    """``response_format``: only plain text."""
    kind = mapping(name, value).get("type")
    if kind != "text":
        raise RequestError(f'{name} {show(kind)} is not supported; only {{"type": "text"}} is', name)


def early_stopping(name: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise RequestError(f'{name} must be true, false or "never", got {show(value)}', name)
    rule: bool | str = value
    return rule


def anything(_name: str, value: Any) -> Any:
    return value


def neutral_only(*neutral: Any) -> Field:
    """A field that is not supported: refused unless its value is one of ``neutral`` (or null)."""

    def check(name: str, value: Any) -> None:
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
            hint = f"; leave it out or send {show(neutral[0])}" if neutral and neutral[0] not in ([], {}) else ""
            raise RequestError(f"{name} is not supported{hint}", name)

    return Field(check)


def taken(check: Check, default: Any = None) -> Field:
    return Field(check, default)


WITHOUT_EFFECT = Field(anything)

_SAMPLING: dict[str, Field] = {
    "n": taken(integer(1, MAX_CHOICES), 1),
    "temperature": taken(number, 1.0),
    "top_p": taken(number, 1.0),
    "top_k": taken(integer(), 0),
    "min_p": taken(number, 0.0),
    "seed": taken(integer()),
    "max_tokens": taken(integer()),
    "max_completion_tokens": taken(integer()),
    "min_tokens": taken(integer(), 0),
    "ignore_eos": taken(boolean, False),
    "stop": taken(stop_strings, []),
    "stop_token_ids": taken(integers, []),
    "include_stop_str_in_output": taken(boolean, False),
    "skip_special_tokens": taken(boolean, True),
    "repetition_penalty": taken(number, 1.0),
    "presence_penalty": taken(number, 0.0),
    "frequency_penalty": taken(number, 0.0),
    "logit_bias": taken(logit_bias, []),
    "allowed_token_ids": taken(integers),
    "bad_words": taken(strings, []),
    "prompt_logprobs": taken(integer()),
    "truncate_prompt_tokens": taken(integer()),
    "use_beam_search": taken(boolean, False),
    "beam_width": taken(integer(1, MAX_BEAM_WIDTH)),
    "length_penalty": taken(number, 1.0),
    "early_stopping": taken(early_stopping, False),
}

_COMMON: dict[str, Field] = {
    "model": taken(text(1024)),
    **_SAMPLING,
    "stream": taken(boolean, False),
    "stream_options": taken(mapping),
    "priority": taken(integer(-(2**31), 2**31 - 1), 0),
    "request_id": taken(request_id),
    "timeout": taken(seconds),
    "cache_salt": taken(text(MAX_CACHE_SALT), ""),
    "return_token_ids": taken(boolean, False),
    "return_tokens_as_token_ids": taken(boolean, False),
    # Known, and they would change the answer.
    "spaces_between_special_tokens": neutral_only(True),
    "truncation_side": neutral_only("left"),
    "logprob_token_ids": neutral_only([]),
    "response_format": Field(text_format),
    "structured_outputs": neutral_only({}),
    "guided_json": neutral_only(),
    "guided_regex": neutral_only(),
    "guided_choice": neutral_only(),
    "guided_grammar": neutral_only(),
    "structural_tag": neutral_only(),
    "logits_processors": neutral_only([]),
    "repetition_detection": neutral_only(),
    "thinking_token_budget": neutral_only(),
    "kv_transfer_params": neutral_only(),
    "vllm_xargs": neutral_only({}),
    # Known, and they cannot change the answer.
    "guided_decoding_backend": WITHOUT_EFFECT,
    "guided_whitespace_pattern": WITHOUT_EFFECT,
    "metadata": WITHOUT_EFFECT,
    "prompt_cache_key": WITHOUT_EFFECT,
    "prompt_cache_retention": WITHOUT_EFFECT,
    "safety_identifier": WITHOUT_EFFECT,
    "service_tier": WITHOUT_EFFECT,
    "store": WITHOUT_EFFECT,
    "stream_interval": WITHOUT_EFFECT,
    "user": taken(anything),
}

_CHAT_TEMPLATE: dict[str, Field] = {
    "add_generation_prompt": taken(boolean),
    "continue_final_message": taken(boolean, False),
    "chat_template_kwargs": taken(template_kwargs, {}),
    "chat_template": neutral_only(),
    "documents": neutral_only([]),
    "mm_processor_kwargs": neutral_only({}),
    "tools": neutral_only([]),
}

COMPLETIONS: Table = {
    "prompt": Field(anything, required=True),
    **_COMMON,
    "add_special_tokens": taken(boolean, True),
    "best_of": taken(integer(1, MAX_CHOICES)),
    "echo": taken(boolean, False),
    "logprobs": taken(integer()),
    "prompt_embeds": neutral_only(),
    "suffix": neutral_only(""),
}
"""``POST /v1/completions``."""

CHAT: Table = {
    "messages": Field(anything, required=True),
    **_COMMON,
    **_CHAT_TEMPLATE,
    "add_special_tokens": taken(boolean, False),
    "reasoning_effort": taken(text(64)),
    "audio": neutral_only(),
    "echo": neutral_only(False),
    "function_call": neutral_only("none", "auto"),
    "functions": neutral_only([]),
    "logprobs": taken(boolean, False),
    "modalities": neutral_only(["text"]),
    "tool_choice": neutral_only("none", "auto"),
    "top_logprobs": taken(integer(0, MAX_LOGPROBS), 0),
    "verbosity": neutral_only("medium"),
    "web_search_options": neutral_only(),
    "include_reasoning": WITHOUT_EFFECT,
    "parallel_tool_calls": WITHOUT_EFFECT,
    "prediction": WITHOUT_EFFECT,
}
"""``POST /v1/chat/completions``."""

TOKENIZE: Table = {
    "model": taken(text(1024)),
    "prompt": taken(text(2**31)),
    "messages": taken(anything),
    "add_special_tokens": taken(boolean),
    "return_token_strs": taken(boolean, False),
    **_CHAT_TEMPLATE,
}
"""``POST /tokenize``."""

DETOKENIZE: Table = {
    "model": taken(text(1024)),
    "tokens": Field(integers, required=True),
}
"""``POST /detokenize``."""
