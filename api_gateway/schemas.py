"""Request bodies → what the tokenizer is asked for. Everything is checked here, before any work is done."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orjson

from api_gateway.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, read_fields, show
from shared.errors import ErrorCode, RequestError
from shared.messages import Int32, ModelCard, TextSpec
from shared.sampling import MAX_SEED, SamplingParams, check_token_ids

MAX_PROMPTS = 1024
"""Prompts in one completions request, and choices over all of them."""
MAX_MESSAGES = 10_000
COMPLETIONS_MAX_TOKENS = 16

_PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against."""

    names: Sequence[str]
    """Names that the model is served under; the first is the one in answers."""
    card: ModelCard | None
    max_model_len: int | None
    """Of the card, or of the gateway's own setting if that is lower."""

    @property
    def vocab_size(self) -> int | None:
        return None if self.card is None else self.card.vocab_size


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked completions or chat request."""

    kind: Literal["chat", "completions"]
    model: str
    specs: list[TextSpec]
    """One for each prompt; choice ``c`` of prompt ``p`` has index ``p * n + c`` in the answer."""
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    request_id: str | None
    ignored: list[str]
    """Unknown fields of the body."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeRequest:
    spec: TextSpec
    want_strings: bool
    ignored: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    tokens: Int32
    ignored: list[str]


