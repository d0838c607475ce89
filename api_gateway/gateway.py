"""The gateway's parts in one place, as the routes use them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from aiohttp import web

from api_gateway.admission import Admission
from api_gateway.auth import ApiKeys
from api_gateway.exchange import MAX_NAME, MAX_NAMED
from api_gateway.generation import Generation
from api_gateway.http_metrics import HttpMetrics
from api_gateway.latency import Latency
from api_gateway.limits import Limits
from api_gateway.tokenizer_link import TokenizerLinks
from shared.config import Settings
from shared.errors import ErrorCode, RequestError
from shared.logging import get_logger
from shared.messages import ErrorInfo

STUCK_BEATS = 5
"""An engine whose worker is stuck has given it up by itself so many beats later."""
DRAIN_ERROR_S = 2.0
"""Time for the last error events to go out."""
MAX_LOGGED_NAMES = 1000

log = get_logger()


class Gateway:
    """State of this process that routes share. Made in the event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.names = settings.served_model_name or [settings.model]
        self.created = int(time.time())
        self.keys = ApiKeys(settings.api_key)
        self.admission = Admission(settings.max_connections)
        self.latency = Latency()
        self.http = HttpMetrics()
        self.links = TokenizerLinks(settings)
        self.generations: set[Generation] = set()
        self.overdue = 0
        """Requests that were ended by their ``timeout``."""
        self._logged_names: set[str] = set()

    @property
    def limits(self) -> Limits:
        """What requests are checked against, by what is known now."""
        card = self.links.card
        bounds = [n for n in (self.settings.max_model_len, card.max_model_len if card else None) if n is not None]
        return Limits(self.names, card, min(bounds, default=None), self.settings.max_output_tokens)

    def not_ready(self) -> str | None:
        """Why no request for text can be served now; None: it can."""
        if self.admission.draining:
            return "the server is shutting down"
        return self.stuck() or self.links.not_ready()

    def stuck(self) -> str | None:
        """Why nothing gets on although there is work and a worker for it, in words; None: something does."""
        loads = [load for load, is_fresh in self.links.loads() if is_fresh and load.source.startswith("engine/")]
        stalled_s = min((load.stalled_s for load in loads), default=0.0)
        if stalled_s <= self.settings.step_timeout_s + STUCK_BEATS * self.settings.beat_s:
            return None
        return f"stuck: there is work, but no step was settled for {stalled_s:.0f} s"

    def retry_after_s(self) -> int:
        """When a request that is refused now may be tried again: once those that wait will have ended."""
        waiting = sum(load.waiting for load, is_fresh in self.links.loads() if is_fresh)
        # Engines serve other gateways too, and the rate is of this one.
        return self.admission.departures.wait_s(max(min(waiting, self.admission.active), 1))

    def require_ready(self) -> None:
        """Raises RequestError (503) with what the server is doing."""
        reason = self.not_ready()
        if reason is not None:
            raise RequestError(f"not ready: {reason}", code=ErrorCode.UNAVAILABLE)

    def log_ignored(self, names: list[str]) -> None:
        """Log unknown fields, each name once."""
        fresh = [name for name in (name[:MAX_NAME] for name in names[:MAX_NAMED]) if name not in self._logged_names]
        if fresh and len(self._logged_names) < MAX_LOGGED_NAMES:
            self._logged_names.update(fresh)
            log.warning("unknown fields are ignored", fields=fresh)

    @contextlib.contextmanager
    def tracking(self, generation: Generation) -> Iterator[None]:
        """Know of ``generation`` while it is served, and log how it went."""
        self.generations.add(generation)
        try:
            yield
        finally:
            self.generations.discard(generation)
            log.info("request ended", id=generation.completion_id, **generation.summary())

    def abandon(self, generation: Generation) -> None:
        """Abort a request whose time is over, even while its handler still waits for a slow reader."""
        self.overdue += 1
        for prompt in generation.prompts:
            if prompt.request.context[0] is generation:
                self.links.parent.close(prompt.request)
        self.links.parent.flush()

    async def start(self) -> None:
        await self.links.start()

    async def drain(self, limit_s: float) -> None:
        """Take no new requests; let the running ones finish for ``limit_s`` seconds, then end them with an error."""
        self.admission.draining = True
        if self.admission.active:
            log.info("waiting for running requests", running=self.admission.active, limit_s=limit_s)
        if await self.admission.drained(limit_s):
            return
        log.warning("ending requests that are still running", running=self.admission.active)
        error = ErrorInfo(ErrorCode.UNAVAILABLE, "the server is shutting down")
        for generation in list(self.generations):
            generation.fail(error)
            generation.flush()
        await self.admission.drained(DRAIN_ERROR_S)

    async def stop(self) -> None:
        await self.links.stop()


GATEWAY = web.AppKey("gateway", Gateway)
