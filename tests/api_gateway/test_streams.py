"""Streams under stress: readers that leave, readers that dawdle, many at once; and the metrics that they leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fake_tokenizer import until
from prometheus_client.parser import text_string_to_metric_families

from shared.messages import Load

HELD = {"role": "user", "content": "held"}


def request_bytes(body: Any, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(served: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), **options)


def events(data: bytes) -> list[Any]:
    """The events of a whole stream."""
    lines = data.decode().split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["silent", "hold", "endless"])
async def test_a_client_that_hangs_up_ends_its_request(served: Any, stream: bool, prompt: str) -> None:
    _, writer = await connect(served)
    writer.write(request_bytes({"prompt": [prompt, prompt], "n": 2, "max_tokens": 500, "stream": stream}))
    await until(lambda: len(served.tokenizer.requests) == 2)
    if prompt == "endless":
        await until(lambda: len(served.tokenizer.requests[0].logs[1].ids) > 5)
    writer.close()
    await until(lambda: len(served.tokenizer.ended) == 2)
    assert served.tokenizer.running == 0
    assert served.gateway.admission.active == 0
    assert not served.gateway.links.parent.requests
    assert not served.gateway.generations
    counted = 'http_requests_total{handler="/v1/completions",method="POST",status="499"}'
    assert await served.metric(counted) == 1


async def test_a_slow_reader_gets_merged_chunks_and_holds_up_nobody(served: Any) -> None:
    reader, writer = await connect(served, limit=1024)
    writer.write(request_bytes({"prompt": "huge", "n": 60, "max_tokens": 200, "stream": True}))
    await until(lambda: served.tokenizer.requests)
    status, _, _ = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
    assert status == 200
    await until(lambda: served.tokenizer.running == 0, 60)
    buffered = max(transport.get_write_buffer_size() for transport in served.gateway_transports())
    assert 0 < buffered < 1_000_000
    data = await asyncio.wait_for(_body(reader), 60)
    writer.close()
    texts = dict.fromkeys(range(60), 0)
    reasons = dict.fromkeys(range(60), 0)
    chunks = events(data)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += len(choice["text"])
            reasons[choice["index"]] += choice["finish_reason"] is not None
    assert texts == dict.fromkeys(range(60), 200_000)
    assert reasons == dict.fromkeys(range(60), 1)
    assert len(chunks) < 60 * 200


async def _body(reader: asyncio.StreamReader) -> bytes:
    """The body of a chunked response."""
    await reader.readuntil(b"\r\n\r\n")
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts)


async def test_a_reader_that_takes_nothing_is_cut_off(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api_gateway.event_stream.STALL_LIMIT_S", 0.3)
    _, writer = await connect(served, limit=1024)
    writer.write(request_bytes({"prompt": "huge burst", "n": 60, "max_tokens": 300, "stream": True}))
    await until(lambda: served.gateway.admission.active == 1)
    await until(lambda: served.gateway.admission.active == 0)
    writer.close()


async def test_headers_of_a_stream(served: Any) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True, "surprise": 1, "request_id": "mine"}
    async with served.http.post(served.url + "/v1/completions", json=body) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["X-Request-Id"] == "mine"
        assert answer.headers["x-ignored-fields"] == "surprise"
        assert "".join(e["choices"][0]["text"] for e in events(await answer.read())) == "0:0 0:1 "


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
async def test_tokens_that_release_no_text(served: Any, kind: str) -> None:
    body: dict[str, Any] = {"prompt": "held"} if kind == "completions" else {"messages": [HELD]}
    text = ""
    async with served.http.post(f"{served.url}/v1/{kind}", json={**body, "max_tokens": 8, "stream": True}) as answer:
        for chunk in events(await answer.read()):
            choice = chunk["choices"][0]
            text += choice["text"] if kind == "completions" else choice["delta"].get("content", "")
    assert text == "0:2 0:5 last"
    _, answer, _ = await served.post(f"/v1/{kind}", {**body, "max_tokens": 8})
    choice = answer["choices"][0]
    assert (choice["text"] if kind == "completions" else choice["message"]["content"]) == text


async def test_headers_wait_for_the_engine(served: Any) -> None:
    reader, writer = await connect(served)
    writer.write(request_bytes({"prompt": "hold", "stream": True}))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert head.startswith(b"HTTP/1.1 200")
    writer.close()
    reader, writer = await connect(served)
    writer.write(request_bytes({"prompt": "silent", "stream": True}))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.3)
    writer.close()


async def test_http_1_0_gets_a_plain_stream(served: Any) -> None:
    reader, writer = await connect(served)
    writer.write(request_bytes({"prompt": "x", "max_tokens": 3, "stream": True}, version="1.0"))
    data = await asyncio.wait_for(reader.read(), 30)
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert "".join(e["choices"][0]["text"] for e in events(body)) == "0:0 0:1 0:2 "
    writer.close()


async def test_a_connection_serves_one_stream_after_another(served: Any) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        connections = set()
        for count in (1, 7, 3):
            body = {"prompt": "x", "max_tokens": count, "stream": True}
            async with session.post(served.url + "/v1/completions", json=body) as answer:
                connections.update(served.gateway_transports())
                chunks = events(await answer.read())
            assert sum(len(e["choices"][0]["text"]) for e in chunks) == 4 * count
        assert len(connections) == 1


async def test_an_error_after_the_headers_is_an_event(served: Any) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": ["break", "endless"]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "break"}]}),
    ]
    for kind, body in bodies:
        body |= {"max_tokens": 400, "stream": True, "stream_options": {"include_usage": True}}
        async with served.http.post(f"{served.url}/v1/{kind}", json=body) as answer:
            assert answer.status == 200
            chunks = events(await answer.read())
        assert chunks[-1]["error"]["code"] == 500
        assert "the engine broke" in chunks[-1]["error"]["message"]
        assert all(c["finish_reason"] is None for chunk in chunks[:-1] for c in chunk["choices"])
    await until(lambda: served.tokenizer.running == 0)


async def test_200_streams_at_once(serve: Any) -> None:
    served = await serve()

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10 + number % 7, "stream": True}
        async with session.post(served.url + "/v1/chat/completions", json=body) as answer:
            chunks = events(await answer.read())
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == "".join(f"0:{k} " for k in range(10 + number % 7))
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, number) for number in range(200)))
    await until(lambda: not served.tokenizer.child.requests)
    assert not served.gateway.links.parent.requests
    assert await served.metric("headrace:gateway_requests_active") == 0
    assert await served.metric("vllm:time_to_first_token_seconds_count") == 200
    assert await served.metric("vllm:e2e_request_latency_seconds_count") == 200
    assert await served.metric("vllm:request_time_per_output_token_seconds_count") == 200
    tokens = sum(10 + number % 7 for number in range(200))
    assert await served.metric("vllm:inter_token_latency_seconds_count") == tokens - 200


async def test_metrics_page(served: Any) -> None:
    await served.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    samples: list[Any] = [
        ("vllm:prompt_tokens_total", {}, 12.0),
        ("vllm:request_success_total", {"finished_reason": "stop"}, 3.0),
        ("vllm:iteration_tokens_total_bucket", {"le": "1.0"}, 1.0),
        ("vllm:iteration_tokens_total_bucket", {"le": "+Inf"}, 2.0),
        ("vllm:iteration_tokens_total_sum", {}, 9.5),
        ("vllm:iteration_tokens_total_count", {}, 2.0),
        ("vllm:num_requests_running", {}, 99.0),
    ]
    served.tokenizer.report(Load("engine/e1", 5, 3, 4, 0.25, samples))
    await until(lambda: list(served.gateway.links.loads()))
    _, page, headers = await served.get("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert page.count("# TYPE") == len(families) == page.count("# HELP")

    def value(name: str, sample: str, **labels: str) -> float:
        found = [s.value for s in families[name].samples if s.name == sample and labels.items() <= s.labels.items()]
        assert len(found) == 1
        return float(found[0])

    engine = {"model_name": "demo", "engine": "e1"}
    assert value("vllm:num_requests_running", "vllm:num_requests_running", **engine) == 3
    assert value("vllm:num_requests_waiting", "vllm:num_requests_waiting", **engine) == 4
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        assert value(name, name, **engine) == 0.25
    assert families["vllm:prompt_tokens"].type == "counter"
    assert families["vllm:iteration_tokens_total"].type == "histogram"
    assert value("vllm:iteration_tokens_total", "vllm:iteration_tokens_total_sum", **engine) == 9.5
    assert value("vllm:time_to_first_token_seconds", "vllm:time_to_first_token_seconds_count") == 2
    assert value("vllm:inter_token_latency_seconds", "vllm:inter_token_latency_seconds_count") == 8
    assert value("vllm:request_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds_count") == 4
    assert value("http_requests", "http_requests_total", handler="/v1/completions", status="200") == 1
    served.tokenizer.report(Load("engine/e1", 5, 0, 0, 0.0, samples))
    await until(lambda: next(served.gateway.links.loads())[0].running == 0)
    assert await served.metric("vllm:num_requests_running{") == 0


async def test_gauges_of_a_silent_engine_are_zero_or_gone(served: Any) -> None:
    worker = {"replica": "w1"}
    samples = [("headrace:replica_requests_running", worker, 2.0), ("headrace:replica_steps_total", worker, 7.0)]
    served.tokenizer.report(Load("engine/e1", 5, 3, 4, 0.25, samples))
    await until(lambda: list(served.gateway.links.loads()))
    assert await served.metric("vllm:num_requests_running") == 3
    assert await served.metric("headrace:replica_requests_running") == 2
    served.tokenizer.loads.clear()
    await until(lambda: not any(fresh for _, fresh in served.gateway.links.loads()))
    assert await served.metric("vllm:num_requests_running") == 0
    assert await served.metric("vllm:kv_cache_usage_perc") == 0
    assert await served.metric("headrace:replica_steps_total") == 7
    assert "headrace:replica_requests_running" not in (await served.get("/metrics"))[1]


async def test_draining_lets_requests_finish(served: Any) -> None:
    running = asyncio.create_task(_read(served, {"prompt": "x", "max_tokens": 100, "stream": True}))
    await until(lambda: len(served.tokenizer.requests) == 1)
    draining = asyncio.create_task(served.gateway.drain(60.0))
    await until(lambda: served.gateway.admission.draining)
    assert (await served.get("/ready"))[0] == 503
    assert (await served.get("/health"))[0] == 200
    assert (await served.post("/v1/completions", {"prompt": "x"}))[0] == 503
    await draining
    assert events(await running)[-1]["choices"][0]["finish_reason"] == "length"


async def test_draining_ends_requests_that_do_not_finish(served: Any) -> None:
    begun = asyncio.Event()
    stuck = asyncio.create_task(_read(served, {"prompt": "hold", "stream": True}, begun))
    whole = asyncio.create_task(served.post("/v1/completions", {"prompt": "hold"}))
    await until(lambda: len(served.tokenizer.requests) == 2)
    await asyncio.wait_for(begun.wait(), 30)
    await served.gateway.drain(0.3)
    assert events(await stuck)[-1]["error"]["code"] == 503
    assert (await whole)[0] == 503
    await until(lambda: served.tokenizer.running == 0)


async def _read(served: Any, body: Any, begun: asyncio.Event | None = None) -> bytes:
    async with served.http.post(served.url + "/v1/completions", json=body) as answer:
        if begun is not None:
            begun.set()
        data: bytes = await answer.read()
        return data