def parse_body(body: bytes) -> dict[str, Any]:
    """A JSON object. NaN, Infinity, lone surrogates and absurd nesting are not JSON here.

    Raises:
        RequestError: in words that name the place.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {show(value)}")
    return value


def parse_completion(body: bytes, limits: Limits) -> GenerationRequest:
    """``POST /v1/completions``.

    Raises:
        RequestError: 400 with the field's name, or 404 for an unknown model.
    """
    values, ignored = read_fields(parse_body(body), COMPLETIONS)
    check_model(values["model"], limits)
    if values["best_of"] not in (None, values["n"]):
        raise RequestError(
            f"best_of {values['best_of']} is not supported unless it equals n ({values['n']})", "best_of"
        )
    params = _sampling_params(values, COMPLETIONS_MAX_TOKENS, limits)
    prompts = _prompts(values["prompt"], limits)
    if len(prompts) * params.n > MAX_PROMPTS:
        raise RequestError(f"{len(prompts)} prompts x n {params.n} are more than {MAX_PROMPTS} choices", "prompt")
    base = _base_spec(values, params)
    specs = []
    for prompt in prompts:
        if isinstance(prompt, str):
            specs.append(dataclasses.replace(base, params=_seeded(params), text=prompt))
            continue
        _check_room(len(prompt), params.max_tokens, limits)
        specs.append(dataclasses.replace(base, params=_seeded(params), ids=prompt.tobytes()))
    return _generation("completions", values, specs, ignored, limits)


def parse_chat(body: bytes, limits: Limits) -> GenerationRequest:
    """``POST /v1/chat/completions``.

    Raises:
        RequestError: 400 with the field's name, or 404 for an unknown model.
    """
    values, ignored = read_fields(parse_body(body), CHAT)
    check_model(values["model"], limits)
    params = _sampling_params(values, None, limits)
    if values["reasoning_effort"] is not None:
        values["chat_template_kwargs"] = {"reasoning_effort": values["reasoning_effort"]} | values[
            "chat_template_kwargs"
        ]
    spec = dataclasses.replace(_base_spec(values, _seeded(params)), chat=_chat(values))
    return _generation("chat", values, [spec], ignored, limits)


def parse_tokenize(body: bytes, limits: Limits) -> TokenizeRequest:
    """``POST /tokenize``: ``prompt`` or ``messages``."""
    values, ignored = read_fields(parse_body(body), TOKENIZE)
    check_model(values["model"], limits)
    if (values["prompt"] is None) == (values["messages"] is None):
        raise RequestError("give exactly one of prompt and messages", "prompt")
    is_chat = values["prompt"] is None
    special = values["add_special_tokens"]
    spec = TextSpec(
        params=SamplingParams(),
        text=values["prompt"],
        chat=_chat(values) if is_chat else None,
        add_special_tokens=not is_chat if special is None else special,
    )
    return TokenizeRequest(spec, values["return_token_strs"], ignored)


def parse_detokenize(body: bytes, limits: Limits) -> DetokenizeRequest:
    """``POST /detokenize``."""
    values, ignored = read_fields(parse_body(body), DETOKENIZE)
    check_model(values["model"], limits)
    return DetokenizeRequest(_token_ids(values["tokens"], "tokens", limits.vocab_size), ignored)


def for_tenant(request: GenerationRequest, tenant: str) -> GenerationRequest:
    """The request as it belongs to ``tenant``, whose cached prefixes are its own; "" is everybody."""
    if not tenant:
        return request
    specs = [
        dataclasses.replace(spec, tenant=tenant, cache_salt=f"{tenant}/{spec.cache_salt}") for spec in request.specs
    ]
    return dataclasses.replace(request, specs=specs)


def check_model(name: str | None, limits: Limits) -> None:
    """A name that is left out means the model that is served."""
    if name is not None and name not in limits.names:
        raise RequestError(f"the model {show(name)} does not exist", "model", ErrorCode.NOT_FOUND)


def _generation(
    kind: Literal["chat", "completions"],
    values: dict[str, Any],
    specs: list[TextSpec],
    ignored: list[str],
    limits: Limits,
) -> GenerationRequest:
    include_usage, continuous_usage = _stream_options(values["stream_options"], values["stream"])
    return GenerationRequest(
        kind=kind,
        model=values["model"] or limits.names[0],
        specs=specs,
        n=values["n"],
        stream=values["stream"],
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=values["return_token_ids"],
        request_id=values["request_id"],
        ignored=ignored,
    )


def _sampling_params(values: dict[str, Any], max_tokens: int | None, limits: Limits) -> SamplingParams:
    """The sampling fields; ``max_tokens`` is what stands for one that is left out."""
    fields = {name: values[name] for name in _PARAMS}
    alias = values["max_completion_tokens"]
    if alias is not None:
        fields["max_tokens"] = alias
    if fields["max_tokens"] is None:
        fields["max_tokens"] = max_tokens
    params = SamplingParams(**fields)
    try:
        params.validate(limits.vocab_size)
    except RequestError as error:
        if alias is not None and error.param == "max_tokens":
            raise RequestError(f"max_completion_tokens: {error.message}", "max_completion_tokens") from None
        raise
    if limits.max_model_len is not None:
        for name in ("max_tokens", "min_tokens"):
            wanted = getattr(params, name)
            if wanted is not None and wanted >= limits.max_model_len + (name == "min_tokens"):
                shown = "max_completion_tokens" if alias is not None and name == "max_tokens" else name
                raise RequestError(
                    f"{shown} {wanted} leaves no room for a prompt: max_model_len is {limits.max_model_len}", shown
                )
    return params


def _seeded(params: SamplingParams) -> SamplingParams:
    """Draw a seed if the request has none, so that a restart of any process does not redraw."""
    return params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED + 1))


def _base_spec(values: Mapping[str, Any], params: SamplingParams) -> TextSpec:
    return TextSpec(
        params=params,
        add_special_tokens=values["add_special_tokens"],
        priority=values["priority"],
        cache_salt=values["cache_salt"],
    )


def _stream_options(options: dict[str, Any] | None, stream: bool) -> tuple[bool, bool]:
    """(include_usage, continuous_usage_stats)."""
    if options is None:
        return False, False
    if not stream:
        raise RequestError("stream_options is only allowed with stream: true", "stream_options")
    read = {}
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.get(name)
        read[name] = False if value is None else _option(name, value)
    return read["include_usage"], read["include_usage"] and read["continuous_usage_stats"]


def _option(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"stream_options.{name} must be true or false, got {show(value)}", "stream_options")
    return value


def _prompts(value: Any, limits: Limits) -> list[str | Int32]:
    """``prompt`` in its four forms, as a list of texts or of id arrays."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"prompt must be a string, an array of strings or of token ids, got {show(value)}", "prompt")
    if not value:
        raise RequestError("prompt must not be empty", "prompt")
    first = value[0]
    if isinstance(first, int) and not isinstance(first, bool):
        return [_prompt_ids(value, "prompt", limits)]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    prompts: list[str | Int32] = []
    for index, item in enumerate(value):
        if type(item) is not type(first) or not isinstance(item, str | list):
            raise RequestError(
                f"prompt[{index}] is {show(item)}; prompt must hold strings, token ids or arrays of token ids", "prompt"
            )
        prompts.append(item if isinstance(item, str) else _prompt_ids(item, f"prompt[{index}]", limits))
    return prompts


