"""Probes, version and metrics."""

from __future__ import annotations

import importlib.metadata

from aiohttp import web

from api_gateway.errors import RETRY_AFTER_S
from api_gateway.gateway import GATEWAY
from api_gateway.metrics_page import CONTENT_TYPE, render
from api_gateway.responses import json_response


async def health(request: web.Request) -> web.Response:
    """``GET /health``: this process is alive, and what it serves is not stuck; else 503 with the reason.

    What is merely absent, loading or being restarted does not count: to end the gateway would not help.
    """
    reason = request.app[GATEWAY].stuck()
    return web.Response() if reason is None else _unavailable(reason)


async def ready(request: web.Request) -> web.Response:
    """``GET /ready``: 200 when requests for text would be served, else 503 with the reason."""
    reason = request.app[GATEWAY].not_ready()
    return json_response({"status": "ready"}) if reason is None else _unavailable(reason)


def _unavailable(reason: str) -> web.Response:
    response = json_response({"status": reason}, status=503)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


async def ping(request: web.Request) -> web.Response:
    """``GET`` or ``POST /ping``: as SageMaker asks; the same as /ready."""
    return await ready(request)


async def version(_request: web.Request) -> web.Response:
    """``GET /version``."""
    return json_response({"version": package_version()})


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``: Prometheus text."""
    return web.Response(body=render(request.app[GATEWAY]), headers={"Content-Type": CONTENT_TYPE})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: nothing that was cached before is found any more, when this has answered.

    ``held_blocks`` of what was cached belong to running requests, which go on; they are free when these end.
    ``host_blocks`` were copies in host memory.
    """
    answer = await request.app[GATEWAY].links.calls.reset_prefix_cache()
    found = {
        "forgotten_blocks": answer.num_forgotten,
        "held_blocks": answer.num_held,
        "host_blocks": answer.num_host,
    }
    return json_response({"success": True, **found})


def package_version() -> str:
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
