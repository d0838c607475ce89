"""Beam search against a naive search that recomputes everything, under random schedules, pools and losses."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from core_engine.beam_scores import BeamScores
from core_engine.request import Exit, Request, Sequence
from shared.errors import RequestError
from shared.logprobs import unpack
from shared.messages import FinishReason, Step
from shared.sampling import SamplingParams
from tests.core_engine.simulation import EOS_IDS, VOCAB, Simulation, distribution, extend


def prefix_hash(ids: list[int]) -> int:
    state = 7
    for token in ids:
        state = extend(state, token)
    return state


def naive(request: Request, limit: int) -> list[tuple[list[int], FinishReason]]:
    """The best ``n`` hypotheses, by the rule of transformers' beam search over the whole vocabulary."""
    params, prompt = request.params, request.prompt.tolist()
    width, penalty = params.beam_width, params.length_penalty
    assert width is not None
    most = limit - len(prompt)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        found = []
        for logprob, ids in beams:
            for token, value in enumerate(distribution(prefix_hash(prompt + ids)).tolist()):
                if token not in request.stop_ids or length > params.min_tokens:
                    found.append((logprob + value, [*ids, token]))
        found.sort(key=lambda each: -each[0])
        ends = [length == most or ids[-1] in request.stop_ids for _, ids in found]
        best = [each for each, end in zip(found[:width], ends, strict=False) if end]
        finished += [(logprob / length**penalty, ids) for logprob, ids in best]
        finished = sorted(finished, key=lambda each: -each[0])[:width]
        beams = [each for each, end in zip(found, ends, strict=True) if not end][:width]
        if not beams:
            break
        if len(finished) == width:
            at = most if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or beams[0][0] / at**penalty <= finished[-1][0]:
                break
    return [(ids, reason_of(request, ids)) for _, ids in finished[: params.n]]


def reason_of(request: Request, ids: list[int]) -> FinishReason:
    return FinishReason.STOP if ids[-1] in request.stop_ids else FinishReason.LENGTH


def search(simulation: Simulation, prompt: list[int], width: int, **params: Any) -> Request:
    return simulation.submit(prompt, **({"beam_width": width, "n": width, "temperature": 0.0} | params))


def check(simulation: Simulation, request: Request) -> None:
    """Every choice has its hypothesis; one that was aborted has nothing."""
    expected = naive(request, request.sequences[0].limit)
    for sequence in request.sequences:
        output = simulation.outputs[request.rid, sequence.choice]
        if sequence.finish_reason is FinishReason.ABORT:
            assert output == []
        else:
            assert (output, sequence.finish_reason) == expected[sequence.choice], request.rid


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_finds_what_a_naive_search_finds(early_stopping: bool | str, penalty: float) -> None:
    simulation = Simulation(200)
    options = {"early_stopping": early_stopping, "length_penalty": penalty}
    requests = [search(simulation, list(range(5, 5 + length)), 4, **options) for length in range(1, 10)]
    simulation.run()
    for request in requests:
        check(simulation, request)
    simulation.check_empty()


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_widths_and_fewer_choices(width: int) -> None:
    simulation = Simulation(200)
    for n in range(1, width + 1):
        check_after(simulation, search(simulation, [9, 8, 7, 6, 5], width, n=n, max_tokens=12))
    simulation.check_empty()


def check_after(simulation: Simulation, request: Request) -> None:
    simulation.run()
    check(simulation, request)


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 1},
        {"ignore_eos": True},
        {"ignore_eos": True, "stop_token_ids": [11, 12]},
        {"stop_token_ids": [50]},
        {"min_tokens": 5},
        {"max_tokens": 40},
        {"max_tokens": None},
    ],
)
def test_ends(params: dict[str, Any]) -> None:
    simulation = Simulation(300, max_model_len=48)
    check_after(simulation, search(simulation, [40, 41, 42, 43, 44, 45], 3, **params))
    simulation.check_empty()


