"""Error objects everywhere, limits, keys: what a client may send that it should not."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest
from fake_tokenizer import until

HELLO: Any = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}


def check_error(status: int, body: Any) -> None:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert 0 < len(error["message"]) < 1100
    for leak in ("Traceback", 'File "', "0x", "/home", "/root"):
        assert leak not in error["message"]


async def serves(served: Any) -> None:
    status, answer, _ = await served.post("/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})
    assert (status, answer["choices"][0]["text"]) == (200, "0:0 ")


async def raw(served: Any, data: bytes) -> tuple[int, Any]:
    """Send bytes as they are; (status, JSON body)."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        body = await asyncio.wait_for(reader.readexactly(length), 30)
    finally:
        writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"null", 400, None),
        (b"123", 400, None),
        (b'"s"', 400, None),
        (b'{"messages":5}', 400, "messages"),
        (b'{"messages":[]}', 400, "messages"),
        (b'{"messages":[null]}', 400, "messages"),
        (b'{"messages":[{"role":"user","content":"x"}],"tools":1}', 400, "tools"),
        (b'{"messages":[{"role":"user","content":"x"}],"stop":5}', 400, "stop"),
        (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":"many"}', 400, "max_tokens"),
        (b'{"messages":[{"role":"user","content":"x"}],"stream":"yes"}', 400, "stream"),
        (b'{"messages":[{"role":"user","content":"x"}],"n":0}', 400, "n"),
        (b'{"messages":[{"role":"user","content":"x"}],"n":1000000000}', 400, "n"),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, None),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, None),
        (b'{"messages":[{"role":"user","content":"x"}],"model":"nope"}', 404, "model"),
        (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":513}', 400, "max_tokens"),
        (b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400, None),
        (b'{"messages":[{"role":"user","content":"x"}],"n":' + b"9" * 5000 + b"}", 400, None),
        (b"x" * 5_000_000, 413, None),
    ],
)
async def test_malformed_bodies(served: Any, body: bytes, status: int, param: str | None) -> None:
    async with served.http.post(served.url + "/v1/chat/completions", data=io.BytesIO(body), headers=JSON) as answer:
        error = await answer.json()
        assert answer.status == status
    check_error(status, error)
    if param is not None:
        assert error["error"]["param"] == param
    await serves(served)


async def test_nulls_unknown_fields_duplicates_and_control_characters_pass(served: Any) -> None:
    body = (
        b'{"messages":[{"role":"user","content":"a\\u0000b"}],"temperature":null,"n":2,"n":1,"max_tokens":2,"zz\\n":1}'
    )
    async with served.http.post(served.url + "/v1/chat/completions", data=body, headers=JSON) as answer:
        assert answer.status == 200
        assert answer.headers["x-ignored-fields"] == "zz%0A"
        assert len((await answer.json())["choices"]) == 1


async def test_chunked_upload_beyond_the_limit(serve: Any) -> None:
    served = await serve(max_body_bytes=100_000)

    async def parts() -> Any:
        for _ in range(50):
            yield b" " * 10_000

    async with served.http.post(served.url + "/v1/completions", data=parts(), headers=JSON) as answer:
        assert answer.status == 413
        check_error(413, await answer.json())
    await serves(served)


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}, {**JSON, "Content-Encoding": "gzip"}])
async def test_content_types(served: Any, headers: dict[str, str]) -> None:
    options: Any = {"headers": headers, "skip_auto_headers": ["Content-Type"]}
    async with served.http.post(served.url + "/v1/completions", data=b"{}", **options) as answer:
        assert answer.status == 415
        check_error(415, await answer.json())


async def test_unknown_routes_and_methods(served: Any) -> None:
    for path in ("/", "/v1", "/v1/nothing", "//v1/models", "/v1/models/", "/V1/models", "/v1/completions/"):
        status, body, _ = await served.post(path, {})
        assert status in (404, 405)
        check_error(status, body)
    async with served.http.get(served.url + "/v1/completions") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        check_error(405, await answer.json())


async def test_what_is_not_http(served: Any) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 1000 + b"\r\n",
    ):
        status, body = await raw(served, data)
        assert 400 <= status < 500
        check_error(status, body)
    await serves(served)


