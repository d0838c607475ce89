"""The fast way out of a step's rows: at once where nothing else is due, merged and in order where something is."""

from __future__ import annotations

import numpy as np

from shared.hop import ENGINE, EngineChild, Log, Timers, digest
from shared.hop import Request as HopRequest
from shared.messages import (
    Ack,
    AckEntry,
    Attempt,
    End,
    FinishReason,
    Held,
    Int32,
    Known,
    Message,
    Submit,
    TokenDelta,
    TokenSpec,
)
from shared.sampling import SamplingParams

ATTEMPT = Attempt(1, 1, 0)


class Engine:
    """An owner of an ``EngineChild`` that remembers what was sent, and can be told that the peer takes no more."""

    def __init__(self) -> None:
        self.now = 0.0
        self.blocked = False
        self.sent: list[Message] = []
        self.child = EngineChild(
            send=self.send, clock=lambda: self.now, timers=Timers(), events=self, role=ENGINE, recompute=True
        )

    def send(self, peer: str, message: Message) -> bool:
        if not self.blocked:
            self.sent.append(message)
        return not self.blocked

    def submit(self, handle: int, peer: str = "tokenizer/1", n: int = 1) -> HopRequest:
        spec = TokenSpec(SamplingParams(n=n), np.arange(3, dtype=np.int32).tobytes())
        empty = np.empty(0, np.int32)
        counts = np.zeros(n, np.int32)
        known = [Known(0, digest(()))] * n
        self.child.receive(peer, 1, Submit(f"r{handle}", ATTEMPT, handle, spec, counts, empty, [None] * n, known))
        return self.child.requests[f"r{handle}"]

    def step(self, logs: list[Log], tokens: list[int]) -> None:
        rows = np.array([(log.handle, log.choice, len(log.ids), 1) for log in logs], np.int32).reshape(-1, 4)
        self.child.append_rows(logs, rows, np.array(tokens, np.int32))

    def take(self) -> list[tuple[list[list[int]], list[int], list[int]]]:
        """(rows, tokens, rows that end) of each delta since the last call."""
        deltas = [message for message in self.sent if isinstance(message, TokenDelta)]
        self.sent.clear()
        return [(delta.rows.tolist(), delta.tokens.tolist(), [index for index, _ in delta.ends]) for delta in deltas]

    def begin(self, request: HopRequest) -> None: ...
    def replaced(self, old: Log, new: Log) -> None: ...
    def resubmitted(self, request: HopRequest) -> None: ...
    def unwanted(self, log: Log) -> None: ...
    def rested(self, request: HopRequest, resting: bool) -> None: ...
    def dropped(self, request: HopRequest) -> None: ...


def int32(*values: int) -> Int32:
    return np.array(values, np.int32)


def test_rows_go_out_at_once() -> None:
    engine = Engine()
    one, two = engine.submit(5).logs[0], engine.submit(6, n=2).logs[1]
    engine.child.flush()
    engine.take()
    engine.step([one, two], [10, 20])
    assert engine.take() == [([[5, 0, 0, 1], [6, 1, 0, 1]], [10, 20], [])]
    engine.step([two], [21])
    engine.child.flush()
    assert engine.take() == [([[6, 1, 1, 1]], [21], [])]
    assert (one.ids.tolist(), two.ids.tolist()) == ([10], [20, 21])
    engine.step([], [])
    assert engine.take() == []


def test_held_goes_first() -> None:
    engine = Engine()
    log = engine.submit(5).logs[0]
    engine.step([log], [10])
    assert engine.sent == []
    engine.child.flush()
    assert [type(message) for message in engine.sent] == [Held, TokenDelta]
    assert engine.take() == [([[5, 0, 0, 1]], [10], [])]


def test_an_end_follows_its_last_row() -> None:
    engine = Engine()
    log = engine.submit(5).logs[0]
    engine.child.flush()
    engine.step([log], [10])
    engine.child.finish(log, End(FinishReason.LENGTH))
    engine.child.flush()
    assert engine.take() == [([[5, 0, 0, 1]], [10], []), ([[5, 0, 1, 0]], [], [0])]


def test_a_slow_reader_gets_merged_ranges() -> None:
    engine = Engine()
    one, two = engine.submit(5).logs[0], engine.submit(6).logs[0]
    engine.child.flush()
    engine.take()
    engine.blocked = True
    engine.step([one, two], [10, 20])
    engine.step([one], [11])
    engine.child.flush()
    engine.blocked = False
    engine.step([two], [21])
    assert engine.take() == []
    engine.now += 1.0
    engine.child.flush()
    assert engine.take() == [([[5, 0, 0, 2], [6, 0, 0, 2]], [10, 11, 20, 21], [])]
    engine.step([two], [22])
    assert engine.take() == [([[6, 0, 2, 1]], [22], [])]


def test_a_resync_sends_the_missing_rows_before_new_ones() -> None:
    engine = Engine()
    request = engine.submit(5)
    engine.child.flush()
    for token in (10, 11, 12):
        engine.step([request.logs[0]], [token])
    engine.take()
    engine.child.receive("tokenizer/1", 1, Ack([AckEntry(request.rid, ATTEMPT, 5, [1], resync=True)]))
    engine.step([request.logs[0]], [13])
    assert engine.take() == []
    engine.child.flush()
    assert engine.take() == [([[5, 0, 1, 3]], [11, 12, 13], [])]


def test_several_parents() -> None:
    engine = Engine()
    one, two = engine.submit(5, "tokenizer/1").logs[0], engine.submit(5 + 1, "tokenizer/2").logs[0]
    engine.child.flush()
    engine.take()
    engine.step([one, two], [10, 20])
    engine.child.flush()
    assert engine.take() == [([[5, 0, 0, 1]], [10], []), ([[6, 0, 0, 1]], [20], [])]
