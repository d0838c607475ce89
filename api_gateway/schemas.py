"""Request bodies → what the tokenizer is asked for. Everything is checked here, before any work is done."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import orjson

from api_gateway.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, read_fields, show
from api_gateway.limits import Limits
from api_gateway.parameters import (
    Shown,
    defaults_of,
    sampling_params,
    seeded,
    shown_of_chat,
    shown_of_completion,
    take_beam_width,
)
from api_gateway.prompts import MAX_PROMPTS, read_prompts, read_token_ids
from shared.errors import ErrorCode, RequestError
from shared.messages import Int32, TextSpec
from shared.sampling import SamplingParams

MAX_MESSAGES = 10_000
COMPLETIONS_MAX_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked completions or chat request."""

    kind: Literal["chat", "completions"]
    model: str
    specs: list[TextSpec]
    """One for each prompt; choice ``c`` of prompt ``p`` has index ``p * n + c`` in the answer."""
    n: int
    """Choices of each prompt in the answer."""
    shown: Shown
    stream: bool
    include_usage: bool
    continuous_usage: bool
    request_id: str | None
    ignored: list[str]
    """Unknown fields of the body."""
    timeout_s: float | None = None
    """From its arrival on; None: no limit."""

    @property
    def generated(self) -> int:
        """Choices of each prompt that are generated; the answer has the best ``n`` of them."""
        return self.specs[0].params.n


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
    given = parse_body(body)
    values, ignored = read_fields(given, COMPLETIONS, defaults_of(given, limits))
    check_model(values["model"], limits)
    take_beam_width(values)
    shown = shown_of_completion(values)
    generated = _best_of(values)
    params = sampling_params(values, shown, limits, choices=generated, max_tokens=COMPLETIONS_MAX_TOKENS)
    prompts = read_prompts(values["prompt"], params, limits)
    if len(prompts) * generated > MAX_PROMPTS:
        raise RequestError(f"{len(prompts)} prompts x {generated} are more than {MAX_PROMPTS} choices", "prompt")
    base = dataclasses.replace(_base_spec(values, params), echo=shown.echo)
    specs = []
    for prompt in prompts:
        given = {"text": prompt} if isinstance(prompt, str) else {"ids": prompt.tobytes()}
        specs.append(dataclasses.replace(base, params=seeded(params), **given))
    return _generation("completions", values, shown, specs, ignored, limits)


def parse_chat(body: bytes, limits: Limits) -> GenerationRequest:
    """``POST /v1/chat/completions``.

    Raises:
        RequestError: 400 with the field's name, or 404 for an unknown model.
    """
    given = parse_body(body)
    values, ignored = read_fields(given, CHAT, defaults_of(given, limits))
    check_model(values["model"], limits)
    take_beam_width(values)
    shown = shown_of_chat(values)
    params = sampling_params(values, shown, limits, choices=values["n"], max_tokens=None)
    if values["reasoning_effort"] is not None:
        values["chat_template_kwargs"] = {"reasoning_effort": values["reasoning_effort"]} | values[
            "chat_template_kwargs"
        ]
    spec = dataclasses.replace(_base_spec(values, seeded(params)), chat=_chat(values))
    return _generation("chat", values, shown, [spec], ignored, limits)


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
    return DetokenizeRequest(read_token_ids(values["tokens"], "tokens", limits.vocab_size), ignored)


def for_tenant(request: GenerationRequest, tenant: str, *, isolated: bool) -> GenerationRequest:
    """The request as it belongs to ``tenant``; "" is no one, and the field ``user`` says whose it is.

    Args:
        isolated: what a tenant has cached is its own, whatever salt another one sends.
    """
    if not tenant:
        return request
    specs = [
        dataclasses.replace(
            spec, tenant=tenant, cache_salt=f"{tenant}/{spec.cache_salt}" if isolated else spec.cache_salt
        )
        for spec in request.specs
    ]
    return dataclasses.replace(request, specs=specs)


def _tenant_of(user: Any) -> str:
    """A name made from the field ``user``, which may say anything; "" without one."""
    if not isinstance(user, str) or not user:
        return ""
    return "user-" + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_model(name: str | None, limits: Limits) -> None:
    """A name that is left out means the model that is served."""
    if name is not None and name not in limits.names:
        raise RequestError(f"the model {show(name)} does not exist", "model", ErrorCode.NOT_FOUND)


def _generation(
    kind: Literal["chat", "completions"],
    values: dict[str, Any],
    shown: Shown,
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
        shown=shown,
        stream=values["stream"],
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        request_id=values["request_id"],
        ignored=ignored,
        timeout_s=values["timeout"],
    )


def _best_of(values: Mapping[str, Any]) -> int:
    """How many choices of each prompt are generated."""
    n, best_of = values["n"], values["best_of"]
    if best_of is None:
        return int(n)
    if best_of < n:
        raise RequestError(f"best_of {best_of} must not be less than n {n}", "best_of")
    if values["use_beam_search"]:
        return int(n)
    if best_of > n and values["stream"]:
        raise RequestError("best_of must equal n with stream: true: the best are known at the end only", "best_of")
    return int(best_of)


def _base_spec(values: Mapping[str, Any], params: SamplingParams) -> TextSpec:
    return TextSpec(
        params=params,
        add_special_tokens=values["add_special_tokens"],
        priority=values["priority"],
        tenant=_tenant_of(values["user"]),
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