async def test_request_ids(served: Any) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    _, answer, headers = await served.post("/v1/completions", body, headers={"X-Request-Id": "mine"})
    assert (headers["X-Request-Id"], answer["id"]) == ("mine", "cmpl-mine")
    _, answer, headers = await served.post("/v1/completions", {**body, "request_id": "other"})
    assert (headers["X-Request-Id"], answer["id"]) == ("other", "cmpl-other")
    _, first, headers = await served.post("/v1/completions", body)
    assert first["id"] == "cmpl-" + headers["X-Request-Id"]
    status, error, _ = await served.post("/v1/completions", body, headers={"X-Request-Id": "x" * 5000})
    assert (status, error["error"]["param"]) == (400, "X-Request-Id")
    same = [served.post("/v1/completions", {**body, "max_tokens": n, "request_id": "same"}) for n in (3, 5)]
    answers = [answer for _, answer, _ in await asyncio.gather(*same)]
    assert [a["usage"]["completion_tokens"] for a in answers] == [3, 5]
    assert len({request.rid for request in served.tokenizer.requests}) == 5


async def test_keys_are_needed_on_every_route(serve: Any) -> None:
    served = await serve(api_key=["one", "two"])
    public = set()
    routes = [(route.method, route.resource.canonical) for route in served.gateway_routes()]
    assert len(routes) >= 12
    for method, path in [*routes, ("GET", "/nothing"), ("GET", "//v1/models"), ("GET", "/V1/MODELS")]:
        path = path.replace("{id}", "demo")
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}, {"x-api-key": "x"}):
            async with served.http.request(method, served.url + path, headers=headers) as answer:
                if answer.status != 401:
                    public.add(path)
                    continue
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                if method != "HEAD":
                    check_error(401, await answer.json())
        for headers in ({"Authorization": "Bearer one"}, {"Authorization": "bearer two"}, {"x-api-key": "two"}):
            async with served.http.request(method, served.url + path, headers=headers) as answer:
                assert answer.status != 401
    assert public == {"/health", "/ready", "/ping"}
    spoofed = b"GET /v1/models HTTP/1.1\r\nHost: x/health?\r\n\r\n"
    assert (await raw(served, spoofed))[0] in (400, 401)


async def test_each_key_has_prefixes_of_its_own(serve: Any) -> None:
    served = await serve(api_key=["one", "two"])
    for key in ("one", "two", "one"):
        body = {"prompt": "x", "max_tokens": 1, "cache_salt": "s"}
        await served.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
    specs = [request.spec for request in served.tokenizer.requests]
    assert specs[0].tenant == specs[2].tenant != specs[1].tenant
    assert specs[0].cache_salt == specs[2].cache_salt != specs[1].cache_salt
    assert "one" not in specs[0].tenant


async def test_keys_share_prefixes_where_they_are_told_to(serve: Any) -> None:
    served = await serve(api_key=["one", "two"], prefix_cache_isolation=False)
    for key, salt in (
        ("one", {}),
        ("two", {"cache_salt": ""}),
        ("two", {"cache_salt": "s"}),
        ("one", {"cache_salt": "s"}),
    ):
        body = {"prompt": "x", "max_tokens": 1, **salt}
        await served.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
    specs = [request.spec for request in served.tokenizer.requests]
    assert [spec.cache_salt for spec in specs] == ["", "", "s", "s"]
    assert specs[0].tenant == specs[3].tenant != specs[1].tenant == specs[2].tenant


@pytest.mark.parametrize("keys", [[], ["one"]])
async def test_an_empty_salt_is_none(serve: Any, keys: list[str]) -> None:
    served = await serve(api_key=keys)
    headers = {"Authorization": "Bearer one"} if keys else {}
    for salt in ({}, {"cache_salt": ""}, {"cache_salt": None}):
        await served.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **salt}, headers=headers)
    first, *others = [request.spec.cache_salt for request in served.tokenizer.requests]
    assert others == [first, first]


