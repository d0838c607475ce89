"""The lower side of a hop, message by message; and the parts that both sides use."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import ErrorCode
from shared.hop import NOTHING_KNOWN, Parent, Request, RunningClock, Timers, digest
from shared.hop.children import ChildSet
from shared.hop.log import Log
from shared.messages import (
    FINISHED,
    Abort,
    Ack,
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
    Turn,
)
from shared.sampling import SamplingParams

STOP = End(FinishReason.STOP)
FAILED = End(FinishReason.ERROR, error=ErrorInfo(ErrorCode.TOO_LARGE, "too long"))


class Owner:
    def __init__(self, *children):
        self.now, self.sent, self.full, self.events = 0.0, [], set(), []
        self.grown = lambda growths: None
        self.parent = Parent(
            send=self.send,
            clock=lambda: self.now,
            timers=Timers(),
            events=self,
            children=children,
            uid=lambda: 77,
        )

    def send(self, name, message):
        if name in self.full:
            return False
        self.sent.append((name, message))
        return True

    def take(self, kind=object):
        self.parent.flush()
        sent, self.sent = self.sent, []
        return [message for _, message in sent if isinstance(message, kind)]

    def accepted(self, request):
        self.events.append(("accepted", request.prompt_tokens))

    def grew(self, growths):
        self.events.append(("grew", [(log.choice, start, list(log.ids[start:])) for log, start in growths]))
        self.grown(growths)

    def superseded(self, request, live):
        self.events.append(("superseded", live))

    def open(self, rid="r", n=1, **options):
        request = self.parent.open(rid, TextSpec(SamplingParams(n=n), text="x"), **options)
        return request

    def receive(self, message, name="T", boot=5):
        return self.parent.receive(name, boot, message)

    def delta(self, rows, tokens=(), ends=(), **options):
        tokens = np.array(tokens, np.int32)
        pieces = [f"<{token}>" for token in tokens]
        delta = TextDelta(np.array(rows, np.int32).reshape(-1, 4), tokens, pieces, list(ends))
        return self.receive(delta, **options)

    def advance(self, seconds, step=0.25):
        while seconds > 0:
            self.now, seconds = self.now + step, seconds - step
            self.parent.tick()

    def crash(self, boot):
        """The child is heard again, with another boot."""
        self.receive(Hello("tokenizer", "T", 1, 1, True, None), boot=boot)


@pytest.fixture
def owner():
    return Owner("T")


def test_a_request_is_submitted_and_accepted(owner):
    request = owner.open(n=2)
    (submit,) = owner.take()
    assert (submit.rid, submit.attempt, submit.counts.tolist()) == ("r", Attempt(1, 77, 0), [0, 0])
    assert submit.known == [NOTHING_KNOWN] * 2
    owner.receive(Held(np.array([[submit.handle, 0, 0, 0]], np.int32)))
    assert owner.events == []
    for _ in range(2):
        owner.receive(Held(np.array([[submit.handle, 1, 12, 0]], np.int32)))
    assert owner.events == [("accepted", 12)]
    assert request.prompt_tokens == 12


def test_rows_of_a_message_come_in_one_call(owner):
    one, two = owner.open("one"), owner.open("two")
    owner.take()
    owner.delta([[1, 0, 0, 2], [2, 0, 0, 1], [9, 0, 0, 1], [1, 3, 0, 1]], [4, 5, 6, 7, 8])
    assert owner.events == [("grew", [(0, 0, [4, 5]), (0, 0, [6])])]
    assert (one.logs[0].pieces, two.logs[0].pieces) == (["<4>", "<5>"], ["<6>"])


def test_known_rows_are_trimmed_and_gaps_refused(owner):
    log = owner.open().logs[0]
    owner.take()
    owner.delta([[1, 0, 0, 2]], [4, 5])
    owner.delta([[1, 0, 0, 3]], [4, 5, 6])
    owner.delta([[1, 0, 1, 1]], [5])
    owner.delta([[1, 0, 4, 1]], [8])
    assert list(log.ids) == [4, 5, 6]
    assert [event[1] for event in owner.events] == [[(0, 0, [4, 5])], [(0, 2, [6])]]
    (ack,) = owner.take()
    assert (ack.entries[0].have, ack.entries[0].resync, ack.entries[0].beat) == ([3], True, False)
    owner.delta([[1, 0, 5, 1]], [9])
    assert owner.take() == []  # once is enough for the deltas that were under way
    owner.now += 0.3
    owner.delta([[1, 0, 5, 1]], [9])
    assert len(owner.take(Ack)) == 1


@pytest.mark.parametrize("rows", [[[1, 0, 0, 2]], [[1, 0, 0, 3]], [[1, 0, 2, 1]], [[1, 0, 3, 0]]])
def test_an_end_row_has_its_place_after_the_tokens(owner, rows):
    log = owner.open().logs[0]
    owner.take()
    owner.delta([[1, 0, 0, 3]], [4, 5, 6])
    owner.delta(rows, [4, 5, 6][rows[0][2] :][: rows[0][3]], [(0, STOP, "!")])
    assert (log.end is not None) is (rows[0][2] + rows[0][3] == 3)


def test_an_ended_choice_is_acknowledged_at_once_and_a_request_that_is_over_forgotten(owner):
    request = owner.open(n=2)
    owner.take()
    owner.delta([[1, 0, 0, 1]], [4], [(0, End(FinishReason.STOP, prompt_tokens=9), "!")])
    assert owner.take(AckRows)[0].rows.tolist() == [[1, 0, FINISHED]]
    assert (request.logs[0].last_piece, request.prompt_tokens) == ("!", 9)
    owner.delta([[1, 0, 0, 2]], [4, 5])
    assert owner.take() == []
    owner.delta([[1, 1, 0, 0]], [], [(0, STOP, "")])
    assert owner.take(AckRows)[0].rows.tolist() == [[1, 1, FINISHED]]
    assert request.over
    assert owner.parent.requests == {}


def test_two_choices_that_end_in_one_delta_are_both_acknowledged(owner):
    owner.open(n=2)
    owner.take()
    owner.delta([[1, 0, 0, 1], [1, 1, 0, 0]], [4], [(0, STOP, ""), (1, STOP, "")])
    assert owner.take(AckRows)[0].rows.tolist() == [[1, 0, FINISHED], [1, 1, FINISHED]]
    assert owner.parent.requests == {}


def test_a_failed_choice_ends_the_request(owner):
    owner.open(n=2)
    owner.take()
    owner.delta([[1, 1, 0, 0]], [], [(0, FAILED, "")])
    assert [type(message) for message in owner.take()] == [Abort]
    assert owner.parent.requests == {}
    assert owner.events == [("grew", [(1, 0, [])])]


def test_an_owner_may_cut_what_grew(owner):
    log = owner.open().logs[0]
    owner.take()
    owner.grown = lambda growths: growths[0][0].cut(1, STOP, "")
    owner.delta([[1, 0, 0, 3]], [4, 5, 6])
    assert list(log.ids) == [4]
    assert owner.take(AckRows)[0].rows.tolist() == [[1, 0, FINISHED]]


def test_acknowledgements_wait_while_a_child_is_full(owner):
    owner.open()
    owner.take()
    owner.full = {"T"}
    owner.delta([[1, 0, 0, 0]], [], [(0, STOP, "")])
    assert owner.take() == []
    owner.full.clear()
    owner.now += 0.1
    assert owner.take(AckRows)[0].rows.tolist() == [[1, 0, FINISHED]]


def test_the_beat_acknowledges_everything_in_one_message(owner):
    for rid in "abc":
        owner.open(rid)
    owner.take()
    owner.delta([[1, 0, 0, 2]], [4, 5])
    owner.advance(1)
    (ack,) = owner.take()
    assert [(entry.rid, entry.have, entry.resync, entry.beat) for entry in ack.entries] == [
        ("a", [2], False, True),
        ("b", [0], False, True),
        ("c", [0], False, True),
    ]
    owner.delta([[2, 0, 0, 1]], [7])
    owner.advance(1)
    assert [entry.resync for entry in owner.take(Ack)[0].entries] == [True, False, True]


def test_a_submit_that_nobody_takes_is_tried_again(owner):
    owner.full = {"T"}
    owner.open()
    assert owner.take() == []
    owner.full.clear()
    assert owner.take() == []
    owner.now += 0.1
    assert [type(message) for message in owner.take()] == [Submit]
    assert owner.take() == []


def test_a_request_waits_for_children():
    owner = Owner()
    owner.open()
    assert owner.take() == []
    owner.parent.set_children(["T"])
    assert [type(message) for message in owner.take()] == [Submit]


def test_an_unreachable_child_is_passed_over():
    owner = Owner("T", "U")
    first = owner.parent.children.order("r")[0].name
    owner.full = {first}
    request = owner.open()
    assert request.lower.child.name != first


def test_children_that_are_not_ready_come_last():
    owner = Owner("T", "U")
    for name in "TU":
        owner.parent.set_usable(name, False)
        owner.open(name)
        assert owner.sent[-1][0] != name
        owner.parent.set_usable(name, True)


def test_a_restarted_child_gets_its_requests_again(owner):
    owner.crash(boot=5)
    owner.open()
    owner.take()
    owner.delta([[1, 0, 0, 2]], [4, 5])
    owner.crash(boot=6)
    (submit,) = owner.take(Submit)
    assert (submit.attempt, submit.handle, submit.tokens.tolist()) == (Attempt(2, 77, 0), 2, [4, 5])
    assert submit.known == [Known(2, digest([4, 5]))]
    owner.delta([[1, 0, 2, 1]], [6])  # of the attempt that is over
    owner.delta([[2, 0, 2, 1]], [9], boot=5)  # of a life that is over
    assert len(owner.events) == 1
    owner.delta([[2, 0, 2, 1]], [6], boot=6)
    assert owner.events[1:] == [("grew", [(0, 2, [6])])]


def test_a_silent_child_is_replaced():
    owner = Owner("T", "U")
    request = owner.open()
    first, handle = request.lower.child.name, request.lower.handle
    owner.advance(4)
    owner.receive(Held(np.array([[handle, 0, 0, 0]], np.int32)), name=first)
    owner.advance(4)
    assert request.lower.child.name == first
    owner.advance(2)
    assert request.lower.child.name != first
    assert request.lower.attempt == Attempt(2, 77, 0)


def test_a_child_whose_connection_is_lost_is_replaced_at_once():
    owner = Owner("T", "U")
    request = owner.open()
    first = request.lower.child.name
    (other,) = {"T", "U"} - {first}
    owner.take()
    owner.full = {first}
    owner.parent.lost(first)
    assert owner.sent == [(other, submit := owner.sent[0][1])]
    assert (submit.rid, submit.attempt) == ("r", Attempt(2, 77, 0))
    owner.full.clear()
    owner.parent.close(request)
    assert owner.open().lower.child.name == other  # the lost one has not said that it is ready
    owner.parent.set_usable(first, True)
    assert owner.open("again").lower.child.name == owner.parent.children.order("again")[0].name
    owner.parent.lost("nobody")
    owner.parent.reached("nobody")


def test_what_waits_for_the_only_child_goes_out_when_it_is_reached(owner):
    placed = owner.open("placed")
    owner.take()
    owner.full = {"T"}
    owner.parent.lost("T")
    owner.open("new")
    assert owner.take() == []
    assert placed.lower.attempt.g == 1  # there is nobody to move it to
    owner.full.clear()
    assert owner.take() == []  # it was full just now
    owner.parent.reached("T")
    assert [submit.rid for submit in owner.take(Submit)] == ["new"]
    owner.crash(boot=6)
    assert owner.take() == []  # its first life: nothing was lost
    owner.crash(boot=7)
    assert sorted((submit.rid, submit.attempt.g) for submit in owner.take(Submit)) == [("new", 2), ("placed", 2)]


def test_all_children_are_lost_and_one_comes_back():
    owner = Owner("T", "U")
    request = owner.open()
    owner.take()
    owner.full = {"T", "U"}
    owner.parent.lost("T")
    owner.parent.lost("U")
    assert owner.take() == []
    last = request.lower.child.name
    (other,) = {"T", "U"} - {last}
    owner.full = {last}
    owner.parent.reached(other)
    assert [submit.rid for submit in owner.take(Submit)] == ["r"]
    assert request.lower.child.name == other


def test_a_child_that_is_gone_is_replaced():
    owner = Owner("T", "U")
    request = owner.open()
    other = next(name for name in "TU" if name != request.lower.child.name)
    owner.parent.set_children([other])
    assert (request.lower.child.name, request.lower.attempt.g) == (other, 2)
    owner.parent.set_children([])
    owner.parent.set_children(["V"])
    owner.take()
    assert request.lower.child.name == "V"
    assert owner.delta([[1, 0, 0, 1]], [1], name="T")


def test_gone_unknown_submits_again(owner):
    owner.open()
    owner.take()
    owner.receive(Gone("r", Attempt(1, 77, 0), 9, None))  # another handle
    assert owner.take() == []
    owner.receive(Gone("r", Attempt(1, 77, 0), 1, None))
    assert owner.take(Submit)[0].attempt == Attempt(2, 77, 0)


def test_superseded_before_acceptance_raises_above(owner):
    owner.open()
    owner.take()
    owner.receive(Gone("r", Attempt(1, 77, 0), 1, Attempt(4, 88, 2)))
    assert owner.take(Submit)[0].attempt == Attempt(5, 77, 0)
    assert owner.events == []


def test_superseded_after_acceptance_gives_up(owner):
    owner.open()
    owner.take()
    owner.receive(Held(np.array([[1, 1, 3, 0]], np.int32)))
    owner.receive(Gone("r", Attempt(1, 77, 0), 1, Attempt(4, 88, 2)))
    assert owner.take() == []
    assert owner.events[1:] == [("superseded", Attempt(4, 88, 2))]
    assert owner.parent.requests == {}


@pytest.mark.parametrize("keep", [False, True])
def test_close(owner, keep):
    request = owner.open()
    owner.take()
    owner.parent.close(request, keep=keep)
    owner.parent.close(request, keep=keep)
    assert [type(message) for message in owner.take()] == ([] if keep else [Abort])
    assert owner.parent.requests == {}


class TestResume:
    KNOWN = (Known(2, digest([4, 5])),)

    def test_here(self, owner):
        request = owner.open()
        assert owner.parent.find("r", self.KNOWN) is None
        owner.delta([[1, 0, 0, 3]], [4, 5, 6])
        assert owner.parent.find("r", self.KNOWN) is request
        assert owner.parent.find("r", [Known(2, digest([4, 6]))]) is None
        assert owner.parent.find("r", self.KNOWN * 2) is None
        assert owner.parent.find("s", self.KNOWN) is None

    def test_elsewhere(self, owner):
        owner.open(known=self.KNOWN)
        (submit,) = owner.take()
        assert (submit.known, submit.counts.tolist()) == (list(self.KNOWN), [0])

    def test_ended_choices_are_not_asked_for_again(self, owner):
        owner.open(n=2, known=self.KNOWN * 2, ended=[1])
        (submit,) = owner.take()
        assert submit.known == [self.KNOWN[0], NOTHING_KNOWN]
        assert [end is not None for end in submit.ends] == [False, True]

    def test_only_the_terminal_was_lost(self, owner):
        assert owner.open(known=self.KNOWN, ended=[0]).over
        assert owner.take() == []

    def test_it_replaces_what_does_not_fit(self, owner):
        owner.open()
        owner.open(known=self.KNOWN)
        assert [submit.handle for submit in owner.take()] == [1, 2]
        owner.delta([[1, 0, 0, 1]], [4])
        assert owner.events == []


class TestPoison:
    def test_two_crashes_make_a_suspect_and_three_in_quarantine_convict(self, owner):
        request = owner.open()
        owner.crash(1)
        owner.receive(Held(np.array([[1, 1, 3, 0]], np.int32)), boot=1)
        suspects = []
        for boot in range(2, 7):
            owner.sent.clear()
            owner.crash(boot)
            submits = owner.take(Submit)
            if not submits:
                break
            suspects.append(submits[0].suspect)
            if submits[0].suspect:
                owner.receive(Turn("r", submits[0].attempt, submits[0].handle), boot=boot)
                assert len(owner.take(Go)) == 1
        assert suspects == [False, True, True, True]
        assert request.logs[0].end.error.code == ErrorCode.POISON
        assert owner.parent.requests == {}

    def test_crashes_outside_quarantine_do_not_convict(self, owner):
        request = owner.open()
        owner.crash(1)
        for boot in range(2, 20):
            owner.crash(boot)
        assert request.lower.suspect
        assert not request.over

    def test_rows_in_quarantine_clear_a_suspect_and_are_acknowledged_at_once(self, owner):
        request = owner.open()
        for boot in (1, 2, 3, 4):
            owner.crash(boot)
        submit = owner.take(Submit)[-1]
        assert submit.suspect
        owner.receive(Turn("r", submit.attempt, submit.handle), boot=4)
        owner.take()
        owner.delta([[submit.handle, 0, 0, 2]], [1, 2], boot=4)
        assert owner.take(AckRows)[0].rows.tolist() == [[submit.handle, 0, 2]]
        assert request.lower.suspect
        owner.delta([[submit.handle, 0, 2, 1]], [3], boot=4)
        assert owner.take(AckRows)[0].rows.tolist() == [[submit.handle, 0, 3]]
        assert (request.lower.suspect, request.lower.strikes) == (False, 0)

    def test_blame_follows_a_request_that_moved_away(self):
        owner = Owner("T", "U")
        request = owner.open()
        first = request.lower.child.name
        owner.receive(Held(np.array([[request.lower.handle, 1, 3, 0]], np.int32)), name=first, boot=1)
        owner.advance(6)
        assert request.lower.child.name != first
        placed = request.lower.handle
        owner.receive(Hello("tokenizer", first, 1, 1, True, None), name=first, boot=2)
        assert (request.lower.strikes, request.lower.handle) == (1, placed)


def test_other_messages_are_not_its_own(owner):
    assert not owner.receive(Hello("tokenizer", "T", 1, 1, True, None))
    assert not owner.receive(Hello("tokenizer", "T", 1, 1, True, None), name="unknown")
    assert owner.receive(TokenDelta(np.zeros((0, 4), np.int32), np.zeros(0, np.int32), []))


# -- the parts -------------------------------------------------------------------------------------------------------


def test_digest_is_over_int32():
    assert digest([]) == NOTHING_KNOWN.digest
    assert digest([1, 256]).hex() == digest(np.array([1, 256], np.int32).tolist()).hex()
    assert len({digest(ids) for ids in ([1], [2], [1, 2], [2, 1], [])}) == 5


def test_log_digests_in_any_order():
    log = Log(Request("r", TextSpec(SamplingParams())), 0, range(10))
    for count in (3, 7, 2, 10, 0, 10):
        assert log.digest_at(count) == digest(range(count))
    log.cut(4, STOP)
    assert (log.known(), log.rows) == (Known(4, digest(range(4))), 5)
    assert log.has(Known(4, digest(range(4))))
    assert not log.has(Known(5, digest(range(5))))


def test_rendezvous_order():
    names = ["a", "b", "c"]
    one, two = ChildSet(names), ChildSet(reversed(names))
    firsts = set()
    for i in range(100):
        order = [link.name for link in one.order(str(i))]
        assert order == [link.name for link in two.order(str(i))]
        firsts.add(order[0])
        one_less = ChildSet(name for name in names if name != order[2])
        assert [link.name for link in one_less.order(str(i))] == order[:2]
    assert firsts == set(names)


def test_running_clock_does_not_count_a_stop():
    time = 100.0
    clock = RunningClock(lambda: time, largest_step_s=0.5)
    time += 0.25
    assert clock() == 0.25
    time += 300
    assert clock() == 0.75


def test_a_gateway_that_forgot_a_request_never_uses_its_attempt_again():
    """Else an Abort or a Submit of the first opening that is still on its way would act on the second."""
    owner = Owner("T")
    draws = iter((77, 78))
    owner.parent = Parent(
        send=owner.send,
        clock=lambda: owner.now,
        timers=Timers(),
        events=owner,
        children=("T",),
        uid=lambda: next(draws),
    )
    owner.parent.close(owner.open())
    owner.open()
    first, second = owner.take(Submit)
    assert first.attempt != second.attempt
    assert not first.attempt.newer(second.attempt)
    assert not second.attempt.newer(first.attempt)
    assert first.handle != second.handle


def test_the_unique_part_is_random_by_default():
    owner = Owner("T")
    parents = [
        Parent(send=owner.send, clock=lambda: 0.0, timers=Timers(), events=owner, children=("T",)) for _ in range(2)
    ]
    for parent in parents:
        parent.open("r", TextSpec(SamplingParams(), text="x"))
    one, other = owner.take(Submit)
    assert one.attempt.uid != other.attempt.uid


def test_an_abort_that_cannot_go_out_goes_later(owner):
    one, two = owner.open("one"), owner.open("two")
    owner.take()
    owner.full.add("T")
    owner.parent.close(one)
    owner.parent.close(two)
    assert owner.take(Abort) == []
    owner.full.clear()
    owner.now += 1
    assert [abort.rid for abort in owner.take(Abort)] == ["one", "two"]
    assert owner.take(Abort) == []
