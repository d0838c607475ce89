"""On whose account a request is, over HTTP: the field ``user`` where no keys are set, else the key alone."""

from __future__ import annotations

from typing import Any

import pytest

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}


async def tenant_of(served: Any, path: str, key: str | None = None, **fields: Any) -> str:
    """Which tenant the tokenizer is told."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    before = len(served.tokenizer.requests)
    status, answer, got = await served.post(path, PATHS[path] | fields, headers=headers)
    assert status == 200, answer
    assert "x-ignored-fields" not in got
    (request,) = served.tokenizer.requests[before:]
    tenant: str = request.spec.tenant
    return tenant


@pytest.mark.parametrize("path", PATHS)
async def test_without_keys_a_user_is_a_tenant(served: Any, path: str) -> None:
    mine = await tenant_of(served, path, user="me@example.com")
    assert mine.startswith("user-")
    assert "example" not in mine, "names of people go no further than the gateway"
    assert await tenant_of(served, path, user="me@example.com") == mine
    assert await tenant_of(served, path, user="you@example.com") != mine
    for nobody in ({}, {"user": None}, {"user": ""}, {"user": 5}, {"user": {"name": "me@example.com"}}):
        assert await tenant_of(served, path, **nobody) == ""


async def test_endpoints_agree_about_who_it_is(served: Any) -> None:
    assert len({await tenant_of(served, path, user="me") for path in PATHS}) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_with_keys_the_key_counts_alone(serve: Any, path: str) -> None:
    served = await serve(api_key=["one", "two"])
    one = await tenant_of(served, path, "one")
    assert one != ""
    for user in ("me", "you", "", None):
        assert await tenant_of(served, path, "one", user=user) == one
    assert await tenant_of(served, path, "two", user="me") != one


async def test_users_share_prefixes(served: Any) -> None:
    """A user is a share of the time, not a wall: only a salt or a key keeps prefixes apart."""
    for user in ("me", "you"):
        await tenant_of(served, "/v1/completions", user=user)
    assert {request.spec.cache_salt for request in served.tokenizer.requests} == {""}
