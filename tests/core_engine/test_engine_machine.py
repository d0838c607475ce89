"""The whole engine, driven by hypothesis: whatever comes and goes, each output is what the request gives alone.

Rules are what front ends, workers and time do to an engine; what holds after each of them is an invariant. In the end
everything is called back and computed to its end on a worker that has room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core_engine.deadlines import Deadlines
from core_engine.eviction import POLICIES
from core_engine.prefix_hash import root_digest
from core_engine.queues import QUEUES
from core_engine.replica import Replica
from core_engine.request import Exit, Request, Sequence
from shared.errors import ErrorCode, RequestError
from shared.messages import FinishReason
from shared.sampling import SamplingParams
from tests.core_engine.simulation import EOS_IDS, Simulation, extend, reference
from tests.core_engine.test_beam_search import naive
from tests.core_engine.test_schedules import target_of

T = TypeVar("T")

POOLS = (11, 12, 16, 28, 60)
"""Blocks of 4, the null block included; sequences of up to ``MAX_MODEL_LEN`` tokens just fit the smallest."""
MAX_MODEL_LEN = 40
MOST_REPLICAS = 3
ROOT = 7
"""The simulated worker's hash of no tokens."""

OPTIONS = {
    "num_blocks": st.sampled_from(POOLS),
    "steps_in_flight": st.integers(1, 3),
    "short_step_s": st.sampled_from([0.0, 0.002, 1.0]),
    "max_num_seqs": st.sampled_from([1, 3, 8]),
    "max_num_batched_tokens": st.sampled_from([5, 16, 64]),
    "max_num_partial_prefills": st.integers(1, 3),
    "enable_chunked_prefill": st.booleans(),
    "enable_prefix_caching": st.booleans(),
    "watermark": st.sampled_from([0.0, 0.1]),
    "policy": st.sampled_from(sorted(QUEUES)),
    "eviction": st.sampled_from(sorted(POLICIES)),
    "priority_ageing_s": st.sampled_from([1.0, 10.0, 1000.0]),
    "chunk_target": st.sampled_from([None, 0.004, 0.02]).map(target_of),
    "max_output_tokens": st.sampled_from([None, None, 7]),
    "num_host_blocks": st.sampled_from([0, 0, 3, 12, 40]),
    "swap_space": st.sampled_from([0.0, 1.0]),
    "kv_offloading_size": st.sampled_from([0.0, 1.0]),
    "preemption_mode": st.sampled_from(["swap", "auto", "recompute"]),
    "transfer_rate": st.sampled_from([0.0, 1e9, 5e5, 1e2]),
}
"""Of the engine; each is drawn for itself."""

PIECES = [(20, 21, 22, 23), (20, 21, 22, 24), (25,), (26, 27), (20, 21, 22, 23, 28, 29, 30, 31), tuple(range(40, 53))]
prompts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(lambda pieces: [i for p in pieces for i in p])
submissions = st.fixed_dictionaries(
    {"prompt": prompts},
    optional={
        "salt": st.just("x"),
        "priority": st.integers(1, 3),
        "tenant": st.sampled_from("ab"),
        "max_tokens": st.sampled_from([None, 1, 2, 5, 12, 30]),
        "ignore_eos": st.just(True),
        "stop_token_ids": st.lists(st.integers(0, 96), min_size=1, max_size=2),
        "logprobs": st.sampled_from([0, 3]),
    },
)
sampled = st.fixed_dictionaries(
    {}, optional={"n": st.integers(2, 4), "prompt_logprobs": st.just(1), "min_tokens": st.just(1)}
)
searched = st.fixed_dictionaries(
    {"beam_width": st.integers(1, 4)},
    optional={
        "early_stopping": st.sampled_from([True, "never"]),
        "length_penalty": st.sampled_from([0.5, 2.0]),
        "min_tokens": st.just(1),
    },
)


which = st.integers(0, 63)
"""Draws one of those that there are (``pick``)."""


def pick(found: SequenceOf[T], which: int) -> T:
    return found[which % len(found)]


def with_whole_prompts(options: dict[str, Any]) -> dict[str, Any]:
    """Without chunks, the longest prompt has to fit a step, and there is no target to cut for."""
    if not options["enable_chunked_prefill"]:
        options |= {"max_num_batched_tokens": 64, "chunk_target": None}
    return options


