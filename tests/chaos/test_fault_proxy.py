"""The proxy itself: each fault does what its name says, the same for the same seed, and identities pass through."""

from __future__ import annotations

import math
import pathlib
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shared.codec import encode
from shared.messages import Hello, Message, TokenDelta
from shared.transport import Connector, Listener
from tests.chaos.fault_proxy import (
    DAMAGE,
    DELAY,
    DROP,
    DUPLICATE,
    MIX,
    REORDER,
    FaultProxy,
    StreamProxy,
    damage,
    readable,
)

COUNT = 200
Start = Callable[..., tuple[FaultProxy, Listener, Connector]]


def numbered(number: int) -> Hello:
    return Hello("gateway", str(number), 1, 1, True, None, None)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    opened: list[FaultProxy | Listener | Connector] = []

    def begin(*kinds: str, **options: float) -> tuple[FaultProxy, Listener, Connector]:
        listener = Listener(f"ipc://{tmp_path}/up", boot=1)
        proxy = FaultProxy(f"ipc://{tmp_path}/in", listener.endpoint, kinds, seed=5, **options).start()  # type: ignore[arg-type]
        connector = Connector(f"ipc://{tmp_path}/in", identity="gateway/1", boot=2)
        opened.extend((connector, listener, proxy))
        return proxy, listener, connector

    yield begin
    for each in opened:
        each.stop() if isinstance(each, FaultProxy) else each.close()


def exchange(proxy: FaultProxy, listener: Listener, connector: Connector) -> tuple[list[int], list[int]]:
    """Send numbers both ways, until all that the proxy passed on has come; (those that arrived at the listener, at the
    connector)."""
    up: list[int] = []
    down: list[int] = []
    sent_up = sent_down = 0

    def has_come() -> bool:
        counts = proxy.counts
        handled = counts.total() - counts["accepted"] - counts["lost"]
        passed_on = handled - counts[DROP] + counts[DUPLICATE]
        return handled == 2 * COUNT and len(up) + len(down) + listener.malformed + connector.malformed >= passed_on

    end, quiet = time.monotonic() + 60, math.inf
    while time.monotonic() < min(end, quiet):
        if sent_up < COUNT and connector.send(numbered(sent_up)):
            sent_up += 1
        while (received := listener.receive()) is not None:
            assert received.peer == "gateway/1"
            up.append(number_of(received.message))
        if up and sent_down < COUNT and listener.send("gateway/1", numbered(sent_down)):
            sent_down += 1
        while (received := connector.receive()) is not None:
            down.append(number_of(received.message))
        if quiet == math.inf and has_come():
            quiet = time.monotonic() + 0.1  # for what should not come
        time.sleep(0.0005)
    return up, down


def number_of(message: Message) -> int:
    assert isinstance(message, Hello)
    return int(message.name)


def test_it_passes_everything_both_ways_in_order(start: Start) -> None:
    proxy, listener, connector = start(*MIX, rate=0.0)
    assert exchange(proxy, listener, connector) == (list(range(COUNT)), list(range(COUNT)))


@pytest.mark.parametrize("kind", [DROP, *DAMAGE])
def test_what_is_dropped_or_damaged_does_not_arrive(start: Start, kind: str) -> None:
    proxy, listener, connector = start(kind, rate=0.2)
    up, down = exchange(proxy, listener, connector)
    assert up == sorted(set(up))
    assert down == sorted(set(down))
    assert len(up) + len(down) == 2 * COUNT - proxy.counts[kind] < 2 * COUNT
    assert proxy.counts["accepted"] == 0
    assert listener.malformed + connector.malformed == (0 if kind == DROP else proxy.counts[kind])


def test_duplicates_arrive_twice(start: Start) -> None:
    proxy, listener, connector = start(DUPLICATE, rate=0.2)
    up, down = exchange(proxy, listener, connector)
    assert (sorted(set(up)), sorted(set(down))) == (list(range(COUNT)), list(range(COUNT)))
    assert len(up) + len(down) == 2 * COUNT + proxy.counts[DUPLICATE] > 2 * COUNT


@pytest.mark.parametrize("kind", [DELAY, REORDER])
def test_what_is_late_arrives_once_in_another_order(start: Start, kind: str) -> None:
    proxy, listener, connector = start(kind, rate=0.2, delay_s=0.1)
    for arrived in exchange(proxy, listener, connector):
        assert sorted(arrived) == list(range(COUNT)) != arrived


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_the_same_for_the_same_seed_and_always_noticed(kind: str) -> None:
    rows, ids = np.arange(8, dtype=np.int32).reshape(2, 4), np.zeros(10, np.int32)
    rows[:, 3] = 5
    rng = random.Random(3)
    for message in (numbered(7), TokenDelta(rows, ids, [])):
        frames = encode(message, 1)
        first, again = (damage(kind, frames, random.Random(3)) for _ in range(2))
        assert first == again != frames
        assert not any(readable(damage(kind, frames, rng)) for _ in range(500))


def test_turned_bits_in_the_stream_never_make_another_message() -> None:
    """Those in ZeroMQ's framing join and split messages, or break the connection, which is made again."""
    listener = Listener("tcp://127.0.0.1:0", boot=1)
    proxy = StreamProxy(int(listener.endpoint.rpartition(":")[2]), seed=5)
    connector = Connector(proxy.endpoint, identity="gateway/1", boot=2)
    rows = np.array([[1, 2, 3, 20]], np.int32)
    sent, arrived = 0, [-1]
    try:
        end = time.monotonic() + 120
        while (len(arrived) < 1000 or listener.malformed < 50) and time.monotonic() < end:
            sent += connector.send(TokenDelta(rows, np.full(20, sent, np.int32), []))
            while (received := listener.receive()) is not None:
                assert (received.peer, received.boot) == ("gateway/1", 2)
                assert isinstance(received.message, TokenDelta)
                assert received.message.rows.tolist() == rows.tolist()
                (number,) = set(received.message.tokens.tolist())
                assert arrived[-1] < number < sent
                arrived.append(number)
            time.sleep(0.0002)
    finally:
        connector.close()
        listener.close()
        proxy.stop()
    assert len(arrived) >= 1000
    assert listener.malformed >= 50
    assert proxy.turned >= 50
