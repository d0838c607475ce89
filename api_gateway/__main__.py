"""``python -m api_gateway``: serve the HTTP API in front of running tokenizers."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import ipaddress
import socket

import uvloop
from aiohttp import web

from api_gateway.app import make_app
from api_gateway.gateway import Gateway
from api_gateway.http_server import Runner, bind
from api_gateway.open_files import connections_for
from shared.config import GATEWAY, Settings
from shared.heartbeat import Heartbeat
from shared.lifecycle import install_signal_handlers, run_service
from shared.logging import get_logger

log = get_logger()


def main(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. The port is taken before anything else is done."""
    listening = bind(settings.host, settings.port)
    settings = dataclasses.replace(settings, max_connections=connections_for(settings.max_connections))
    # What exists now lives as long as the process: no collection need look at it again.
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, listening))


async def serve(settings: Settings, listening: socket.socket) -> None:
    """Serve on a bound socket until the process is told to stop; then drain."""
    stop = asyncio.Event()
    install_signal_handlers(stop.set, asyncio.get_running_loop())
    gateway = Gateway(settings)
    await gateway.start()
    runner = Runner(make_app(gateway))
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        log.info("listening", url=url_of(listening), models=gateway.names)
        if not gateway.keys and not ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
            log.warning("everybody who reaches this address is served: there is no --api-key")
        beating = asyncio.create_task(_beat())
        announcing = asyncio.create_task(_announce(gateway, url_of(listening)))
        await stop.wait()
        log.info("stopping")
        await gateway.drain(settings.shutdown_timeout)
        for task in (beating, announcing):
            task.cancel()
    finally:
        await runner.cleanup()
        await gateway.stop()


def url_of(listening: socket.socket) -> str:
    """How to reach a listening socket from this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


async def _beat() -> None:
    heartbeat = Heartbeat()
    while True:
        heartbeat.beat()
        await asyncio.sleep(0.5)


async def _announce(gateway: Gateway, url: str) -> None:
    """Say what the server is waiting for, then how to use it."""
    said = None
    while (reason := gateway.not_ready()) is not None:
        if reason != said:
            log.info("not ready", reason=reason)
            said = reason
        await asyncio.sleep(0.2)
    body = f'{{"model": "{gateway.names[0]}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    key = " -H 'Authorization: Bearer YOUR-API-KEY'" if gateway.keys else ""
    command = f"curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    # Within the event's own text, where no quote is escaped, so that it can be copied.
    log.info(f"ready; try: {command}", url=url)


if __name__ == "__main__":
    run_service(GATEWAY, main, "HTTP API of Headrace")
