"""Probes, version and metrics."""

from __future__ import annotations

import importlib.metadata

from aiohttp import web

from api_gateway.errors import RETRY_AFTER_S
from api_gateway.gateway import GATEWAY
from api_gateway.metrics_page import CONTENT_TYPE, render
from api_gateway.responses import json_response


async def health(_request: web.Request) -> web.Response:
    """``GET /health``: this process is alive."""
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """``GET /ready``: 200 when requests for text would be served, else 503 with the reason."""
    gateway = request.app[GATEWAY]
    reason = gateway.not_ready()
    if reason is None:
        return json_response({"status": "ready"})
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


def package_version() -> str:
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
