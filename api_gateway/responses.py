"""Complete JSON answers of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from api_gateway.request_log import ChoiceLog, Usage
from api_gateway.schemas import GenerationRequest, Limits


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


def completion(
    request: GenerationRequest, completion_id: str, created: int, choices: Sequence[ChoiceLog], usage: Usage
) -> dict[str, Any]:
    """The answer to a request without streaming. All choices must have ended."""
    return {
        "id": completion_id,
        "object": "chat.completion" if request.kind == "chat" else "text_completion",
        "created": created,
        "model": request.model,
        "choices": [_choice(request, choice) for choice in choices],
        "usage": usage.to_json(),
    }


def _choice(request: GenerationRequest, choice: ChoiceLog) -> dict[str, Any]:
    text, ids = choice.take()
    answer: dict[str, Any] = {"index": choice.index}
    if request.kind == "chat":
        answer["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        answer["text"] = text
    answer |= {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    if request.return_token_ids:
        answer["token_ids"] = ids.tolist()
    return answer


def model_list(limits: Limits, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(name, limits, created) for name in limits.names]}


def model_object(name: str, limits: Limits, created: int) -> dict[str, Any]:
    """``max_model_len`` is null until a tokenizer has said it."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": name,
        "parent": None,
        "max_model_len": limits.max_model_len,
    }