def alive_of(request: Request) -> list[Sequence]:
    """The sequences that wait, run or rest; a search is where its leader is, or has beams."""
    if request.search is not None:
        return [] if request.search.is_over else [request.search.leader]
    return [sequence for sequence in request.sequences if sequence.finish_reason is None]


def check_replica(replica: Replica, max_num_seqs: int) -> None:
    replica.check()
    slots, occupied = replica.slots, replica.slots.occupied()
    assert len(occupied) == slots.num_slots - slots.num_free
    assert replica.num_active <= max_num_seqs
    assert replica.num_draining_preemptions == sum(sequence.exit is Exit.PREEMPT for sequence in occupied)
    for sequence in occupied:
        slot = sequence.slot
        assert slot is not None
        assert slots.sequences[slot] is sequence
        assert slots.capacity[slot] == (len(sequence.blocks) - sequence.borrows) * replica.kv.block_size
        assert slots.num_computed[slot] <= slots.capacity[slot] or sequence.borrows
        assert slots.num_tokens[slot] <= slots.limit[slot]
        assert slots.leaving[slot] == (sequence.exit is not None)
        assert slots.ended[slot] == (sequence.exit in (Exit.FINISH, Exit.ABORT))
        assert not slots.decoding[slot] or not slots.leaving[slot]
        if sequence in replica.prefilling:
            assert sequence.exit is None
            assert not slots.decoding[slot]
            assert slots.num_computed[slot] < slots.num_tokens[slot]
    assert set(replica.prefilling) <= set(occupied)


