"""Priorities, ageing and the cap on outputs over HTTP: a server with one seat and a small KV cache."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from typing import Any

import pytest

from tests.integration.streams import CHAT, COMPLETIONS, both, refusal

CAP = 32
BLOCKS, BLOCK_SIZE, CONTEXT = 16, 16, 512
CAPACITY = (BLOCKS - 1) * BLOCK_SIZE
AGEING_S = 1.0


@pytest.fixture(scope="module")
def server(start: Any) -> Any:
    flags = {
        "--scheduling-policy": "priority",
        "--priority-ageing-s": AGEING_S,
        "--max-num-seqs": 1,
        "--max-model-len": CONTEXT,
        "--max-output-tokens": CAP,
        "--num-gpu-blocks-override": BLOCKS,
    }
    return start("demo", "--batch-invariant", *(str(each) for flag in flags.items() for each in flag))


def some_ids(length: int, salt: int = 0) -> list[int]:
    return [(37 * index + 11 * salt + 5) % 3000 + 20 for index in range(length)]


def ask(server: Any, salt: int, max_tokens: int, **fields: Any) -> tuple[list[int], float]:
    """The ids of a greedy completion, and when it was done."""
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": max_tokens}
    answer = server.post(COMPLETIONS, {"prompt": some_ids(12, salt), **body, **fields})
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids, time.monotonic()


# -- priority ----------------------------------------------------------------------------------------------------------


def test_a_high_priority_overtakes_and_nobody_loses_a_token(server: Any) -> None:
    """One of low priority runs, two wait: who comes last is done first, and all say what they say alone."""
    alone = [ask(server, salt, CAP)[0] for salt in range(3)]
    alone_high, _ = ask(server, 9, 8)
    before = server.gauge("headrace:priority_preemptions_total")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        lows = [pool.submit(ask, server, salt, CAP, priority=1000) for salt in range(3)]
        while server.gauge("vllm:num_requests_waiting") < 2:
            assert not all(low.done() for low in lows)
            time.sleep(0.01)
        high, high_done = pool.submit(ask, server, 9, 8, priority=-5).result()
        found = [low.result() for low in lows]
    assert high == alone_high
    assert [ids for ids, _ in found] == alone
    assert sum(high_done < done for _, done in found) >= 2
    assert server.gauge("headrace:priority_preemptions_total") > before
    server.wait_idle(10)


def test_the_lowest_priority_is_done_while_higher_ones_keep_coming(server: Any) -> None:
    """It yields to what comes within three seconds; then it is its turn, though there is always somebody waiting."""
    over = threading.Event()
    done: list[float] = []
    salts = itertools.count(20)

    def flood() -> None:
        while not over.is_set():
            done.append(ask(server, next(salts), 4)[1])

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        first = pool.submit(ask, server, 10, CAP)
        flooding = [pool.submit(flood) for _ in range(3)]
        began = time.monotonic()
        try:
            _, low_done = pool.submit(ask, server, 11, 8, priority=3).result(timeout=90)
            while done[-1] <= low_done:
                time.sleep(0.01)
        finally:
            over.set()
        first.result()
        for each in flooding:
            each.result()
    assert sum(at < low_done for at in done) >= 1, "nobody was served before it"
    assert low_done - began < 60


def test_what_waits_is_on_the_metrics_page(server: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(ask, server, salt, CAP) for salt in range(3)]
        name = "headrace:num_requests_waiting_by_reason{engine="
        seen: set[str] = set()
        while not all(each.done() for each in running):
            lines = [line for line in server.get("/metrics").splitlines() if line.startswith(name)]
            seen |= {line.partition('reason="')[2].partition('"')[0] for line in lines if not line.endswith(" 0.0")}
            time.sleep(0.02)
    assert seen <= {"seats", "next_step"}
    assert seen
    assert len(lines) >= 10


# -- the cap on outputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [CAP + 1, 400, 10 * CONTEXT, None])
def test_an_output_ends_at_the_cap(server: Any, asked: int | None) -> None:
    message = {"messages": [{"role": "user", "content": "count"}], "ignore_eos": True, "max_tokens": asked}
    whole, stream = both(server, CHAT, {**message, "temperature": 0})
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == CAP
    assert stream.finish == {0: "length"}
    if asked is not None:
        ids, _ = ask(server, 1, asked)
        assert len(ids) == CAP
        assert ids[:5] == ask(server, 1, 5)[0], "fewer are as many as were asked for"


def test_each_choice_has_the_cap_for_itself(server: Any) -> None:
    body = {"prompt": some_ids(20), "n": 3, "seed": 1, "max_tokens": 300, "ignore_eos": True}
    answer = server.post(COMPLETIONS, body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert answer["usage"]["completion_tokens"] == 3 * CAP


# -- what can never fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    ("length", "max_tokens", "param", "number"),
    [
        (CONTEXT, 1, "prompt", CONTEXT),
        (CONTEXT + 90, 1, "prompt", CONTEXT),
        (CONTEXT - CAP + 1, CONTEXT, "max_tokens", CONTEXT),
        (CONTEXT - 10, 20, "max_tokens", CONTEXT),
        (CAPACITY, 1, "prompt", CAPACITY),
        (CAPACITY - 10, 11, "max_tokens", CAPACITY),
        (CAPACITY - CAP + 1, 300, "max_tokens", CAPACITY),
    ],
)
def test_what_can_never_fit_is_refused_by_name(
    server: Any, length: int, max_tokens: int, param: str, number: int, n: int
) -> None:
    body = {"prompt": some_ids(length), "max_tokens": max_tokens, "n": n}
    status, error = refusal(server, COMPLETIONS, body)
    assert (status, error["param"]) == (400, param)
    assert str(number) in error["message"]


def test_what_just_fits_is_served(server: Any) -> None:
    for length, max_tokens, count in ((CAPACITY - 1, 1, 1), (CAPACITY - CAP, 300, CAP)):
        body = {"prompt": some_ids(length), "max_tokens": max_tokens, "ignore_eos": True}
        assert server.post(COMPLETIONS, body)["usage"]["completion_tokens"] == count
    server.wait_idle(10)
