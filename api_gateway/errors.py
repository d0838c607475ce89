"""OpenAI error objects, for our own errors and for those that aiohttp makes by itself."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from shared.errors import ErrorCode, RequestError
from shared.messages import ErrorInfo

MAX_MESSAGE = 1000
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499
"""Status that a request is counted under when its client hung up (nginx's number; never sent)."""

_RETRIED = (429, 503)
_TYPE_OF_STATUS = {code.status: code.type for code in reversed(ErrorCode)}


def error_object(status: int, message: str, kind: str | None = None, param: str | None = None) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``; ``code`` is the HTTP status, as in vLLM."""
    default = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…",
            "type": kind or _TYPE_OF_STATUS.get(status, default),
            "param": param,
            "code": status,
        }
    }


def error_object_of(error: RequestError | ErrorInfo) -> dict[str, Any]:
    code = error_code(error)
    return error_object(code.status, error.message, code.type, error.param)


def error_code(error: RequestError | ErrorInfo) -> ErrorCode:
    """The kind of ``error``; a number from a newer peer that is unknown here counts as internal."""
    try:
        return ErrorCode(error.code)
    except ValueError:
        return ErrorCode.INTERNAL


def out_of_time(limit_s: float) -> ErrorInfo:
    """What ends a request whose own timeout is over."""
    return ErrorInfo(ErrorCode.TIMEOUT, f"the request was not done within its timeout of {limit_s:g} s")


def json_error(
    status: int,
    message: str,
    *,
    kind: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """A response with an error object; ``Retry-After`` and ``WWW-Authenticate`` where the status asks for them."""
    extra = {"Server": "headrace", **(headers or {})}
    if status in _RETRIED:
        extra.setdefault("Retry-After", str(RETRY_AFTER_S))
    if status == HTTPStatus.UNAUTHORIZED:
        extra["WWW-Authenticate"] = "Bearer"
    body = orjson.dumps(error_object(status, message, kind, param))
    return web.Response(status=status, body=body, content_type="application/json", headers=extra)


def error_response(error: RequestError | ErrorInfo) -> web.Response:
    code = error_code(error)
    return json_error(code.status, error.message, kind=code.type, param=error.param)


def response_of_http_exception(error: web.HTTPException, request: web.Request) -> web.Response:
    """What aiohttp would have said in plain text (404, 405, 413, ...), as an error object."""
    if error.status == HTTPStatus.NOT_FOUND:
        return json_error(404, f"no such route: {request.method} {request.path[:200]}")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not allowed on {request.path[:200]}; use {allowed}"
        return json_error(405, message, headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return too_large(request.client_max_size)
    kept = {name: value for name, value in error.headers.items() if name.lower() == "location"}
    return json_error(error.status, error.reason or HTTPStatus(error.status).phrase, headers=kept)


def too_large(limit: int) -> web.Response:
    return json_error(413, f"the request body is larger than {limit} bytes")
