"""The upper side of a hop, message by message."""

from __future__ import annotations

import numpy as np
import pytest

from shared.hop import ENGINE, NOTHING_KNOWN, TOKENIZER, Child, Timers, digest
from shared.hop import outbox as outbox_module
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
    Go,
    Gone,
    Held,
    Hello,
    Known,
    Submit,
    TextDelta,
    TextSpec,
    TokenDelta,
    TokenSpec,
    Turn,
)
from shared.sampling import SamplingParams

STOP = End(FinishReason.STOP)
FIRST, RAISED, HIGHER = Attempt(1, 7, 0), Attempt(1, 7, 1), Attempt(2, 7, 0)


class Owner:
    """Records events and what is sent; ``now`` and ``full`` are turned by the tests."""

    def __init__(self, role=ENGINE, recompute=True, accept=True):
        self.events, self.sent, self.now, self.full, self.takes = [], [], 0.0, set(), accept
        self.child = Child(
            send=self.send, clock=lambda: self.now, timers=Timers(), events=self, role=role, recompute=recompute
        )

    def send(self, peer, message):
        if peer in self.full:
            return False
        self.sent.append((peer, message))
        return True

    def take(self, kind=object):
        self.child.flush()
        sent, self.sent = self.sent, []
        return [message for _, message in sent if isinstance(message, kind)]

    def begin(self, request):
        self.events.append(("begin", request.rid))
        if self.takes:
            self.child.accept(request, 3)

    def replaced(self, old, new):
        assert not old.live
        assert new.live
        self.events.append(("replaced", list(old.ids), list(new.ids)))

    def resubmitted(self, request):
        self.events.append(("resubmitted", request.rid))

    def unwanted(self, log):
        self.events.append(("unwanted", log.choice))

    def rested(self, request, resting):
        self.events.append(("rested", resting))

    def dropped(self, request):
        self.events.append(("dropped", request.rid))

    def submit(self, attempt=FIRST, handle=1, peer="t/1", rid="r", **options):
        self.child.receive(peer, 100, a_submit(rid, attempt, handle, **options))
        return self.child.requests.get(rid)

    def ack(self, have, attempt=FIRST, handle=1, peer="t/1", rid="r", **options):
        self.child.receive(peer, 100, Ack([AckEntry(rid, attempt, handle, have, **options)]))


def a_submit(rid, attempt, handle, n=1, given=(), ends=None, known=None, suspect=False, text=False, resumable=False):
    params = SamplingParams(n=n)
    spec = TextSpec(params, text="x", resumable=resumable) if text else TokenSpec(params, b"", resumable=resumable)
    given = [*given, *[[]] * (n - len(given))]
    known = known or [Known(len(ids), digest(ids)) for ids in given]
    counts, tokens = (
        np.array([len(ids) for ids in given], np.int32),
        np.array([i for ids in given for i in ids], np.int32),
    )
    return Submit(rid, attempt, handle, spec, counts, tokens, ends or [None] * n, known, suspect)


@pytest.fixture
def owner():
    return Owner()


def rows_of(delta):
    return delta.rows.tolist(), delta.tokens.tolist()


def test_rows_of_a_step_go_out_in_one_message(owner):
    one, two = owner.submit(handle=1, rid="one"), owner.submit(handle=2, rid="two", n=2)
    assert owner.take()[0].rows.tolist() == [[1, 1, 3, 0], [2, 1, 3, 0]]
    for log, token in ((one.logs[0], 10), (two.logs[0], 20), (two.logs[1], 30)):
        owner.child.append(log, token)
    owner.child.finish(two.logs[1], STOP)
    (delta,) = owner.take()
    assert rows_of(delta) == ([[1, 0, 0, 1], [2, 0, 0, 1], [2, 1, 0, 1]], [10, 20, 30])
    assert delta.ends == [(2, End(FinishReason.STOP, prompt_tokens=3))]
    assert owner.take() == []
    owner.child.extend(one.logs[0], [11, 12])
    assert rows_of(owner.take()[0]) == ([[1, 0, 1, 2]], [11, 12])
    owner.child.finish(one.logs[0], STOP)
    (delta,) = owner.take()
    assert rows_of(delta) == ([[1, 0, 3, 0]], [])
    assert delta.ends[0][0] == 0


def test_each_parent_gets_its_own(owner):
    one, two = owner.submit(rid="one", peer="t/1"), owner.submit(rid="two", peer="t/2")
    owner.take()
    owner.child.append(one.logs[0], 1)
    owner.child.append(two.logs[0], 2)
    owner.child.flush()
    assert sorted((peer, message.tokens.tolist()) for peer, message in owner.sent) == [("t/1", [1]), ("t/2", [2])]


