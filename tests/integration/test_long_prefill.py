"""A prompt of 100,000 tokens on the CPU, under probes: work that takes long is not taken for a stuck process."""

from __future__ import annotations

import random
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tiny_models import TinyModels

NUM_TOKENS, CONTEXT = 100_000, 131_072
STUCK_S, EVERY_S, LIMIT_S = 5.0, 0.2, 1.0


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels, serving: Callable[..., Any]) -> Iterator[Any]:
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = tiny_models.folder("llama", max_position_embeddings=CONTEXT, **shape)
    blocks = f"--num-gpu-blocks-override={2 * CONTEXT // 16}"
    with serving(str(model), "--dtype=float32", "--threads=1", f"--stuck-timeout={STUCK_S}", blocks) as made:
        yield made


@contextmanager
def probing(server: Any) -> Iterator[dict[str, float]]:
    """Probe while the block runs; gives the longest time that each route took. None may fail.

    ``/tokenize`` is no probe, but says whether the tokenizer's loop turns.
    """
    asks: dict[str, Callable[[], Any]] = {
        "/health": lambda: server.get("/health", timeout=LIMIT_S),
        "/ready": lambda: server.get("/ready", timeout=LIMIT_S),
        "/tokenize": lambda: server.post("/tokenize", {"prompt": "The mill"}, timeout=LIMIT_S),
    }
    over, longest, failures = threading.Event(), dict.fromkeys(asks, 0.0), []

    def probe(route: str) -> None:
        while not over.wait(EVERY_S):
            asked = time.monotonic()
            try:
                asks[route]()
            except (urllib.error.URLError, OSError) as error:
                failures.append((route, repr(error)))
            longest[route] = max(longest[route], time.monotonic() - asked)

    threads = [threading.Thread(target=probe, args=(route,)) for route in longest]
    for thread in threads:
        thread.start()
    try:
        yield longest
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


def token_ids() -> list[int]:
    return random.Random(1).choices(range(10, 380), k=NUM_TOKENS)


def text() -> str:
    """As many tokens: each letter is one, and so is each space, since the vocabulary has no part of such words."""
    choose = random.Random(2)
    return " ".join("".join(choose.choices("xqzvjk", k=6)) for _ in range(NUM_TOKENS // 7))


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [token_ids, text], ids=["token ids", "text"])
def test_no_probe_fails_during_a_long_prefill(server: Any, prompt: Callable[[], list[int] | str]) -> None:
    body = {"prompt": prompt(), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with probing(server) as longest:
        began = time.monotonic()
        answer = server.post("/v1/completions", body, timeout=300)
        seconds = time.monotonic() - began
    assert all(longest.values()), "each route was probed"
    assert 0.99 * NUM_TOKENS < answer["usage"]["prompt_tokens"] < CONTEXT
    assert answer["usage"]["completion_tokens"] == 4
    log = server.log.read_text()
    assert "starting it again" not in log
    assert "epoch over" not in log
    print(f"{answer['usage']['prompt_tokens']} tokens in {seconds:.1f} s; probes took at most {longest}")
