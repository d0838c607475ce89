"""The application: routes, and what surrounds each request."""

from __future__ import annotations

import time

from aiohttp import web
from aiohttp.typedefs import Handler

from api_gateway import routes_admin, routes_openai
from api_gateway.auth import is_public
from api_gateway.errors import CLIENT_CLOSED_REQUEST, error_response, json_error, response_of_http_exception
from api_gateway.exchange import EXCHANGE, Exchange
from api_gateway.gateway import GATEWAY, Gateway
from shared.errors import ErrorCode, RequestError
from shared.logging import get_logger

log = get_logger()


def make_app(gateway: Gateway) -> web.Application:
    """The HTTP application on top of ``gateway``, which is started and stopped by the caller."""
    app = web.Application(client_max_size=gateway.settings.max_body_bytes, middlewares=[observe, errors, authorise])
    app[GATEWAY] = gateway
    app.on_response_prepare.append(name_exchange)
    app.router.add_get("/health", routes_admin.health, name="health")
    app.router.add_get("/ready", routes_admin.ready, name="ready")
    ping = app.router.add_resource("/ping", name="ping")
    for method in ("GET", "HEAD", "POST"):
        ping.add_route(method, routes_admin.ping)
    app.router.add_get("/version", routes_admin.version)
    app.router.add_get("/metrics", routes_admin.metrics)
    app.router.add_get("/v1/models", routes_openai.list_models)
    app.router.add_get("/v1/models/{id:.+}", routes_openai.retrieve_model)
    app.router.add_post("/v1/completions", routes_openai.completions)
    app.router.add_post("/v1/chat/completions", routes_openai.chat_completions)
    app.router.add_post("/tokenize", routes_openai.tokenize)
    app.router.add_post("/detokenize", routes_openai.detokenize)
    app.router.add_post("/reset_prefix_cache", routes_admin.reset_prefix_cache)
    return app


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the request under its route and its outcome; a client that hung up counts as 499."""
    started = time.monotonic()
    status = CLIENT_CLOSED_REQUEST
    try:
        response = await handler(request)
        status = response.status
        admission = request.app[GATEWAY].admission
        if (admission.draining or admission.full) and not response.prepared:
            # The client is to go elsewhere, and its connection is to make room.
            response.force_close()
        return response
    finally:
        resource = request.match_info.route.resource
        route = "none" if resource is None else resource.canonical
        request.app[GATEWAY].http.count(route, request.method, status, time.monotonic() - started)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn everything that a handler raises into an error object. Texts of unforeseen exceptions stay in the log."""
    try:
        request[EXCHANGE] = Exchange.of(request)
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        return response_of_http_exception(error, request)
    except ConnectionResetError:
        raise
    except Exception:
        log.exception("request failed", route=request.path)
        return json_error(500, "the server had an error while processing the request")


@web.middleware
async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Deny by default: without a key only the probes are answered, not even "no such route"."""
    tenant = request.app[GATEWAY].keys.tenant_of(request)
    if tenant is None and not is_public(request):
        raise RequestError("missing or wrong API key; send Authorization: Bearer KEY", code=ErrorCode.UNAUTHORIZED)
    request[EXCHANGE].tenant = tenant or ""
    return await handler(request)


async def name_exchange(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request's id, and what was ignored, into the headers of every answer."""
    response.headers["Server"] = "headrace"
    exchange = request.get(EXCHANGE)
    if exchange is not None:
        response.headers.update(exchange.headers())
    if response.status == ErrorCode.OVERLOADED.status:
        response.headers["Retry-After"] = str(request.app[GATEWAY].retry_after_s())
