"""Complete JSON answers of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from api_gateway.choice_output import ChoiceOutput
from api_gateway.limits import Limits
from api_gateway.logprobs import mean_logprob, prompt_logprobs
from api_gateway.request_log import ChoiceLog, PromptLog, Usage
from api_gateway.schemas import GenerationRequest


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


def completion(
    request: GenerationRequest, completion_id: str, created: int, prompts: Sequence[PromptLog], usage: Usage
) -> dict[str, Any]:
    """The answer to a request without streaming. All choices must have ended."""
    choices = [_choice(request, prompt, choice) for prompt in prompts for choice in best_of(prompt.choices, request.n)]
    answer: dict[str, Any] = {
        "id": completion_id,
        "object": "chat.completion" if request.kind == "chat" else "text_completion",
        "created": created,
        "model": request.model,
        "choices": [{"index": index} | choice for index, choice in enumerate(choices)],
        "usage": usage.to_json(),
    }
    if request.kind == "chat":
        answer |= _of_prompt(request, prompts[0])
    return answer


def best_of(choices: Sequence[ChoiceLog], n: int) -> Sequence[ChoiceLog]:
    """The ``n`` choices with the highest log-probability per token, best first; all of them as they are."""
    if len(choices) == n:
        return choices
    return sorted(choices, key=lambda choice: mean_logprob(choice.rows.records), reverse=True)[:n]


def _choice(request: GenerationRequest, prompt: PromptLog, choice: ChoiceLog) -> dict[str, Any]:
    text, ids, logprobs = ChoiceOutput(request, prompt, choice).take()
    answer: dict[str, Any]
    if request.kind == "chat":
        answer = {"message": {"role": "assistant", "content": text, "refusal": None}}
    else:
        answer = {"text": text}
    answer |= {"logprobs": logprobs, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    if request.shown.token_ids:
        answer["token_ids"] = ids.tolist()
    return answer if request.kind == "chat" else answer | _of_prompt(request, prompt)


def _of_prompt(request: GenerationRequest, prompt: PromptLog) -> dict[str, Any]:
    """What vLLM says of a prompt: beside each of its choices, or for a chat beside all of them."""
    wanted, info = request.shown.prompt_logprobs, prompt.info
    return {} if wanted is None or info is None else {"prompt_logprobs": prompt_logprobs(info, wanted)}


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
