"""A tokenizer between a gateway and an engine, message by message."""

from __future__ import annotations

import numpy as np
import pytest

from shared.hop import NOTHING_KNOWN, Relay, Timers
from shared.messages import (
    FINISHED,
    Abort,
    Ack,
    AckEntry,
    AckRows,
    Attempt,
    End,
    ErrorInfo,
    FinishReason,
    Gone,
    Held,
    Submit,
    TextDelta,
    TextSpec,
    TokenDelta,
    TokenSpec,
)
from shared.sampling import SamplingParams

STOP = End(FinishReason.STOP)
FIRST = Attempt(1, 7, 0)
PROMPT = TokenSpec(SamplingParams(n=2), np.arange(3, dtype=np.int32).tobytes())


class Owner:
    """A tokenizer whose text of a token is its number; 99 is a stop string."""

    def __init__(self):
        self.now, self.up, self.down, self.begun, self.dropped_ids = 0.0, [], [], [], []
        self.relay = Relay(
            send_up=lambda peer, message: self.up.append(message) or True,
            send_down=lambda name, message: self.down.append(message) or True,
            clock=lambda: self.now,
            timers=Timers(),
            events=self,
            engines=["E"],
        )

    def begin(self, request):
        self.begun.append(request)

    def grew(self, growths):
        for log, _ in growths:
            self.replaced(log)

    def replaced(self, log):
        log.pieces += [f"<{token}>" for token in log.ids[len(log.pieces) :]]
        if 99 in log.ids:
            log.cut(log.ids.index(99) + 1, STOP, "")
        elif log.end is not None:
            log.last_piece = "."

    def dropped(self, request):
        self.dropped_ids.append(request.rid)

    def submit(self, attempt=FIRST, handle=1, boot=1, given=((), ()), ends=(None, None), resumable=False):
        spec = TextSpec(SamplingParams(n=2), text="x", resumable=resumable)
        counts = np.array([len(ids) for ids in given], np.int32)
        tokens = np.array([token for ids in given for token in ids], np.int32)
        known = [NOTHING_KNOWN] * 2
        message = Submit("r", attempt, handle, spec, counts, tokens, list(ends), known)
        self.relay.receive_from_gateway(f"g/{boot}", boot, message)

    def start(self):
        self.relay.start(self.begun[-1], PROMPT)
        return self.take_down(Submit)[-1]

    def engine(self, message):
        self.relay.receive_from_engine("E", 5, message)

    def take_up(self, kind=object):
        self.relay.flush()
        taken, self.up[:] = [m for m in self.up if isinstance(m, kind)], []
        return taken

    def take_down(self, kind=object):
        self.relay.flush()
        taken, self.down[:] = [m for m in self.down if isinstance(m, kind)], []
        return taken


@pytest.fixture
def owner():
    return Owner()


def rows(handle, choice, start, tokens, end=None):
    entry = np.array([[handle, choice, start, len(tokens)]], np.int32)
    return TokenDelta(entry, np.array(tokens, np.int32), [(0, end)] if end else [])


def test_it_accepts_only_when_the_engine_did(owner):
    owner.submit()
    assert owner.take_up(Held)[0].rows.tolist() == [[1, 0, 0, 0]]
    submit = owner.start()
    assert (submit.attempt, submit.spec) == (FIRST, PROMPT)
    owner.engine(Held(np.array([[submit.handle, 0, 0, 0]], np.int32)))
    assert owner.take_up(Held) == []
    owner.engine(Held(np.array([[submit.handle, 1, 3, 0]], np.int32)))
    assert owner.take_up(Held)[0].rows.tolist() == [[1, 1, 3, 0]]


def test_tokens_go_up_as_text(owner):
    owner.submit(handle=4)
    below = owner.start().handle
    owner.engine(rows(below, 1, 0, [5, 6]))
    (delta,) = owner.take_up(TextDelta)
    assert (delta.rows.tolist(), delta.tokens.tolist(), delta.pieces) == ([[4, 1, 0, 2]], [5, 6], ["<5>", "<6>"])
    owner.engine(rows(below, 1, 2, [], STOP))
    (delta,) = owner.take_up(TextDelta)
    assert [(end.reason, piece) for _, end, piece in delta.ends] == [(FinishReason.STOP, ".")]
    assert owner.take_down(AckRows)[0].rows.tolist() == [[below, 1, FINISHED]]


