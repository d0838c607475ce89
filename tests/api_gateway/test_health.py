"""What the probes say when nothing gets on."""

from __future__ import annotations

import json
from typing import Any

from fake_tokenizer import until

from shared.messages import Load


async def test_work_without_progress_fails_the_probes(serve: Any) -> None:
    served = await serve(step_timeout_s=1.0)

    async def report(stalled_s: float, engine: str = "e1") -> tuple[int, int, int]:
        """The statuses of /health, /ready and a request."""
        source = f"engine/{engine}"
        served.tokenizer.report(Load(source, 5, 3, 4, 0.25, [], stalled_s))
        loads = served.gateway.links.loads
        await until(lambda: (source, stalled_s) in [(load.source, load.stalled_s) for load, _ in loads()])
        request, _, _ = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        return (await served.get("/health"))[0], (await served.get("/ready"))[0], request

    assert await report(0.0) == (200, 200, 200)
    assert await report(1.5) == (200, 200, 200)
    assert await report(7.0) == (503, 503, 503)
    for path in ("/health", "/ready", "/ping"):
        status, text, headers = await served.get(path)
        words = "stuck: there is work, but no step was settled for 7 s"
        assert (status, json.loads(text), "Retry-After" in headers) == (503, {"status": words}, True)
    assert await served.metric('headrace:engine_stalled_seconds{engine="e1"') == 7
    assert await report(0.2, "e2") == (200, 200, 200)
    assert await report(9.0, "e2") == (503, 503, 503)
    assert await report(0.0) == (200, 200, 200)


async def test_an_absent_engine_is_no_reason_to_end_the_gateway(serve: Any) -> None:
    served = await serve(step_timeout_s=1.0)
    served.tokenizer.report(Load("engine/e1", 5, 3, 4, 0.25, [], 9.0))
    await until(lambda: served.gateway.stuck())
    served.tokenizer.ready = False
    served.tokenizer.loads.clear()
    await until(lambda: not served.gateway.stuck())
    await until(lambda: served.gateway.not_ready() == "loading weights")
    assert (await served.get("/health"))[0] == 200
    assert (await served.get("/ready"))[0] == 503