def _prompt_ids(ids: list[Any], place: str, limits: Limits) -> Int32:
    if not ids:
        raise RequestError(f"{place} must not be empty", "prompt")
    if limits.max_model_len is not None and len(ids) >= limits.max_model_len:
        raise RequestError(f"{place} has {len(ids)} tokens; max_model_len is {limits.max_model_len}", "prompt")
    return _token_ids(ids, place, limits.vocab_size, "prompt")


def _token_ids(ids: list[Any], place: str, vocab_size: int | None, param: str | None = None) -> Int32:
    bound = 2**31 if vocab_size is None else vocab_size
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= bound):
        try:
            check_token_ids([item if isinstance(item, int) else show(item) for item in ids], vocab_size, place)
        except RequestError as error:
            raise RequestError(error.message, param or place) from None
    return np.array(ids, dtype=np.int32)


def _check_room(prompt_len: int, max_tokens: int | None, limits: Limits) -> None:
    if limits.max_model_len is not None and prompt_len + (max_tokens or 1) > limits.max_model_len:
        raise RequestError(
            f"max_tokens {max_tokens or 1} + prompt {prompt_len} > max_model_len {limits.max_model_len}", "max_tokens"
        )


def _chat(values: Mapping[str, Any]) -> bytes:
    """The ``chat`` of a ``TextSpec``."""
    _check_messages(values["messages"])
    final = values["continue_final_message"]
    generate = values["add_generation_prompt"]
    if final and generate:
        raise RequestError(
            "continue_final_message and add_generation_prompt must not both be true", "continue_final_message"
        )
    chat: dict[str, Any] = {
        "messages": values["messages"],
        "add_generation_prompt": not final if generate is None else generate,
        "continue_final_message": final,
    }
    if values["chat_template_kwargs"]:
        chat["chat_template_kwargs"] = values["chat_template_kwargs"]
    try:
        return orjson.dumps(chat)
    except orjson.JSONEncodeError:
        raise RequestError("messages or chat_template_kwargs are nested too deeply", "messages") from None


def _check_messages(messages: Any) -> None:
    """A non-empty array of messages whose content is text; which roles there may be is the template's business."""
    if not isinstance(messages, list):
        raise RequestError(f"messages must be an array, got {show(messages)}", "messages")
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages holds {len(messages)} messages; at most {MAX_MESSAGES} are allowed", "messages")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{place} must be an object, got {show(message)}", "messages")
        role = message.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= 64:
            raise RequestError(f"{place}.role must be a string, got {show(role)}", "messages")
        _check_content(message, f"{place}.content")


def _check_content(message: dict[str, Any], place: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if message["role"] == "assistant" and (message.get("tool_calls") or message.get("function_call")):
            return
        raise RequestError(f"{place} is required", "messages")
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a string or an array of parts, got {show(content)}", "messages")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(f"{place}[{index}] has type {show(kind)}; only text is supported", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{place}[{index}].text must be a string", "messages")
