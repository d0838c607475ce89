"""What goes with rows: log-probability records with each token row, what was asked of the prompt with the first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shared.errors import ErrorCode
from shared.hop import ENGINE, TOKENIZER, Child, Parent, Timers, digest
from shared.hop import outbox as outbox_module
from shared.messages import Ack as AckMessage
from shared.messages import (
    AckEntry,
    Attempt,
    End,
    ErrorInfo,
    FinishReason,
    Known,
    PromptInfo,
    Submit,
    TextSpec,
    TokenDelta,
    TokenSpec,
)
from shared.sampling import SamplingParams

STOP = End(FinishReason.STOP)
PROMPT = PromptInfo([b"p1", b"p2"])


def record_of(token: int) -> bytes:
    return b"record of %d" % token


class Hop:
    """A parent and a child with a wire between them that may lose messages."""

    def __init__(self, role=ENGINE, loss=0.0, seed=0):
        self.now, self.loss, self.random = 0.0, loss, random.Random(seed)
        self.up, self.down = [], []
        self.child = self.new_child(role)
        self.boot = 1
        self.role = role
        self.parent = Parent(
            send=lambda name, message: self.down.append(message) or True,
            clock=lambda: self.now,
            timers=Timers(),
            events=self,
            children=["C"],
        )

    def new_child(self, role):
        return Child(
            send=lambda peer, message: self.up.append(message) or True,
            clock=lambda: self.now,
            timers=Timers(),
            events=self,
            role=role,
            recompute=True,
        )

    def begin(self, request):
        self.child.accept(request, 3)

    def grew(self, growths): ...
    def accepted(self, request): ...
    def superseded(self, request, live): ...
    def replaced(self, old, new): ...
    def resubmitted(self, request): ...
    def unwanted(self, log): ...
    def rested(self, request, resting): ...
    def dropped(self, request): ...

    def open(self, **params):
        spec = TokenSpec(SamplingParams(**params), b"") if self.role is ENGINE else TextSpec(SamplingParams(**params))
        request = self.parent.open("r", spec)
        self.exchange()
        return request

    @property
    def logs(self):
        return self.child.requests["r"].logs

    def exchange(self, times=1):
        """Flush both sides and carry what they send."""
        for _ in range(times):
            self.parent.flush()
            self.child.flush()
            up, self.up[:] = list(self.up), []
            down, self.down[:] = list(self.down), []
            for message in up:
                if self.random.random() >= self.loss:
                    self.parent.receive("C", self.boot, message)
            for message in down:
                if self.random.random() >= self.loss:
                    self.child.receive("p/1", 9, message)

    def pass_time(self, seconds):
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.parent.tick()
            self.child.tick()
            self.exchange()


def test_records_and_prompt_arrive_with_their_rows():
    hop = Hop()
    request = hop.open(logprobs=0, n=2)
    hop.logs[0].prompt = PROMPT
    hop.child.extend(hop.logs[0], [5, 6], [record_of(5), record_of(6)])
    hop.child.extend(hop.logs[1], [7], [record_of(7)])
    hop.exchange()
    assert [log.records for log in request.logs] == [[record_of(5), record_of(6)], [record_of(7)]]
    assert [log.prompt for log in request.logs] == [PROMPT, None]


def test_nothing_is_kept_where_nothing_was_asked_for():
    hop = Hop()
    request = hop.open()
    hop.child.extend(hop.logs[0], [5, 6])
    hop.child.finish(hop.logs[0], STOP)
    hop.child.flush()
    (delta,) = [message for message in hop.up if isinstance(message, TokenDelta)]
    assert (delta.logprobs, delta.prompts) == ([], [])
    hop.exchange()
    assert request.logs[0].records == []


def test_the_prompt_goes_with_an_end_row_where_there_is_no_token():
    hop = Hop()
    request = hop.open(max_tokens=0)
    hop.logs[0].prompt = PROMPT
    hop.child.finish(hop.logs[0], End(FinishReason.LENGTH))
    hop.exchange()
    assert request.over
    assert request.logs[0].prompt == PROMPT


@pytest.mark.parametrize("seed", range(8))
def test_losses_and_repeats_do_not_part_a_token_from_its_record(seed):
    hop = Hop(loss=0.4, seed=seed)
    request = hop.open(logprobs=2, n=3)
    for _ in range(60):
        if "r" in hop.child.requests:
            break
        hop.pass_time(1)
    for log in hop.logs:
        log.prompt = PROMPT
    for step in range(40):
        for log in hop.logs:
            token = 100 * log.choice + step
            hop.child.extend(log, [token], [record_of(token)])
        hop.exchange()
    for log in list(hop.logs):
        hop.child.finish(log, STOP)
    for _ in range(60):
        if request.over:
            break
        hop.pass_time(1)
    for log in request.logs:
        assert list(log.ids) == [100 * log.choice + step for step in range(40)]
        assert log.records == [record_of(token) for token in log.ids]
        assert log.prompt == PROMPT


def test_after_a_restart_of_the_child_old_records_stay_and_new_ones_follow():
    hop = Hop()
    request = hop.open(logprobs=0)
    hop.logs[0].prompt = PROMPT
    hop.child.extend(hop.logs[0], [5, 6], [record_of(5), record_of(6)])
    hop.exchange()
    hop.child, hop.boot = hop.new_child(ENGINE), 2
    hop.pass_time(8)
    assert list(hop.logs[0].ids) == [5, 6]
    assert hop.logs[0].records == [b"", b""]
    hop.child.extend(hop.logs[0], [7], [record_of(7)])
    hop.exchange()
    assert request.logs[0].records == [record_of(5), record_of(6), record_of(7)]
    assert request.logs[0].prompt == PROMPT


class Owner(Hop):
    """Notes which logs were replaced."""

    def __init__(self, role):
        super().__init__(role)
        self.changes = []

    def replaced(self, old, new):
        assert (old.live, new.live) == (False, True)
        self.changes.append((list(old.ids), list(new.ids)))

    def submit(self, t, given, known, **params):
        """A request, with the ids that its parent has and those that somebody knows."""
        params = SamplingParams(logprobs=0, **params)
        spec = TokenSpec(params, b"") if self.role is ENGINE else TextSpec(params, text="x")
        counts, tokens = np.array([len(given)], np.int32), np.array(given, np.int32)
        known = [Known(len(known), digest(known))]
        self.child.receive(f"t/{t}", 9, Submit("r", Attempt(t, 1, 0), t, spec, counts, tokens, [None], known))
        return self.child.requests["r"].logs[0]


@pytest.mark.parametrize("role", [ENGINE, TOKENIZER])
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("known", range(6))
def test_rows_whose_records_are_lost_are_computed_again(role, known, over):
    """The first parent gave three rows and kept their records. It is gone, and the next one lacks some of them."""
    owner = Owner(role)
    first = owner.submit(1, [5, 6, 7], [5, 6, 7])
    owner.changes.clear()
    first.prompt = PROMPT
    first.pieces = [""] * 3
    owner.child.extend(first, [8, 9], [record_of(8), record_of(9)])
    if over:
        owner.child.finish(first, STOP)
    log = owner.submit(2, [], [5, 6, 7, 8, 9][:known])
    if known >= 3:
        assert (log, owner.changes) == (first, [])
        assert log.records == [b"", b"", b"", record_of(8), record_of(9)]
    else:
        assert owner.changes == [([5, 6, 7, 8, 9], [5, 6, 7][:known])]
        assert (list(log.ids), log.records, log.end) == ([5, 6, 7][:known], [b""] * known, None)
        assert log.prompt == PROMPT


def test_an_error_needs_no_records():
    owner = Owner(ENGINE)
    log = owner.submit(1, [5, 6], [5, 6])
    owner.changes.clear()
    owner.child.fail(log.request, ErrorInfo(ErrorCode.INTERNAL, "it failed"))
    assert owner.submit(2, [], []) is log
    assert owner.changes == []


def test_a_cut_takes_the_records_along():
    hop = Hop(role=TOKENIZER)
    hop.open(logprobs=0)
    log = hop.logs[0]
    hop.child.extend(log, [5, 6, 7], [record_of(5), record_of(6), record_of(7)])
    log.pieces = ["a", "b", "c"]
    log.cut(2, STOP)
    assert log.records == [record_of(5), record_of(6)]


def test_large_records_go_out_in_several_messages(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_EXTRA_BYTES", 100)
    hop = Hop()
    request = hop.open(logprobs=0, n=4)
    for log in hop.logs:
        hop.child.extend(log, [1, 2], [b"x" * 40, b"y" * 40])
        hop.child.finish(log, STOP)
    hop.child.flush()
    deltas = [message for message in hop.up if isinstance(message, TokenDelta)]
    assert [len(delta.rows) for delta in deltas] == [2, 2]
    hop.exchange()
    assert request.over
    assert all(log.records == [b"x" * 40, b"y" * 40] for log in request.logs)


def test_an_answer_from_the_first_row_on_brings_the_prompt_again():
    hop = Hop()
    empty = np.empty(0, np.int32)
    attempt, known = Attempt(1, 1, 0), [Known(0, digest(()))]
    spec = TokenSpec(SamplingParams(logprobs=0), b"")
    hop.child.receive("p/1", 9, Submit("r", attempt, 1, spec, np.zeros(1, np.int32), empty, [None], known))
    hop.logs[0].prompt = PROMPT
    hop.child.extend(hop.logs[0], [5], [record_of(5)])
    hop.child.flush()
    hop.up.clear()
    hop.child.receive("p/1", 9, AckMessage([AckEntry("r", attempt, 1, [0], resync=True)]))
    hop.child.flush()
    (delta,) = [message for message in hop.up if isinstance(message, TokenDelta)]
    assert (delta.logprobs, delta.prompts) == ([(0, [record_of(5)])], [(0, PROMPT)])