def test_log_probabilities_of_what_is_returned() -> None:
    simulation = Simulation(200)
    request = search(simulation, [1, 2, 4], 3, logprobs=2, max_tokens=6)
    simulation.run()
    for sequence in request.sequences:
        ids = simulation.outputs[request.rid, sequence.choice]
        records = [unpack(record) for record in simulation.logprobs[request.rid, sequence.choice]]
        assert [record.token.token_id for record in records] == ids
        for index, record in enumerate(records):
            logprobs = distribution(prefix_hash([1, 2, 4, *ids[:index]]))
            assert record.token.logprob == logprobs[ids[index]]
            assert record.rank == 1 + int((logprobs > logprobs[ids[index]]).sum())
            assert [top.token_id for top in record.top] == np.argsort(-logprobs, kind="stable")[:2].tolist()


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    """Whole ones by reference; a partial one is copied in the step in which one of several heirs writes into it."""
    simulation = Simulation(200)
    replica, width, prompt_len = simulation.replica, 6, 62
    request = search(simulation, list(range(4, 4 + prompt_len)), width, ignore_eos=True, max_tokens=20)
    for length in range(prompt_len, prompt_len + 20):
        step = simulation.plan()
        assert step is not None
        assert simulation.plan() is None, "the next step depends on this one"
        if length > prompt_len:
            assert request.search is not None
            check_tables([beam.sequence for beam in request.search.beams], step, length, prompt_len // 4)
            check_block_metrics(simulation, len(set(step.copies[:, 0].tolist())))
            assert (len(step.new), len(step.prefill), len(step.decode), len(step.sample)) == (width, width, 0, width)
        simulation.settle()
        replica.check()
        if length < prompt_len + 19:
            check_block_metrics(simulation, 0)  # also while the beams have no slots
    check_after(simulation, request)
    simulation.check_empty()
    assert replica.kv.pool.num_held == 0


def check_tables(beams: list[Sequence], step: Step, length: int, num_common: int) -> None:
    """Of the beams of a search, planned: who shares what, and what is copied."""
    tables = [beam.blocks for beam in beams]
    assert all(len(beam.tokens) == length for beam in beams)
    assert all(len(table) == -(-length // 4) for table in tables)
    assert all(block.ref == len(beams) for block in tables[0][:num_common])
    for (one, table), (other, table_of_other) in itertools.combinations(zip(beams, tables, strict=True), 2):
        for index in range((length - 1) // 4):
            end = 4 * index + 4
            has_common_history = one.tokens[:end].tolist() == other.tokens[:end].tolist()
            assert (table[index] is table_of_other[index]) == has_common_history, index
    written = [table[-1] for table in tables]
    assert [block.ref for block in written] == [1] * len(beams), "two write into one block"
    heirs = Counter(tuple(beam.tokens[:-1].tolist()) for beam in beams)
    is_partial = (length - 1) % 4 != 0
    assert len(step.copies) == sum(count for count in heirs.values() if count > 1) * is_partial
    held = {block.id for table in tables for block in table}
    assert not held.intersection(step.copies[:, 0].tolist())
    assert {block.id for block in written}.issuperset(step.copies[:, 1].tolist())
    logical, physical = sum(map(len, tables)), len(held)
    assert logical - physical >= (len(beams) - 1) * num_common
    assert physical <= num_common + len(beams) * (-(-length // 4) - num_common)


def check_block_metrics(simulation: Simulation, num_copied: int) -> None:
    tables = simulation.replica.tables()
    samples = {name: value for name, _, value in simulation.core.metrics.samples(simulation.core.replicas, 0)}
    assert samples["headrace:replica_kv_blocks_logical"] == sum(map(len, tables))
    assert (
        samples["headrace:replica_kv_blocks_held"]
        == len({block.id for table in tables for block in table}) + num_copied
    )


def test_what_cannot_fit_is_refused() -> None:
    simulation = Simulation(20)
    with pytest.raises(RequestError, match="4 beams after a prompt of 5 tokens may need 25 blocks of 4"):
        search(simulation, [1, 2, 4, 5, 6], 4, max_tokens=19)
    with pytest.raises(RequestError, match="beam_width 9 > 8"):
        search(simulation, [1, 2, 4, 5, 6], 9, max_tokens=2)
    with pytest.raises(RequestError, match="more than 32"):
        search(simulation, [1], 4, max_tokens=2, stop_token_ids=list(range(40, 70)))
    check_after(simulation, search(simulation, [1, 2, 4, 5, 6], 4, max_tokens=11))
    check_after(simulation, search(simulation, [1, 2, 4, 5, 6], 4, max_tokens=None, ignore_eos=True))
    simulation.check_empty()


def test_a_search_waits_for_seats_of_all_its_beams() -> None:
    simulation = Simulation(400, max_num_seqs=8)
    plain = [simulation.submit([5, 6, 7 + i], max_tokens=30, ignore_eos=True) for i in range(5)]
    simulation.tick()
    found = search(simulation, [1, 2, 4], 4, max_tokens=4, ignore_eos=True)
    while any(request.sequences[0].finish_reason is None for request in plain):
        assert found.sequences[0].scheduled_at is None or simulation.replica.num_active <= 8
        simulation.tick()
    simulation.run()
    check(simulation, found)
    simulation.check_outputs()
    simulation.check_empty()


@pytest.mark.parametrize("ticks", range(8))
@pytest.mark.parametrize("what", ["abort", "preempt", "restart", "rest", "leave"])
def test_the_ways_out_at_every_moment(ticks: int, what: str) -> None:
    simulation = Simulation(200, num_workers=2 if what == "leave" else 1)
    request = search(simulation, list(range(10, 32)), 4, ignore_eos=True, max_tokens=10)
    simulation.submit([4, 4, 4], max_tokens=20)
    for _ in range(ticks):
        simulation.tick()
    core, leader = simulation.core, request.sequences[0]
    if what == "abort":
        for sequence in request.sequences:
            core.end(sequence, FinishReason.ABORT)
    elif what == "preempt":
        for sequence in simulation.replica.slots.occupied():
            if sequence.request is request and sequence.slot is not None:
                simulation.replica.request_exit(sequence, Exit.PREEMPT)
    elif what == "restart":
        simulation.restart_worker()
    elif what == "leave":
        simulation.replica.leaving = True
    else:
        for sequence in request.sequences:
            core.rest(sequence, True)
        for _ in range(3):
            simulation.tick()
        assert leader.slot is None
        for sequence in request.sequences:
            core.rest(sequence, False)
    simulation.run()
    check(simulation, request)
    simulation.check_outputs()
    simulation.check_empty()


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(
        rng.choice([40, 60, 120]),
        num_workers=rng.choice([1, 1, 2]),
        max_num_seqs=rng.choice([6, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_model_len=64,
        enable_prefix_caching=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "priority", "fair", "lpm"]),
    )
    searches: list[Request] = []
    for _ in range(120):
        prompt = [rng.choice([20, 21]) for _ in range(rng.randint(1, 14))]
        if len(simulation.live()) < 30 and rng.random() < 0.25:
            width = rng.randint(1, 4)
            options = {"max_tokens": rng.randint(1, 12), "n": rng.randint(1, width), "ignore_eos": rng.random() < 0.5}
            options |= {"early_stopping": rng.choice([True, False, "never"]), "length_penalty": rng.choice([0.5, 1.0])}
            searches.append(search(simulation, prompt, width, priority=rng.randint(0, 2), **options))
        elif len(simulation.live()) < 30 and rng.random() < 0.25:
            simulation.submit(prompt, n=rng.randint(1, 3), max_tokens=rng.randint(1, 20), priority=rng.randint(0, 2))
        if rng.random() < 0.05 and simulation.live():
            victim = rng.choice(simulation.live()).request
            for sequence in victim.sequences:
                simulation.core.end(sequence, FinishReason.ABORT)
        if rng.random() < 0.03:
            simulation.kill_worker(rng.choice(simulation.core.replicas), blames=False)
            simulation.start_worker()
        simulation.tick(lambda _: rng.random() < 0.8)
        for replica in simulation.core.replicas:
            replica.check()
    simulation.run()
    for request in searches:
        check(simulation, request)
    simulation.check_outputs()
    simulation.check_empty()


def test_equal_continuations_keep_their_order() -> None:
    scores = BeamScores[str](2, frozenset(EOS_IDS), length_penalty=1.0, early_stopping=False, most_tokens=9)
    going = scores.advance([("a", -1.0, [(5, -1.0), (6, -1.0)]), ("b", -1.0, [(4, -1.0), (9, -0.5)])], 2)
    assert [(each.parent, each.token) for each in going] == [("b", 9), ("a", 5)]


BEAMS: dict[str, Any] = {"beam_width": 2, "temperature": 0.0}


@pytest.mark.parametrize(
    "fields",
    [
        *[{"beam_width": width, "temperature": 0.0} for width in (0, 17, True, "2")],
        *[{**BEAMS, **more} for more in ({"n": 3}, {"max_tokens": 0}, {"top_p": 0.5}, {"top_k": 3}, {"stop": ["x"]})],
        *[{**BEAMS, "early_stopping": "soon"}, {**BEAMS, "length_penalty": 11.0}, {**BEAMS, "min_p": 0.1}],
        *[{**BEAMS, "presence_penalty": 1.0}, {**BEAMS, "logit_bias": [(1, 1.0)]}, {**BEAMS, "allowed_token_ids": [1]}],
        *[{"beam_width": 2, "temperature": 0.5}, {"length_penalty": 2.0}, {"early_stopping": True}],
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields).validate(VOCAB)
    assert caught.value.param in fields
    assert caught.value.param != "beam_width" or fields["beam_width"] != 2