async def test_a_full_gateway_refuses(serve: Any) -> None:
    served = await serve(max_connections=2)
    held = [asyncio.create_task(served.post("/v1/completions", {"prompt": "hold"})) for _ in range(2)]
    while len(served.tokenizer.requests) < 2:
        await asyncio.sleep(0.01)
    status, error, headers = await served.post("/v1/completions", {"prompt": "x"})
    assert (status, headers["Retry-After"]) == (429, "1")
    check_error(429, error)
    assert (await served.get("/health"))[0] == 200
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    while served.gateway.admission.active:
        await asyncio.sleep(0.01)
    await serves(served)
    assert await served.metric("headrace:gateway_rejections_total") == 1


async def test_not_ready(serve: Any) -> None:
    served = await serve(wait=False)
    served.tokenizer.ready = False
    await until(lambda: served.gateway.not_ready() == "loading weights")
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        status, error, headers = await served.post(path, body)
        assert (status, headers["Retry-After"]) == (503, "1")
        check_error(503, error)
    status, text, headers = await served.get("/ready")
    assert (status, json.loads(text)) == (503, {"status": "loading weights"})
    assert (await served.get("/ping"))[0] == 503
    assert (await served.get("/health"))[0] == 200
    served.tokenizer.ready = True
    while (await served.get("/ready"))[0] != 200:
        await asyncio.sleep(0.02)
    await serves(served)


async def test_a_tokenizer_that_falls_silent_is_not_ready(served: Any) -> None:
    await served.tokenizer.stop()
    async with asyncio.timeout(30):
        while (await served.get("/ready"))[0] == 200:
            await asyncio.sleep(0.02)
    assert "waiting for a tokenizer" in (await served.get("/ready"))[1]


async def test_tokenize_and_detokenize(served: Any) -> None:
    status, answer, _ = await served.post("/tokenize", {"model": "demo", "prompt": "x", "return_token_strs": True})
    assert status == 200
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [1, 2, 3], "token_strs": ["a", "b", "c"]}
    _, answer, _ = await served.post("/tokenize", {"messages": HELLO})
    assert (answer["tokens"], answer["token_strs"]) == ([1, 2, 3], None)
    assert (await served.post("/detokenize", {"tokens": [4, 5]}))[1] == {"prompt": "4 5"}
    status, error, _ = await served.post("/tokenize", {"prompt": "reject"})
    assert (status, error["error"]["param"]) == (400, "prompt")
    assert (await served.post("/detokenize", {"tokens": [1000]}))[0] == 400


async def test_a_lost_call_is_asked_again(served: Any) -> None:
    status, answer, _ = await served.post("/tokenize", {"prompt": "lose"})
    assert (status, answer["count"]) == (200, 3)
    assert len(served.tokenizer.calls) >= 2


async def test_probes_and_version(served: Any) -> None:
    assert (await served.get("/health"))[:2] == (200, "")
    assert json.loads((await served.get("/ready"))[1]) == {"status": "ready"}
    assert (await served.post("/ping", None))[0] == 200
    assert set(json.loads((await served.get("/version"))[1])) == {"version"}
    for path in ("/health", "/ready", "/ping", "/version", "/metrics", "/v1/models"):
        async with served.http.head(served.url + path) as answer:
            assert answer.status == 200
            assert await answer.read() == b""


async def test_served_model_names(serve: Any) -> None:
    served = await serve(model="/models/x", served_model_name=["a", "b/c"])
    listed = json.loads((await served.get("/v1/models"))[1])["data"]
    assert [model["id"] for model in listed] == ["a", "b/c"]
    assert "/models/x" not in json.dumps(listed)
    assert (await served.get("/v1/models/b/c"))[0] == 200
    for name in ("a", "b/c", None):
        _, answer, _ = await served.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
        assert answer["model"] == (name or "a")
    assert (await served.post("/v1/completions", {"model": "/models/x", "prompt": "x"}))[0] == 404


async def test_a_body_that_does_not_arrive(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api_gateway.body.BODY_LIMIT_S", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
    status, body = await raw(served, head)
    assert status == 408
    check_error(408, body)


async def test_keep_alive_serves_the_next_request_after_a_refusal(served: Any) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for body, status in ((b"{", 400), (b'{"prompt":"x","max_tokens":1}', 200)) * 3:
            async with session.post(served.url + "/v1/completions", data=body, headers=JSON) as answer:
                assert answer.status == status
                await answer.read()
