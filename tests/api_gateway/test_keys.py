"""Ways around the API keys: what the path looks like decides nothing."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from test_http_errors import raw

from api_gateway.auth import ApiKeys
from shared.config import Settings

KEYS = ["one", "two", "ключ"]


@pytest.mark.parametrize(
    "target",
    [
        "//health",
        "/health/",
        "/health.",
        "/health..",
        "/health;x",
        "/health%2f",
        "/health%2f..%2fmetrics",
        "/health/../metrics",
        "/./metrics",
        "/v1%2fmodels",
        "/v1/models%00",
        "/metrics?/health",
        "/metrics#/health",
        "/HEALTH",
        "/v1/models/../../health",
        "/v1/models/health",
        "/%2e/health",
        "http://x/metrics",
        "http://x//health",
        "*",
    ],
)
@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST", "TRACE", "PURGE"])
async def test_no_path_leads_around_the_keys(serve: Any, method: str, target: str) -> None:
    served = await serve(api_key=KEYS, wait=False)
    status, error = await raw(served, f"{method} {target} HTTP/1.1\r\nHost: health\r\n\r\n".encode())
    assert status in (400, 401)
    assert error["error"]["type"] in ("authentication_error", "invalid_request_error")


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "PURGE"])
async def test_a_probe_is_open_for_its_own_methods_only(serve: Any, method: str) -> None:
    served = await serve(api_key=KEYS, wait=False)
    for path in ("/health", "/ready", "/ping"):
        assert (await raw(served, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))[0] == 401
        async with served.http.request(method, served.url + path, headers={"x-api-key": "two"}) as answer:
            assert answer.status == 405


async def test_each_spelling_of_a_probe_is_the_probe(serve: Any) -> None:
    served = await serve(api_key=KEYS, wait=False)
    for target in ("/ready", "/ready?x=1", "/%72eady", "http://x/ready"):
        assert (await raw(served, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))[0] in (200, 503)


async def test_keys_in_unusual_headers(serve: Any) -> None:
    served = await serve(api_key=KEYS)
    right = ("Authorization: Bearer one", "authorization: bEARER   two ", "X-API-Key: one", "x-api-key: ключ")
    wrong = (
        "Authorization: one",
        "Authorization: Bearer",
        "Authorization: Bearer one two",
        "x-api-key:",
        "Cookie: one",
    )
    for header, status in [(header, 200) for header in right] + [(header, 401) for header in wrong]:
        request = f"GET /version HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode()
        assert (await raw(served, request))[0] == status, header


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest

    def note(given: bytes, kept: bytes) -> bool:
        compared.append((given, kept))
        return compare(given, kept)

    monkeypatch.setattr("api_gateway.auth.hmac.compare_digest", note)
    keys = ApiKeys(KEYS)

    assert keys.tenant_of(make_mocked_request("GET", "/", headers={"x-api-key": "one"}))
    assert len(compared) == len(KEYS)
    assert all(len(given) == len(kept) == 32 for given, kept in compared)
    assert not any(key in str(vars(keys)) for key in KEYS)


@pytest.mark.parametrize("key", ["", " ", "key\n", " key"])
def test_keys_that_nobody_or_everybody_has_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        Settings(api_key=["good", key])