def test_a_slow_reader_gets_merged_ranges(owner):
    log = owner.submit().logs[0]
    owner.take()
    owner.full = {"t/1"}
    for token in range(5):
        owner.child.append(log, token)
        assert owner.take() == []
    owner.child.finish(log, STOP)
    owner.full.clear()
    assert owner.take() == []  # not tried again at once
    owner.now += 0.1
    (delta,) = owner.take()
    assert rows_of(delta) == ([[1, 0, 0, 5]], [0, 1, 2, 3, 4])
    assert len(delta.ends) == 1


def test_held_goes_before_rows(owner):
    owner.full = {"t/1"}
    log = owner.submit().logs[0]
    owner.child.append(log, 5)
    owner.take()
    owner.full.clear()
    owner.now += 0.1
    assert [type(message) for message in owner.take()] == [Held, TokenDelta]


def test_a_long_range_goes_in_parts(owner, monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_TOKENS", 10)
    one, two = owner.submit(rid="one", handle=1), owner.submit(rid="two", handle=2)
    owner.take()
    owner.child.extend(one.logs[0], range(8))
    owner.child.extend(two.logs[0], range(15))
    owner.child.finish(two.logs[0], STOP)
    deltas = owner.take()
    assert [delta.rows.tolist() for delta in deltas] == [[[1, 0, 0, 8], [2, 0, 0, 2]], [[2, 0, 2, 10]], [[2, 0, 12, 3]]]
    assert [len(delta.ends) for delta in deltas] == [0, 0, 1]


def test_the_engine_keeps_a_finished_log_until_its_end_is_acknowledged(owner):
    log = owner.submit().logs[0]
    owner.child.append(log, 5)
    owner.child.finish(log, STOP)
    owner.take()
    owner.child.receive("t/1", 100, AckRows(np.array([[1, 0, 1]], np.int32)))
    assert "r" in owner.child.requests
    owner.child.receive("t/2", 100, AckRows(np.array([[1, 0, FINISHED]], np.int32)))  # not its parent
    owner.child.receive("t/1", 100, AckRows(np.array([[9, 0, FINISHED], [1, 5, FINISHED]], np.int32)))
    assert "r" in owner.child.requests
    owner.child.receive("t/1", 100, AckRows(np.array([[1, 0, FINISHED]], np.int32)))
    assert owner.child.requests == {}
    assert owner.events[-1] == ("dropped", "r")


def test_a_tokenizer_keeps_a_resumable_one_for_its_lease():
    owner = Owner(TOKENIZER)
    for rid, resumable in (("kept", True), ("done", False)):
        request = owner.submit(rid=rid, text=True, resumable=resumable, handle=int(resumable) + 1)
        owner.child.finish(request.logs[0], STOP)
        owner.take()
        owner.ack([FINISHED], rid=rid, handle=int(resumable) + 1)
    assert list(owner.child.requests) == ["kept"]
    owner.now = 19
    owner.child.tick()
    assert list(owner.child.requests) == ["kept"]
    owner.now = 21
    owner.child.tick()
    assert owner.child.requests == {}


def test_a_choice_that_nobody_needs_is_ended(owner):
    owner.submit(n=2)
    owner.ack([FINISHED, 0])
    assert owner.events[-1] == ("unwanted", 0)
    owner.ack([FINISHED, FINISHED])
    assert owner.events[-2:] == [("unwanted", 1), ("dropped", "r")]
    assert owner.take(TokenDelta) == []


def test_resync_sends_again_from_what_the_parent_has(owner):
    log = owner.submit().logs[0]
    owner.child.extend(log, [5, 6, 7])
    owner.take()
    owner.ack([1], resync=True)
    assert rows_of(owner.take(TokenDelta)[0]) == ([[1, 0, 1, 2]], [6, 7])
    owner.ack([3], resync=True)
    assert owner.take(TokenDelta) == []


def test_a_beat_is_answered(owner):
    owner.takes = False
    owner.submit()
    assert owner.take(Held)[0].rows.tolist() == [[1, 0, 0, 0]]
    owner.ack([0])
    assert owner.take(Held) == []
    owner.ack([0], beat=True)
    assert owner.take(Held)[0].rows.tolist() == [[1, 0, 0, 0]]


def test_repeated_submit_is_answered_and_changes_nothing(owner):
    log = owner.submit().logs[0]
    owner.child.append(log, 5)
    owner.take()
    owner.submit()
    assert [type(message) for message in owner.take()] == [Held]
    assert owner.events == [("begin", "r")]


@pytest.mark.parametrize("attempt", [Attempt(1, 7, 0), Attempt(1, 8, 9), Attempt(0, 7, 5)])
def test_a_submit_that_is_not_newer_is_refused(owner, attempt):
    owner.submit()
    owner.take()
    owner.submit(attempt, handle=5, peer="t/2")
    (gone,) = owner.take()
    assert (gone.attempt, gone.handle, gone.live) == (attempt, 5, FIRST)
    assert owner.child.requests["r"].upper.owner.peer == "t/1"


def test_a_newer_submit_attaches_to_the_log_that_has_its_prefix(owner):
    log = owner.submit().logs[0]
    owner.child.extend(log, [5, 6, 7])
    owner.take()
    request = owner.submit(RAISED, handle=9, peer="t/2", given=[[5, 6]])
    assert request.logs[0] is log
    assert owner.events[1:] == [("resubmitted", "r")]
    owner.child.accept(request, 3)
    held, delta = owner.take()
    assert held.rows.tolist() == [[9, 1, 3, 0]]
    assert rows_of(delta) == ([[9, 0, 2, 1]], [7])
    owner.child.append(log, 8)
    assert rows_of(owner.take()[0]) == ([[9, 0, 3, 1]], [8])


def test_a_newer_submit_with_other_rows_is_a_new_sequence(owner):
    old = owner.submit().logs[0]
    owner.child.extend(old, [5, 6, 7])
    owner.take()
    new = owner.submit(RAISED, handle=9, given=[[5, 1]]).logs[0]
    assert owner.events[1:] == [("replaced", [5, 6, 7], [5, 1]), ("resubmitted", "r")]
    owner.child.append(old, 8)  # a result that was in flight
    assert owner.take(TokenDelta) == []
    owner.child.append(new, 2)
    assert rows_of(owner.take(TokenDelta)[0]) == ([[9, 0, 2, 1]], [2])


def test_an_end_that_the_parent_has_is_taken(owner):
    owner.submit(n=2)
    request = owner.submit(RAISED, handle=2, n=2, given=[[4]], ends=[STOP, None])
    assert request.logs[0].end == STOP
    assert ("replaced", [], [4]) in owner.events
    assert owner.take(TokenDelta) == []


def test_another_request_of_the_same_id_replaces_the_first(owner):
    owner.submit()
    request = owner.submit(RAISED, handle=2, n=2)
    assert request.n == 2
    assert owner.events == [("begin", "r"), ("dropped", "r"), ("begin", "r")]


def test_rows_that_only_the_client_has():
    known = [Known(4, digest([1, 2, 3, 4]))]
    owner = Owner(recompute=False)
    request = owner.submit(known=known)
    assert request.failed
    assert owner.events == []
    assert owner.take(TokenDelta)[0].ends[0][1].error.code == 8
    owner = Owner(recompute=True)
    assert not owner.submit(known=known).over


def test_lost_while_it_runs():
    owner = Owner(recompute=False)
    owner.submit(n=2)
    owner.submit(RAISED, n=2, known=[Known(4, digest([1, 2, 3, 4])), NOTHING_KNOWN])
    assert owner.events == [("begin", "r"), ("unwanted", 0), ("unwanted", 1), ("resubmitted", "r")]


@pytest.mark.parametrize(("attempt", "live"), [(RAISED, None), (Attempt(0, 7, 0), FIRST), (Attempt(1, 8, 3), FIRST)])
def test_acks_of_other_attempts(owner, attempt, live):
    owner.submit()
    owner.take()
    owner.ack([0], attempt, handle=4)
    (gone,) = owner.take()
    assert (gone.attempt, gone.handle, gone.live) == (attempt, 4, live)


def test_an_ack_of_an_unknown_request(owner):
    owner.ack([0])
    assert owner.take(Gone)[0].live is None


@pytest.mark.parametrize(
    ("attempt", "acts"), [(FIRST, True), (RAISED, True), (HIGHER, True), (Attempt(0, 7, 0), False)]
)
def test_abort_acts_on_its_own_or_a_lower_attempt(owner, attempt, acts):
    owner.submit()
    owner.child.receive("t/1", 100, Abort("r", attempt))
    assert ("r" not in owner.child.requests) is acts
    assert (("dropped", "r") in owner.events) is acts


def test_an_orphan_rests_and_a_lease_ends(owner):
    owner.submit()
    owner.now = 6
    owner.child.tick()
    owner.child.tick()
    assert owner.events[1:] == [("rested", True)]
    owner.ack([0])
    assert owner.events[2:] == [("rested", False)]
    owner.now = 27
    owner.child.tick()
    assert owner.events[3:] == [("dropped", "r")]
    owner.take()
    owner.child.tick()
    assert owner.child._outboxes == {}


def test_an_orphan_that_is_submitted_again_goes_on(owner):
    owner.submit()
    owner.now = 6
    owner.child.tick()
    owner.submit(RAISED, handle=2, peer="t/2")
    assert owner.events[1:] == [("rested", True), ("rested", False), ("resubmitted", "r")]


def test_a_refused_request_is_an_end_at_row_0(owner):
    owner.takes = False
    request = owner.submit(n=2)
    owner.child.fail(request, ErrorInfo(4, "too long", "prompt"))
    held, delta = owner.take()
    assert held.rows.tolist() == [[1, 0, 0, 0]]
    assert delta.rows.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert [end.error.message for _, end in delta.ends] == ["too long", "too long"]


def test_text_rows():
    owner = Owner(TOKENIZER)
    log = owner.submit(text=True).logs[0]
    owner.take()
    owner.child.extend(log, [5, 6, 7])
    log.pieces = ["a", "", "b"]
    log.cut(2, STOP, "!")
    (delta,) = owner.take()
    assert isinstance(delta, TextDelta)
    assert (*rows_of(delta), delta.pieces) == ([[1, 0, 0, 2]], [5, 6], ["a", ""])
    assert delta.ends == [(0, End(FinishReason.STOP, prompt_tokens=3), "!")]


def test_a_spec_of_the_other_hop_is_ignored(owner):
    owner.submit(text=True)
    assert owner.child.requests == {}


def test_other_messages_are_not_its_own(owner):
    assert not owner.child.receive("t/1", 1, Hello("gateway", "x", 1, 1, True, None))
    assert not owner.child.receive("t/1", 1, Turn("r", FIRST, 1))


class TestSuspects:
    def start(self):
        owner = Owner()
        self.other = owner.submit(rid="other", handle=1)
        self.suspect = owner.submit(rid="suspect", handle=2, suspect=True)
        self.third = owner.submit(rid="third", handle=3)
        owner.take()
        owner.child.tick()
        return owner

    def test_it_waits_until_nothing_else_runs_and_its_parent_says_go(self):
        owner = self.start()
        assert owner.events == [("begin", "other")]
        assert owner.take(Turn) == []
        owner.child.finish(self.other.logs[0], STOP)
        owner.child.tick()
        (turn,) = owner.take(Turn)
        assert (turn.rid, turn.handle) == ("suspect", 2)
        owner.child.receive("t/1", 100, Go("third", FIRST))
        owner.child.receive("t/1", 100, Go("suspect", HIGHER))
        assert owner.events == [("begin", "other")]
        owner.now += 0.6
        owner.child.tick()
        assert len(owner.take(Turn)) == 1
        owner.child.receive("t/1", 100, Go("suspect", FIRST))
        owner.child.tick()
        assert owner.events[1:] == [("begin", "suspect")]

    def test_its_turn_ends_when_its_rows_are_acknowledged(self):
        owner = self.start()
        owner.child.finish(self.other.logs[0], STOP)
        owner.child.tick()
        owner.child.receive("t/1", 100, Go("suspect", FIRST))
        owner.child.extend(self.suspect.logs[0], [1, 2, 3, 4])
        owner.take()
        owner.child.tick()
        owner.ack([2], rid="suspect", handle=2)
        assert ("begin", "third") not in owner.events  # three rows were made, but not acknowledged
        owner.child.receive("t/1", 100, AckRows(np.array([[2, 0, 3]], np.int32)))
        assert owner.events[-1] == ("begin", "third")

    def test_nobody_waits_for_a_suspect_that_is_gone(self):
        owner = self.start()
        owner.child.receive("t/1", 100, Abort("suspect", FIRST))
        owner.child.tick()
        assert owner.events[-1] == ("begin", "third")
        owner = self.start()
        owner.now = 4
        for rid, handle in (("other", 1), ("third", 3)):
            owner.ack([0], rid=rid, handle=handle)
        owner.now = 6
        owner.child.tick()
        assert owner.events[-1] == ("begin", "third")
