"""API keys: every route but the probes is guarded, by what the router resolved and not by what the path looks like."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from aiohttp import web

PUBLIC_ROUTES = frozenset({"health", "ready", "ping"})
"""Names of the routes that need no key. All others do, and so do requests that match no route."""


class ApiKeys:
    """The keys that clients may send, kept as SHA-256 digests. Without keys everything is allowed."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant_of(self, request: web.Request) -> str | None:
        """Who sends this: a name made from the key, "" where no keys are set, None if the key is missing or wrong.

        A key comes as ``Authorization: Bearer KEY`` or as ``x-api-key: KEY``. The time it takes does not depend on
        which key is right or how much of it.
        """
        if not self._digests:
            return ""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex()[:16] if any(matches) else None


def is_public(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return request.match_info.http_exception is None and resource is not None and resource.name in PUBLIC_ROUTES