def test_a_stop_string_ends_the_choice_below(owner):
    owner.submit()
    below = owner.start().handle
    owner.engine(rows(below, 0, 0, [5, 99, 7]))
    (delta,) = owner.take_up(TextDelta)
    assert (delta.tokens.tolist(), len(delta.ends)) == ([5, 99], 1)
    assert owner.take_down(AckRows)[0].rows.tolist() == [[below, 0, FINISHED]]
    owner.engine(rows(below, 0, 3, [8]))
    assert owner.take_up(TextDelta) == []


def test_a_raised_attempt_of_the_gateway_goes_down(owner):
    owner.submit()
    owner.start()
    owner.submit(Attempt(2, 7, 0), handle=2)
    assert owner.take_down(Submit)[0].attempt == Attempt(2, 7, 0)


def test_a_restarted_engine_gets_the_rows_so_far(owner):
    owner.submit()
    below = owner.start().handle
    owner.engine(rows(below, 0, 0, [5]))
    owner.relay.receive_from_engine("E", 6, Held(np.zeros((0, 4), np.int32)))
    (submit,) = owner.take_down(Submit)
    assert (submit.attempt, submit.counts.tolist(), submit.tokens.tolist()) == (Attempt(1, 7, 1), [1, 0], [5])


def test_a_submit_while_the_prompt_is_encoded(owner):
    owner.submit()
    owner.submit(Attempt(2, 7, 0), handle=2)
    assert len(owner.begun) == 1
    assert owner.start().attempt == Attempt(2, 7, 0)


def test_a_request_that_is_dropped_while_its_prompt_is_encoded(owner):
    owner.submit()
    owner.relay.receive_from_gateway("g/1", 1, Abort("r", FIRST))
    owner.relay.start(owner.begun[0], PROMPT)
    assert owner.take_down() == []
    assert owner.dropped_ids == ["r"]


def test_given_rows_get_their_text(owner):
    owner.submit(given=((5, 6), ()))
    assert owner.begun[0].logs[0].pieces == ["<5>", "<6>"]
    assert owner.start().counts.tolist() == [2, 0]
    assert owner.take_up(TextDelta) == []


def test_abort_goes_down(owner):
    owner.submit()
    owner.start()
    owner.relay.receive_from_gateway("g/1", 1, Abort("r", FIRST))
    assert [type(message) for message in owner.take_down()] == [Abort]
    assert (owner.relay.child.requests, owner.relay.parent.requests) == ({}, {})


def test_an_owner_that_fails_a_request(owner):
    owner.submit()
    owner.start()
    owner.relay.fail(owner.begun[0], ErrorInfo(7, "broken"))
    assert [type(message) for message in owner.take_down()] == [Abort]
    assert len(owner.take_up(TextDelta)[0].ends) == 2


def test_an_owner_that_finishes_a_choice(owner):
    owner.submit()
    below = owner.start().handle
    owner.relay.finish(owner.begun[0].logs[1], STOP)
    assert owner.take_down(AckRows)[0].rows.tolist() == [[below, 1, FINISHED]]
    assert owner.take_up(TextDelta)[0].rows.tolist() == [[1, 1, 0, 0]]


def test_an_orphan_is_not_renewed_below(owner):
    owner.submit()
    owner.start()
    for second in range(1, 20):
        owner.now = float(second)
        owner.relay.tick()
        if second == 3:
            assert len(owner.take_down(Ack)) == 3
    assert len(owner.take_down(Ack)) == 2  # of seconds 4 and 5; from then on it is an orphan
    owner.now = 21
    owner.relay.tick()
    assert owner.dropped_ids == ["r"]
    assert [type(message) for message in owner.take_down()] == [Abort]


def test_superseded_below_is_told_above(owner):
    owner.submit(handle=3)
    submit = owner.start()
    owner.engine(Gone("r", submit.attempt, submit.handle, Attempt(9, 8, 0)))
    (gone,) = owner.take_up(Gone)
    assert (gone.attempt, gone.handle, gone.live) == (FIRST, 3, Attempt(9, 8, 0))
    assert owner.relay.child.requests == {}


def test_a_finished_resumable_request_is_there_for_its_client(owner):
    owner.submit(resumable=True)
    below = owner.start().handle
    for choice in (0, 1):
        owner.engine(rows(below, choice, 0, [5], STOP))
    owner.take_up()
    owner.relay.receive_from_gateway("g/1", 1, Ack([AckEntry("r", FIRST, 1, [FINISHED, FINISHED])]))
    owner.take_down()
    owner.submit(Attempt(2, 8, 0), handle=9, boot=2, resumable=True)
    held, delta = owner.take_up()
    assert held.rows.tolist() == [[9, 1, 0, 0]]
    assert (delta.rows.tolist(), len(delta.ends)) == ([[9, 0, 0, 1], [9, 1, 0, 1]], 2)
    assert owner.take_down() == []
