"""What paging is for, in numbers that do not depend on the machine: the benchmarks on a simulated clock, cut short."""

from __future__ import annotations

import math

import pytest

from benchmarks import kv_memory, static_batching
from benchmarks.simulated import blocks_for, mix


def test_requests_with_one_system_prompt_hold_it_once() -> None:
    assert kv_memory.shared_prompt(32) == blocks_for(512) + 32 * blocks_for(64)


def test_choices_share_their_prompt() -> None:
    one, separate = kv_memory.choices(8)
    assert separate == 8 * blocks_for(512 + 64)
    assert one == blocks_for(512) + 8 * blocks_for(64)
    assert one < 0.35 * separate


@pytest.mark.parametrize("max_tokens", [None, 1024])
def test_little_memory_is_held_without_tokens_in_it(max_tokens: int | None) -> None:
    """In the memory of four reservations of the longest request."""
    use = kv_memory.use_of_mix(kv_memory.SMALL_POOLS[0], max_tokens, count=200)
    assert use.unused <= 0.04
    assert use.preemptions > 0
    assert use.written_before_preemption is not None
    assert use.written_before_preemption >= 0.96
    assert use.running >= 16


def test_static_batches_begin_when_the_one_before_has_ended() -> None:
    static = static_batching.Static(mix(20), seats=8).run()
    for first in (0, 8, 16):
        assert len(set(static.sent[first : first + 8])) == 1
    assert static.sent[8] == static.ended[:8].max()
    assert static.sent[16] == static.ended[8:16].max()


def test_continuous_batching_against_static() -> None:
    rates = {
        mode: static_batching.output_rate(simulator(mix(150), 16).run())
        for mode, simulator in static_batching.MODES.items()
    }
    assert rates["continuous"] >= 2.5 * rates["static"]


def test_short_requests_do_not_wait_for_long_ones() -> None:
    row = static_batching.compare_latency(0.7, static_batching.static_capacity(200), 200)
    assert row["ratio"] <= 0.25
    assert math.isclose(row["continuous"], 50 * 0.02, rel_tol=0.1)
