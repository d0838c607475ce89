"""A worker that computes nothing but checks everything, and an engine core driven by it without sockets.

The simulated KV cache holds (token, hash of the prefix up to it) at each position. Each row of a step re-reads its
whole prefix through the block table: a block that was given away too early, shared wrongly or cached wrongly shows as
a wrong hash. The next token is a function of the prefix hash, so a right schedule gives the tokens of ``reference``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt

from core_engine.core import CoreConfig, EngineCore
from core_engine.host_memory import HostMemorySpec
from core_engine.kv_cache_manager import slot_of
from core_engine.replica import Replica
from core_engine.request import Request, Sequence, stop_ids_of
from core_engine.scheduler import SchedulerConfig
from core_engine.step_record import StepRecord
from shared.codec import encode
from shared.logprobs import pack_records
from shared.messages import Epoch, FinishReason, SlotInit, Step, StepResult
from shared.sampling import SamplingParams
from tests.core_engine.simulated_transfers import EMPTY, SimulatedTransfers

VOCAB = 97
EOS_IDS = (3, 34, 65)
BLOCK_BYTES = 1000


class Corrupt(AssertionError):
    """The worker read something that is not the prefix of its sequence."""


def extend(parent: int, token: int) -> int:
    return (parent * 1_000_003 ^ (token + 12_345) * 2_654_435_761) & 0x3FFF_FFFF_FFFF


def sample(prefix_hash: int, choice: int) -> int:
    return (prefix_hash >> 7) * (2 * choice + 1) % VOCAB


def record_of(prefix_hash: int) -> bytes:
    """The log-probability record of the token that ends a prefix."""
    return b"%d" % prefix_hash


def top_record(prefix_hash: int, token: int, count: int) -> bytes:
    """The record of a token with the most probable ones after a prefix: a distribution that its hash determines."""
    logprobs = distribution(prefix_hash)
    top = np.argsort(-logprobs, kind="stable")[:count]
    ids = np.concatenate([[token], top]).astype(np.int32)
    rank = 1 + (logprobs > logprobs[token]).sum()
    return pack_records(np.array([rank], np.int32), ids[None], logprobs[ids][None])[0]


def distribution(prefix_hash: int) -> npt.NDArray[np.float32]:
    """[VOCAB] log-probabilities after a prefix."""
    logits = np.random.default_rng(prefix_hash).normal(0.0, 2.0, VOCAB)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def reference(request: Request, choice: int, limit: int) -> tuple[list[int], FinishReason]:
    """What the request gives alone, one token after another, with all the memory in the world."""
    state = 7
    for token in request.prompt.tolist():
        state = extend(state, token)
    output: list[int] = []
    params = request.params
    if params.max_tokens == 0:
        return [], FinishReason.LENGTH
    while True:
        token = sample(state, choice)
        output.append(token)
        if token in request.stop_ids and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == limit - len(request.prompt):
            return output, FinishReason.LENGTH
        state = extend(state, token)


@dataclasses.dataclass
class SlotState:
    init: SlotInit
    tokens: list[int]
    hashes: list[int]
    table: list[int] = dataclasses.field(default_factory=list)


class SimulatedWorker:
    """Executes steps one by one against a KV cache that remembers what was written where."""

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, num_host_blocks: int = 0, seed: int = 0
    ) -> None:
        self.block_size = block_size
        self.kv = np.full(num_blocks * block_size, EMPTY, np.int64)
        self.transfers = SimulatedTransfers(self.kv, block_size, num_host_blocks, seed)
        self.slots: dict[int, SlotState] = {}
        self.num_slots = num_slots
        self.number = 0

    def execute(self, step: Step, is_last: bool = True) -> StepResult:
        """
        Args:
            is_last: no other step has arrived.
        """
        encode(step, boot=1)  # refuses wrong types and shapes
        self.transfers.pass_by()
        assert step.number == self.number + 1, "a gap in the step numbers"
        self.number = step.number
        for slot in step.released.tolist():
            del self.slots[slot]
        self._open(step)
        assert not set(step.copies[:, 0].tolist()) & set(step.copies[:, 1].tolist()), "copies that depend on each other"
        for source, destination in step.copies.tolist():
            size = self.block_size
            self.kv[destination * size :][:size] = self.kv[source * size :][:size]
        for slot, block in step.blocks.tolist():
            assert block != 0, "the null block was handed out"
            self.slots[slot].table.append(block)
        forward = [(slot, start, count) for slot, start, count in step.prefill.tolist()]
        forward += [(slot, len(self.slots[slot].tokens) - 1, 1) for slot in step.decode.tolist()]
        assert len({slot for slot, _, _ in forward}) == len(forward), "a slot has two rows"
        for slot, start, count in forward:
            self._write(self.slots[slot], start, count)
        prompts = [
            (row, records)
            for row, span in enumerate(step.prefill.tolist())
            if (records := self._score(*span)) is not None
        ]
        tokens = [self._sample(*forward[row], slot) for row, slot in step.sample.tolist()]
        recorded = [
            (index, self._record(self.slots[slot], tokens[index]))
            for index, slot in enumerate(step.sample[:, 1].tolist())
            if self.slots[slot].init.params.logprobs is not None
        ]
        array = np.array(tokens, np.int32)
        seconds = 1e-3 * sum(count for _, _, count in forward)
        self.transfers.pass_by()
        transferred = self.transfers.result(step.number, must_wait=is_last and not forward)
        return StepResult(
            step.epoch,
            step.number,
            array,
            np.empty(0, np.int32),
            recorded,
            seconds,
            prompts,
            transferred=transferred,
        )

    def _score(self, slot: int, start: int, count: int) -> list[bytes] | None:
        """The records of the prompt tokens that the positions of a prefill row predict; None: not asked for."""
        state = self.slots[slot]
        if state.init.params.prompt_logprobs is None:
            return None
        last = min(start + count, state.init.prompt_len - 1)
        return [record_of(state.hashes[position]) for position in range(start + 1, last + 1)]

    def _record(self, state: SlotState, token: int) -> bytes:
        params = state.init.params
        if params.logprobs is not None and params.greedy and params.max_tokens is None:
            return top_record(state.hashes[-2], token, params.logprobs)  # as beam search asks for
        return record_of(state.hashes[-1])

    def _open(self, step: Step) -> None:
        offset = 0
        for init in step.new:
            assert init.slot not in self.slots, "a slot was given away before it was released"
            assert init.slot < self.num_slots
            tokens = step.new_tokens[offset : offset + init.num_tokens].tolist()
            offset += init.num_tokens
            self.slots[init.slot] = SlotState(init, tokens, _hashes(tokens))
        assert offset == len(step.new_tokens)

    def _write(self, state: SlotState, start: int, count: int) -> None:
        end = start + count
        assert count > 0
        assert not self.transfers.writes(set(state.table)), "a block is used before it is copied"
        assert end <= len(state.tokens), "a row reads tokens that do not exist yet"
        where = [slot_of(position, state.table, self.block_size) for position in range(end)]
        for position in range(start, end):
            self.kv[where[position]] = state.hashes[position]
        if (self.kv[where] != state.hashes[:end]).any():
            raise Corrupt(f"{state.init.rid}: the prefix of position {end - 1} is not intact")

    def _sample(self, slot: int, start: int, count: int, target: int) -> int:
        state = self.slots[target]
        assert start + count == len(state.tokens), "a sample row does not end at the last token"
        assert self.slots[slot].hashes[start + count - 1] == state.hashes[-1], "a fork of another prefix"
        assert len(state.tokens) < state.init.limit, "a token at or beyond the limit"
        token = sample(state.hashes[-1], state.init.choice)
        state.tokens.append(token)
        state.hashes.append(extend(state.hashes[-1], token))
        return token


def _hashes(tokens: list[int]) -> list[int]:
    state, hashes = 7, []
    for token in tokens:
        state = extend(state, token)
        hashes.append(state)
    return hashes


def make_config(**options: Any) -> CoreConfig:
    """A small engine: blocks of 4, 8 sequences, 64 tokens a step; any field of both configurations may be given."""
    scheduler: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "max_num_partial_prefills": 1,
        "enable_chunked_prefill": True,
        "chunk_target": None,
    }
    scheduler |= {name: options.pop(name) for name in list(options) if name in SchedulerConfig.__dataclass_fields__}
    scheduler.setdefault("max_prefill_tokens", scheduler["max_num_batched_tokens"])
    core: dict[str, Any] = {
        "vocab_size": VOCAB,
        "block_size": 4,
        "steps_in_flight": 2,
        "watermark": 0.0,
        "short_step_s": 0.0,
    }
    return CoreConfig(scheduler=SchedulerConfig(**scheduler), **(core | options))


class Simulation:
    """One engine core and workers, at first one, that execute each step as late as the window allows."""

    def __init__(
        self,
        num_blocks: int = 64,
        core: type[EngineCore] = EngineCore,
        num_workers: int = 1,
        num_host_blocks: int = 0,
        transfer_rate: float = 0.0,
        **options: Any,
    ) -> None:
        self.num_host_blocks = num_host_blocks
        self.transfer_rate = transfer_rate
        self.config = make_config(**options)
        self.num_blocks = num_blocks
        self.now = 0.0
        self.records: list[StepRecord] = []
        self.steps: list[Step] = []
        self.core = core(self.config, clock=lambda: self.now, recorder=self.records.append)
        self.requests: list[Request] = []
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[bytes]] = {}
        self.workers: dict[Replica, SimulatedWorker] = {}
        self.in_flight: dict[Replica, deque[Step]] = {}
        self.num_epochs = 0
        self.given: dict[tuple[str, int], int] = {}
        """Tokens that a choice had when it was submitted, if any."""
        self.failed: set[str] = set()
        """Requests that were ended with an error."""
        self.convicted: list[str] = []
        """Those of them that the engine found to be what workers die of."""
        for _ in range(num_workers):
            self.start_worker()

    @property
    def replica(self) -> Replica:
        """The only replica, or the one that joined first."""
        return self.core.replicas[0]

    @property
    def worker(self) -> SimulatedWorker:
        return self.workers[self.replica]

    @property
    def sent(self) -> deque[Step]:
        """Steps of the first replica that it has not computed."""
        return self.in_flight[self.replica]

    def start_worker(self, num_blocks: int | None = None) -> Replica:
        """Another worker is ready; what does not fit its pool, if that is smaller, fails."""
        self.num_epochs += 1
        size, config = num_blocks or self.num_blocks, self.config
        name, epoch = f"w{self.num_epochs}", Epoch(1, self.num_epochs)
        rates = self.transfer_rate, self.transfer_rate
        host = {"host": HostMemorySpec(self.num_host_blocks, BLOCK_BYTES, rates)} if self.num_host_blocks else {}
        refused = self.core.begin_epoch(name, epoch, size, **host)
        assert num_blocks is not None or not refused
        for sequence, _ in refused:
            self.fail(sequence.request)
        replica = self.core.replicas[-1]
        self.workers[replica] = SimulatedWorker(
            size, config.block_size, config.num_slots, self.num_host_blocks, seed=self.num_epochs
        )
        self.in_flight[replica] = deque()
        return replica

    def kill_worker(self, replica: Replica, blames: bool = True) -> None:
        convicted = self.core.end_epoch(replica, blames=blames)
        if convicted is not None:
            self.convicted.append(convicted.rid)
            self.fail(convicted)
        for sequence, _ in self.core.refuse_homeless():
            self.fail(sequence.request)
        del self.workers[replica], self.in_flight[replica]

    def rest(self, request: Request, resting: bool) -> None:
        """A front end is lost, or submits its request again (``FrontendLink.rested``)."""
        for sequence in request.sequences:
            self.core.rest(sequence, resting)
        for sequence, _ in [] if resting else self.core.refuse_homeless(request.sequences):
            self.fail(sequence.request)

    def fail(self, request: Request) -> None:
        """End a request with an error."""
        self.failed.add(request.rid)
        for sequence in request.sequences:
            self.core.end(sequence, FinishReason.ERROR)

    def restart_worker(self) -> None:
        self.kill_worker(self.replica)
        self.start_worker()

    def submit(
        self,
        prompt: list[int],
        rid: str | None = None,
        salt: str = "",
        priority: int = 0,
        tenant: str = "",
        given: SequenceOf[SequenceOf[int]] = (),
        **params: Any,
    ) -> Request:
        """Queue a request; ``given``: ids that its first choices have already."""
        sampling = SamplingParams(**({"max_tokens": 16} | params))
        request = Request(
            rid=rid or f"r{len(self.requests)}",
            params=sampling,
            prompt=np.array(prompt, np.int32),
            order=len(self.requests),
            arrived_at=self.now,
            stop_ids=stop_ids_of(sampling, EOS_IDS),
            eos_ids=EOS_IDS,
            priority=priority,
            cache_salt=salt,
            tenant=tenant,
        )
        ids = dict(itertools.zip_longest(range(sampling.n), given, fillvalue=()))
        self._start(request, ids)
        self.requests.append(request)
        return request

    def replace(self, sequence: Sequence, ids: SequenceOf[int]) -> None:
        """A front end has other rows of a choice than the engine: it begins again with these (``FrontendLink``)."""
        if sequence.request.search is None:
            self.core.rest(sequence, True)
        self._start(sequence.request, {sequence.choice: ids})
        self.core.end(sequence, FinishReason.ABORT)

    def _start(self, request: Request, given: dict[int, SequenceOf[int]]) -> None:
        sequences = self.core.submit(request, {choice: np.array(ids, np.int32) for choice, ids in given.items()})
        for sequence in sequences:
            sequence.handle = 100 + len(self.requests)
            key, ids = (request.rid, sequence.choice), given[sequence.choice]
            self.outputs[key], self.logprobs[key], self.given[key] = list(ids), [], len(ids)

    def plan(self, replica: Replica | None = None) -> Step | None:
        replica = replica or self.replica
        step = self.core.plan(replica)
        if step is not None:
            self.in_flight[replica].append(step)
            self.workers[replica].transfers.receive(step)
            self.steps.append(step)
            self._check_company(replica)
        return step

    def _check_company(self, replica: Replica) -> None:
        """A suspect runs alone, and nowhere without its turn."""
        window = {replica.slots.sequence_at(slot).request for step in replica.window for slot in step.rows.tolist()}
        newest = {replica.slots.sequence_at(slot).request for slot in replica.window[-1].rows.tolist()}
        suspects = self.core.suspects
        assert sum(each.reserved_for is not None for each in self.core.replicas) <= 1
        if replica.reserved_for is not None:
            assert replica.reserved_for is suspects.turn
            # A step of transfers alone may come while those before it still leave.
            assert not newest or window <= {replica.reserved_for}, "a suspect has company"
        else:
            assert not newest & suspects.requests.keys(), "a suspect runs without its turn"

    def settle(self, replica: Replica | None = None) -> None:
        replica = replica or self.replica
        step, steps = self.in_flight[replica].popleft(), self.in_flight[replica]
        settled = self.core.settle(replica, self.workers[replica].execute(step, is_last=not steps))
        for sequence, token, row in zip(settled.sequences, settled.tokens, settled.rows.tolist(), strict=True):
            output = self.outputs[sequence.request.rid, sequence.choice]
            assert row == [sequence.handle, sequence.choice, len(output), 1]
            output.append(int(token))
        for sequence, found in settled.found:
            key = sequence.request.rid, sequence.choice
            assert not self.outputs[key], "a choice of a search was delivered twice"
            self.outputs[key], self.logprobs[key] = found.ids, found.records
        for index, record in settled.records:
            sequence = settled.sequences[index]
            self.logprobs[sequence.request.rid, sequence.choice].append(record)

    def tick(self, advances: Callable[[Replica], bool] = lambda replica: True) -> bool:
        """Fill each window, then settle one step of each replica that advances, and let go who is leaving and done.

        Returns:
            Whether anything was in flight.
        """
        self.now += 1.0
        for replica in self.core.replicas:
            while self.plan(replica) is not None:
                pass
        busy = [replica for replica in self.core.replicas if self.in_flight[replica]]
        for replica in busy:
            if advances(replica):
                self.settle(replica)
        for replica in list(self.core.replicas):
            if replica.leaving and replica.is_idle:
                self.kill_worker(replica)
        return bool(busy)

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.tick():
                break
        assert not self.core.waiting, "requests wait, but nothing is planned"
        assert not any(self.in_flight.values()), f"not done after {most} steps"

    def live(self) -> list[Sequence]:
        return [s for request in self.requests for s in request.sequences if s.finish_reason is None]

    def check_outputs(self) -> None:
        """Finished outputs equal the reference; aborted and failed ones are a beginning of it."""
        for request in self.requests:
            latest = {sequence.choice: sequence for sequence in request.sequences}
            for sequence in latest.values() if request.search is None else ():
                given = self.given[request.rid, sequence.choice]
                limit = max(sequence.limit, len(request.prompt) + given)
                expected, reason = reference(request, sequence.choice, limit)
                output = self.outputs[sequence.request.rid, sequence.choice]
                has_failed = sequence.finish_reason is FinishReason.ERROR and request.rid in self.failed
                if sequence.finish_reason is FinishReason.ABORT or has_failed:
                    assert output == expected[: len(output)]
                else:
                    assert (output, sequence.finish_reason) == (expected, reason), request.rid
                self._check_records(sequence, output)

    def _check_records(self, sequence: Sequence, output: list[int]) -> None:
        """One record for each token where they were asked for, and those of the prompt, chunks put together."""
        request = sequence.request
        prompt = request.prompt.tolist()
        hashes, given = _hashes(prompt + output), self.given[request.rid, sequence.choice]
        recorded = hashes[len(prompt) + given :] if request.params.logprobs is not None else []
        assert self.logprobs[request.rid, sequence.choice] == [record_of(state) for state in recorded], request.rid
        scores = sequence.choice == 0 and request.params.prompt_logprobs is not None and not given
        if scores and sequence.first_token_at is not None:
            assert sequence.prompt_records == [record_of(state) for state in hashes[1 : len(prompt)]], request.rid

    def check_empty(self) -> None:
        """Every block and slot is back."""
        for replica in self.core.replicas:
            replica.check()
            assert replica.kv.pool.num_free == replica.kv.pool.num_blocks - 1
            if replica.kv.host is not None:
                assert replica.kv.host.pool.num_held == 0
            assert replica.slots.num_free == self.config.num_slots
            assert replica.num_draining_preemptions == 0
            assert not replica.prefilling
        assert not self.core.stops.may_stop.any()