class EngineMachine(RuleBasedStateMachine):
    """``EngineCore`` with one to three simulated workers, or none for a while."""

    simulation: Simulation

    @initialize(options=st.fixed_dictionaries(OPTIONS).map(with_whole_prompts))
    def start(self, options: dict[str, Any]) -> None:
        self.simulation = Simulation(max_model_len=MAX_MODEL_LEN, max_num_queued_reqs=40, **options)
        self.core = self.simulation.core
        self.deadlines = Deadlines(self.core.clock)
        self.deadly: Request | None = None

    # -- front ends ------------------------------------------------------------------------------------------------

    @rule(fields=submissions, more=sampled, seconds=st.sampled_from([None, None, None, 1.0, 20.0]))
    def arrive(self, fields: dict[str, Any], more: dict[str, Any], seconds: float | None) -> None:
        self.submit(seconds, **(fields | more))

    @rule(several=st.lists(st.tuples(submissions, sampled), min_size=2, max_size=6))
    def arrive_together(self, several: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for fields, more in several:
            self.submit(None, **(fields | more))

    @rule(fields=submissions, more=searched, n=st.integers(1, 4), seconds=st.sampled_from([None, None, None, 20.0]))
    def search(self, fields: dict[str, Any], more: dict[str, Any], n: int, seconds: float | None) -> None:
        self.submit(seconds, temperature=0.0, n=min(n, more["beam_width"]), **(fields | more))

    @rule(fields=submissions, count=st.integers(1, 30))
    def come_from_elsewhere(self, fields: dict[str, Any], count: int) -> None:
        """Another engine computed the first tokens."""
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        request = Request("", params, np.array(fields["prompt"], np.int32), 0, 0.0, frozenset())
        most = min(count, fields.get("max_tokens") or MAX_MODEL_LEN)
        ids, _ = reference(request, 0, len(request.prompt) + most)
        stops = {*EOS_IDS, *fields.get("stop_token_ids", [])}
        until = next((index + 1 for index, token in enumerate(ids) if token in stops), len(ids))
        self.submit(None, given=[ids[:until]], **fields)

    @precondition(lambda self: self.simulation.requests)
    @rule(which=which, fields=submissions)
    def follow_up(self, which: int, fields: dict[str, Any]) -> None:
        """A conversation goes on after what was said."""
        request = pick(self.simulation.requests, which)
        said = [*request.prompt.tolist(), *self.simulation.outputs[request.rid, 0], *fields["prompt"]]
        self.submit(None, **(fields | {"prompt": said, "salt": request.cache_salt}))

    @precondition(lambda self: self.simulation.live())
    @rule(which=which, whole=st.booleans())
    def abort(self, which: int, whole: bool) -> None:
        sequence = pick(self.simulation.live(), which)
        for each in sequence.request.sequences if whole else [sequence]:
            self.core.end(each, FinishReason.ABORT)

    @precondition(lambda self: self.simulation.live())
    @rule(which=which, resting=st.booleans())
    def rest(self, which: int, resting: bool) -> None:
        """A front end is lost, or is back and submits its request again."""
        request = pick(self.simulation.live(), which).request
        for sequence in request.sequences if not resting else []:
            self.core.rename(sequence, sequence.handle + 1000)
        self.simulation.rest(request, resting)

    @precondition(lambda self: self.simulation.live())
    @rule(which=which, kept=st.integers(0, 30))
    def replace(self, which: int, kept: int) -> None:
        """A front end comes back with fewer tokens than the engine has."""
        sequence = pick(self.simulation.live(), which)
        output = self.simulation.outputs[sequence.request.rid, sequence.choice]
        try:
            self.simulation.replace(sequence, output[:kept])
        except RequestError:  # a smaller worker has joined since
            self.simulation.fail(sequence.request)

    # -- workers ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.core.replicas)
    @rule(which=which)
    def plan(self, which: int) -> None:
        self.plan_on(pick(self.core.replicas, which))

    @precondition(lambda self: any(self.simulation.in_flight.values()))
    @rule(which=which)
    def settle(self, which: int) -> None:
        self.settle_on(pick([each for each in self.core.replicas if self.simulation.in_flight[each]], which))

    @precondition(lambda self: self.core.replicas)
    @rule(turns=st.integers(1, 8))
    def turn(self, turns: int) -> None:
        """All workers get on; an engine plans whenever it can."""
        for _ in range(turns):
            for replica in self.core.replicas:
                while self.plan_on(replica):
                    pass
            for replica in list(self.core.replicas):
                if self.simulation.in_flight[replica]:
                    self.settle_on(replica)
            self.let_go()

    @precondition(lambda self: len(self.core.replicas) < MOST_REPLICAS)
    @rule(num_blocks=st.sampled_from(POOLS))
    def join(self, num_blocks: int) -> None:
        self.simulation.start_worker(num_blocks)

    @precondition(lambda self: self.core.replicas)
    @rule(which=which, how=st.sampled_from(["leaves", "is killed", "is lost on the way"]))
    def go(self, which: int, how: str) -> None:
        replica = pick(self.core.replicas, which)
        if how == "leaves":
            replica.leaving = True
            self.let_go()
        else:
            self.simulation.kill_worker(replica, blames=how == "is killed")

    @precondition(lambda self: self.simulation.live())
    @rule(which=which)
    def become_deadly(self, which: int) -> None:
        """From now on each worker that computes a certain request dies of it, and is started again."""
        self.deadly = pick(self.simulation.live(), which).request

    # -- the rest --------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 5.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.simulation.now += seconds

    @rule()
    def reset_prefix_cache(self) -> None:
        named = [block for pool in self.pools() for block in pool._blocks if block.digest is not None]
        hosts = [replica.kv.host.pool for replica in self.core.replicas if replica.kv.host is not None]
        num_copies = sum(len(host._by_digest) for host in hosts)
        found = self.core.reset_prefix_cache()
        assert found.num_host == num_copies
        assert not any(host._by_digest for host in hosts)
        assert found.num_held == sum(block.ref > 0 for block in named)
        assert found.num_free == len(named) - found.num_held
        assert not any(block.digest for pool in self.pools() for block in pool._blocks)

    # -- what holds at every moment --------------------------------------------------------------------------------

    @invariant()
    def replicas_are_consistent(self) -> None:
        for replica in self.core.replicas:
            check_replica(replica, self.simulation.config.scheduler.max_num_seqs)

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        waiting, replicas = list(self.core.waiting), self.core.replicas
        running = [sequence for replica in replicas for sequence in replica.slots.occupied()]
        places = Counter(waiting + running)
        assert not places or max(places.values()) == 1, "a sequence is in two places"
        assert len(self.core.waiting) == len(waiting)
        assert self.core.waiting.num_prompt_tokens == sum(sequence.prompt_len for sequence in waiting)
        for request in self.simulation.requests:
            for sequence in alive_of(request):
                search = request.search
                beams = search.live if search is not None and search.replica is not None else []
                goes = any(each.exit is Exit.PREEMPT for each in [sequence, *beams])
                assert (sequence in places or bool(beams)) == (not sequence.resting or goes), f"{sequence} is lost"
                places -= Counter([sequence, *beams])
        assert all(sequence.exit is not None for sequence in places), "what has ended is still there"

    @invariant()
    def cached_blocks_hold_what_they_are_named(self) -> None:
        for replica in self.core.replicas:
            pool, kv = replica.kv.pool, self.simulation.workers[replica].kv.reshape(-1, replica.kv.block_size)
            roots = {root_digest(salt) for salt in ("", "x")}
            for block in pool._blocks:
                if block.digest is not None:
                    parent = next((each[block.parent] for each in pool._shards if block.parent in each), None)
                    assert block.parent in roots if parent is None else parent.digest == block.parent, "no parent"
                    state, found = ROOT if parent is None else int(kv[parent.id, -1]), []
                    for token in np.frombuffer(block.ids, np.int32).tolist():
                        found.append(state := extend(state, token))
                    assert kv[block.id].tolist() == found, f"{block} holds something else than its name says"

    def teardown(self) -> None:
        """Call everybody back, and compute all there is."""
        if not hasattr(self, "core"):
            return
        for request in self.simulation.requests:
            self.simulation.rest(request, False)
        if not self.core.is_ready:
            self.simulation.start_worker(POOLS[-1])
        self.simulation.run()
        assert not self.simulation.live(), self.simulation.live()
        self.simulation.check_outputs()
        self.simulation.check_empty()
        self.check_searches()
        self.check_metrics()

    # -- what rules and invariants have in common ------------------------------------------------------------------

    def submit(self, seconds: float | None, **fields: Any) -> None:
        try:
            request = self.simulation.submit(**fields)
        except RequestError as error:
            self.check_refusal(error, fields)
            return
        if seconds is not None and not request.finished:
            self.deadlines.set(request, seconds)

    def check_refusal(self, error: RequestError, fields: dict[str, Any]) -> None:
        """What is refused could not run, or there is too much already."""
        if error.code is ErrorCode.OVERLOADED:
            assert len(self.core.waiting) + fields.get("n", 1) > self.simulation.config.max_num_queued_reqs
            return
        wanted = len(fields["prompt"]) + max(1, fields.get("max_tokens", 16) or 0)
        capacity = min(self.core.kv_capacity or MAX_MODEL_LEN, MAX_MODEL_LEN)
        assert wanted > capacity or "beam_width" in fields, str(error)

    def plan_on(self, replica: Replica) -> bool:
        for request in self.deadlines.expired():
            self.simulation.fail(request)
        step = self.simulation.plan(replica)
        if step is None:
            return False
        config = self.core.scheduler.config
        num_prefills = int(step.prefill[:, 2].sum())
        assert num_prefills <= config.max_prefill_tokens
        assert num_prefills + len(step.decode) <= config.max_num_batched_tokens
        return True

    def settle_on(self, replica: Replica) -> None:
        computed = {replica.slots.sequence_at(slot).request for slot in replica.window[0].rows.tolist()}
        if self.deadly in computed:
            self.simulation.kill_worker(replica)
            self.simulation.start_worker(replica.kv.pool.num_blocks)
        else:
            self.simulation.settle(replica)

    def let_go(self) -> None:
        for replica in list(self.core.replicas):
            if replica.leaving and replica.is_idle:
                self.simulation.kill_worker(replica)

    def pools(self) -> list[Any]:
        return [replica.kv.pool for replica in self.core.replicas]

    def check_searches(self) -> None:
        for request in self.simulation.requests:
            if request.search is not None:
                expected = naive(request, request.search.leader.limit)
                for sequence in request.sequences:
                    if sequence.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
                        output = self.simulation.outputs[request.rid, sequence.choice]
                        assert (output, sequence.finish_reason) == expected[sequence.choice], request.rid

    def check_metrics(self) -> None:
        """Each request is counted once, by the reason for which it ended."""
        samples = self.core.metrics.samples(self.core.replicas, len(self.core.waiting))
        found = {name: value for name, labels, value in samples if not labels}
        by_reason = [value for name, _, value in samples if name == "vllm:request_success_total"]
        assert sum(by_reason) == len(self.simulation.requests)
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        assert all(value >= 0 for _, _, value in samples)


def test_every_schedule() -> None:
    profile = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(EngineMachine, settings=profile)  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_very_many_schedules() -> None:
    profile = settings(
        max_examples=5000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(EngineMachine, settings=profile)  # type: ignore[no-untyped-call]
