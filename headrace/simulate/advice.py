"""What limits a simulated server, in words, and the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from core_engine.core import CoreConfig
from headrace.simulate.figures import Figures
from headrace.simulate.run import CONNECTIONS, QUEUE_FULL, TOO_LONG
from headrace.simulate.timeline import Cause

FEW_WAITING = 0.05
"""Waiting requests by running ones, on average: with fewer, most of them wait for the next step, not for room."""
FULL, BUSY = 0.9, 0.95
MUCH_RECOMPUTED = 0.02


def limit_of(figures: Figures) -> Cause:
    """What holds up the waiting requests most; ``NOBODY_WAITS`` if they are few."""
    timeline = figures.outcome.timeline
    if timeline.mean("waiting") < FEW_WAITING * timeline.mean("running"):
        return Cause.NOBODY_WAITS
    return max((cause for cause in Cause if cause is not Cause.NOBODY_WAITS), key=lambda cause: figures.causes[cause])


def advice(figures: Figures, config: CoreConfig) -> list[str]:
    """One sentence or two on each limit that was met."""
    if not figures.completed:
        return ["No request could run.", *_refused(figures, config)]
    words = {
        Cause.NOBODY_WAITS: _nobody_waits,
        Cause.SEATS: _seats,
        Cause.BLOCKS: _blocks,
        Cause.STEP: _step,
    }[limit_of(figures)](figures, config)
    return [words, *_preemptions(figures), *_refused(figures, config)]


def _share(figures: Figures, cause: Cause) -> str:
    return f"{figures.causes[cause]:.0%} of the time"


def _nobody_waits(figures: Figures, config: CoreConfig) -> str:
    running, seats = figures.outcome.timeline.mean("running"), config.scheduler.max_num_seqs * figures.num_replicas
    queue = figures.latencies["queue"]
    if figures.busy_share < BUSY:
        rest = f"the device computes {figures.busy_share:.0%} of the time"
    else:
        rest = "the device always has something to compute, with steps as small as the load lets them be"
    return (
        f"Nothing limits: half of the requests start within {queue.median:.3g} ms and 99% within "
        f"{queue.percentile(99):.3g} ms, {running:.0f} of {seats:,} seats and {figures.usage_mean:.0%} of the KV cache "
        f"are in use on average, and {rest}. Try a higher load (--speedup)."
    )


def _seats(figures: Figures, config: CoreConfig) -> str:
    seats = config.scheduler.max_num_seqs
    words = f"Seats limit: {_share(figures, Cause.SEATS)} all {seats} of a replica are taken while others wait"
    if figures.usage_max < FULL:
        fit = int(seats * FULL / max(figures.usage_max, 1e-3))
        return (
            f"{words}, and the KV cache is {figures.usage_max:.0%} full at most. Raise --max-num-seqs: about {fit:,} "
            f"would fit the memory; each step, and so TPOT, gets longer."
        )
    return f"{words}, and the KV cache is full as well: more of both, or more replicas (--data-parallel-size)."


def _blocks(figures: Figures, config: CoreConfig) -> str:
    usage = figures.outcome.timeline.mean_while("used_blocks", Cause.BLOCKS) / figures.outcome.num_blocks
    return (
        f"KV blocks limit: {_share(figures, Cause.BLOCKS)} requests wait for memory; the KV cache is {usage:.0%} full "
        f"then, and what is left is kept for the growth of those that run. Give it more memory "
        f"(--gpu-memory, --gpu-memory-utilization), halve what a token takes (--kv-cache-dtype fp8), or add replicas "
        f"(--data-parallel-size)."
    )


def _step(figures: Figures, config: CoreConfig) -> str:
    target = config.scheduler.chunk_target
    words = f"Step time limits: {_share(figures, Cause.STEP)} prompts wait for steps that have room for them"
    if figures.busy_share < BUSY:
        return f"{words}, but the device is busy only {figures.busy_share:.0%} of the time: look at --steps-in-flight."
    if target is not None:
        milliseconds = 1000 * target.seconds
        return (
            f"{words}, which are kept to {milliseconds:g} ms. Raise --target-itl-ms for throughput at the price of "
            f"gaps between tokens; if that gains nothing, add replicas (--data-parallel-size)."
        )
    budget = config.scheduler.max_num_batched_tokens
    return (
        f"{words}: the device computes all the time in steps of at most {budget:,} tokens. Add replicas "
        f"(--data-parallel-size) or a faster device; --max-num-batched-tokens trades gaps between tokens for time to "
        f"the first one."
    )


def _preemptions(figures: Figures) -> Iterator[str]:
    if figures.recomputed_share > MUCH_RECOMPUTED:
        running = figures.outcome.timeline.mean("running") / figures.num_replicas
        yield (
            f"{figures.outcome.preemptions:,} preemptions had {figures.recomputed_share:.0%} of the prompt tokens "
            f"computed again: raise --watermark, or lower --max-num-seqs towards {running:.0f}."
        )


def _refused(figures: Figures, config: CoreConfig) -> Iterator[str]:
    refused = figures.outcome.refused
    if refused[CONNECTIONS]:
        yield (
            f"{refused[CONNECTIONS]:,} requests were refused because --max-connections were served already; the load "
            f"is more than this serves, or comes in bursts."
        )
    if refused[QUEUE_FULL]:
        bound = f"--max-num-queued-reqs {config.max_num_queued_reqs:,}"
        if config.max_num_queued_tokens is not None:
            bound += f" or --max-num-queued-tokens {config.max_num_queued_tokens:,}"
        yield f"{refused[QUEUE_FULL]:,} requests were refused because the queue was full ({bound})."
    if refused[TOO_LONG]:
        yield (
            f"{refused[TOO_LONG]:,} requests were refused because they are longer than --max-model-len "
            f"{config.scheduler.max_model_len:,} or the whole KV cache."
        )
