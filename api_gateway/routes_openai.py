"""The OpenAI API: completions, chat completions and models; vLLM's tokenize and detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from api_gateway import resume
from api_gateway.body import read_json_body
from api_gateway.deadline import deadline, with_deadline
from api_gateway.errors import error_response
from api_gateway.event_stream import EventStream
from api_gateway.exchange import EXCHANGE
from api_gateway.gateway import GATEWAY
from api_gateway.generation import Generation
from api_gateway.limits import Limits
from api_gateway.responses import json_response, model_list, model_object
from api_gateway.schemas import (
    GenerationRequest,
    check_model,
    for_tenant,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)


async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    return await _generate(request, parse_completion, "cmpl")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    return await _generate(request, parse_chat, "chatcmpl")


async def list_models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    gateway = request.app[GATEWAY]
    return json_response(model_list(gateway.limits, gateway.created))


async def retrieve_model(request: web.Request) -> web.Response:
    """``GET /v1/models/{id}``; a model id may contain slashes."""
    gateway, name = request.app[GATEWAY], request.match_info["id"]
    check_model(name, gateway.limits)
    return json_response(model_object(name, gateway.limits, gateway.created))


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``."""
    gateway = request.app[GATEWAY]
    gateway.require_ready()
    asked = parse_tokenize(await read_json_body(request), gateway.limits)
    _note_ignored(request, asked.ignored)
    answer = await gateway.links.calls.tokenize(asked.spec, asked.want_strings)
    return json_response(
        {
            "count": len(answer.tokens),
            "max_model_len": gateway.limits.max_model_len,
            "tokens": answer.tokens.tolist(),
            "token_strs": answer.strings if asked.want_strings else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``."""
    gateway = request.app[GATEWAY]
    gateway.require_ready()
    asked = parse_detokenize(await read_json_body(request), gateway.limits)
    _note_ignored(request, asked.ignored)
    answer = await gateway.links.calls.detokenize(asked.tokens)
    return json_response({"prompt": answer.text})


async def _generate(
    request: web.Request, parse: Callable[[bytes, Limits], GenerationRequest], prefix: str
) -> web.StreamResponse:
    gateway, exchange = request.app[GATEWAY], request[EXCHANGE]
    gateway.require_ready()
    with gateway.admission.enter():
        body = await read_json_body(request)
        isolated = gateway.settings.prefix_cache_isolation
        asked = for_tenant(parse(body, gateway.limits), exchange.tenant, isolated=isolated)
        asked = with_deadline(asked, request)
        _note_ignored(request, asked.ignored)
        if asked.request_id is not None and not exchange.named:
            exchange.request_id, exchange.named = asked.request_id, True
        resumption = None
        if resume.HEADER in request.headers:
            asked, resumption = resume.resumable(asked, body, exchange, request.headers[resume.HEADER])
        generation = Generation(asked, f"{prefix}-{exchange.request_id}", gateway.latency, resumption)
        with (
            gateway.tracking(generation),
            gateway.links.serving(generation, exchange.request_id),
            deadline(generation, gateway.abandon),
        ):
            return await _answer(request, generation)


async def _answer(request: web.Request, generation: Generation) -> web.StreamResponse:
    await generation.opened.wait()
    if generation.failure is None and generation.request.stream:
        return await _stream(request, generation)
    await generation.finished.wait()
    if generation.failure is not None:
        return error_response(generation.failure)
    shown = generation.request.shown
    if shown.logprobs is None and shown.prompt_logprobs is None:
        return json_response(generation.answer())
    # Those of a long prompt take a while, and other streams are waiting.
    return json_response(await asyncio.to_thread(generation.answer))


async def _stream(request: web.Request, generation: Generation) -> web.StreamResponse:
    stream = EventStream(request)
    await stream.open()
    await generation.stream_to(stream)
    return await stream.close()


def _note_ignored(request: web.Request, names: list[str]) -> None:
    if names:
        request[EXCHANGE].ignored = names
        request.app[GATEWAY].log_ignored(names)
