"""``headrace bench mixed``: what long prompts do to the streams of others, and how long they wait themselves.

Some requests decode all the time. Meanwhile a long prompt comes at a fixed interval, and every output of the steady
requests is timed as their reader sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.argument_types import at_least
from headrace.async_llm import AsyncLLM
from headrace.bench import offline
from headrace.bench.workloads import DECODE_INPUT, random_prompts
from headrace.offline.streams import AsyncStream
from headrace.outputs import RequestOutput
from headrace.sampling_params import RequestOutputKind, SamplingParams
from shared.config import Settings
from shared.messages import ModelCard

FORMULAS = """\
gap  = time between two outputs of one steady request, from the arrival of the first long prompt that counts to the
       first token of the last one
TTFT = time from the arrival of a long prompt, as the timetable has it, to its first token"""


class Generator(Protocol):
    """What is measured: ``AsyncLLM``, or anything that streams like it."""

    @property
    def card(self) -> ModelCard: ...

    def generate(self, prompt: Any, sampling_params: SamplingParams | None = None) -> AsyncStream: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedResult:
    """Times in milliseconds, as the reader of the streams sees them."""

    worst_gap_ms: float
    gap_percentiles_ms: dict[str, float]
    """By percentage: ``offline.PERCENTAGES``."""
    num_gaps: int
    median_ttft_ms: float
    worst_ttft_ms: float
    ttfts_ms: list[float]
    """One for each long prompt that counts, in order."""
    duration_s: float
    steady_tokens_per_second: float
    """Of all steady requests together."""


async def measure_mixed(
    llm: Generator,
    *,
    num_decodes: int = 32,
    decode_input_len: int = DECODE_INPUT,
    prompt_len: int = 8192,
    interval_s: float = 1.0,
    num_prompts: int = 10,
    num_warmups: int = 2,
    seed: int = 0,
) -> MixedResult:
    """Run ``num_decodes`` steady requests, and ``num_prompts`` long ones that come ``interval_s`` apart.

    The long prompts begin when every steady request has two outputs. They come by the timetable, whether those before
    them are done or not, and take one token each. Ids are random; the output is greedy, and EOS is ignored.

    Args:
        llm: started; its context must hold ``prompt_len`` + 1 tokens, and a steady request for the whole run.
        num_warmups: long prompts before those that count, for kernels and graphs that are made when first used.

    Raises:
        BenchError: a steady request reached the end of its context before the last long prompt was answered.
        InvalidRequest, RequestFailed: as ``AsyncLLM.generate``.
    """
    lengths = [decode_input_len] * num_decodes + [prompt_len] * (num_warmups + num_prompts)
    prompts = random_prompts(lengths, llm.card.vocab_size, seed)
    steady = [_Steady(llm, ids) for ids in prompts[:num_decodes]]
    readers = [asyncio.ensure_future(each.read()) for each in steady]
    try:
        await _until_all(steady, readers)
        start = time.perf_counter()
        due = [start + number * interval_s for number in range(num_warmups + num_prompts)]
        answers = [_first_token(llm, ids, when) for ids, when in zip(prompts[num_decodes:], due, strict=True)]
        firsts = await asyncio.gather(*answers)
        if any(reader.done() for reader in readers):
            raise offline.BenchError("the context is too short: a steady request ended before the last long prompt")
    finally:
        for reader in readers:
            reader.cancel()
        ended = await asyncio.gather(*readers, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    ttfts = [first - when for first, when in zip(firsts, due, strict=True)][num_warmups:]
    return _summary([each.times for each in steady], due[num_warmups], max(firsts), ttfts)


class _Steady:
    """A request that decodes until its reader is cancelled."""

    def __init__(self, llm: Generator, ids: list[int]) -> None:
        self.times: list[float] = []
        self.two_outputs = asyncio.Event()
        self._stream = llm.generate({"prompt_token_ids": ids}, _params(llm.card.max_model_len - len(ids)))

    async def read(self) -> None:
        async for _ in self._stream:
            self.times.append(time.perf_counter())
            if len(self.times) == 2:
                self.two_outputs.set()


async def _until_all(steady: Sequence[_Steady], readers: Sequence[asyncio.Future[None]]) -> None:
    """Wait until each steady request has two outputs, or one has failed."""
    begun = asyncio.gather(*(each.two_outputs.wait() for each in steady))
    awaited: list[asyncio.Future[Any]] = [begun, *readers]
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        begun.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await begun
        for reader in readers:
            if reader.done():
                reader.result()
        raise offline.BenchError("the context is too short: a steady request ended at once")


async def _first_token(llm: Generator, ids: list[int], when: float) -> float:
    """Send a long prompt at ``when``; returns the time of its first token."""
    await asyncio.sleep(max(0.0, when - time.perf_counter()))
    stream: AsyncIterator[RequestOutput] = llm.generate({"prompt_token_ids": ids}, _params(1))
    first = 0.0
    async for _ in stream:
        first = first or time.perf_counter()
    return first


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _summary(times: Sequence[Sequence[float]], start: float, end: float, ttfts: Sequence[float]) -> MixedResult:
    """``times``: of the outputs of each steady request; a gap counts if it ends after ``start`` and begins before
    ``end``."""
    gaps = np.array(
        [after - before for one in times for before, after in itertools.pairwise(one) if after > start and before < end]
    )
    outputs = sum(start < moment <= end for one in times for moment in one)
    return MixedResult(
        worst_gap_ms=float(1000 * gaps.max()),
        gap_percentiles_ms=offline.percentiles((1000 * gaps).tolist()),
        num_gaps=len(gaps),
        median_ttft_ms=float(1000 * np.median(ttfts)),
        worst_ttft_ms=1000 * max(ttfts),
        ttfts_ms=[1000 * ttft for ttft in ttfts],
        duration_s=end - start,
        steady_tokens_per_second=outputs / (end - start),
    )


def main(argv: Sequence[str]) -> int:
    """Parse, measure, print and write; returns an exit code."""
    return offline.run(
        "mixed",
        argv,
        _add_flags,
        measure,
        description="Measure steady requests while long prompts come: the gaps between their tokens, and the time to "
        "the first token of the long ones. The prefix cache is off unless --enable-prefix-caching is given.",
        defaults={"enable_prefix_caching": False, "target_itl_ms": None},
    )


def measure(settings: Settings, options: argparse.Namespace) -> Mapping[str, Any]:
    """Run the workload and print the figures; returns them."""
    shape = offline.shape_of(settings)
    shape.check_length(options.prompt_len + 1, "--prompt-len + 1")
    shape.check_length(options.decode_input_len + 2, "--decode-input-len + 2")

    async def run() -> MixedResult:
        async with AsyncLLM.from_settings(settings, skip_tokenizer_init=True) as llm:
            return await measure_mixed(
                llm,
                num_decodes=options.num_decodes,
                decode_input_len=options.decode_input_len,
                prompt_len=options.prompt_len,
                interval_s=options.interval,
                num_prompts=options.num_prompts,
                num_warmups=options.num_warmups,
                seed=settings.seed,
            )

    figures = asyncio.run(run())
    print(_as_text(figures))
    return dataclasses.asdict(figures)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    whole = at_least(1)
    parser.add_argument("--num-decodes", type=whole, default=32, help="steady requests (default: 32)")
    parser.add_argument(
        "--decode-input-len",
        type=whole,
        default=DECODE_INPUT,
        help=f"tokens of their prompts (default: {DECODE_INPUT})",
    )
    parser.add_argument("--prompt-len", type=whole, default=8192, help="tokens of a long prompt (default: 8192)")
    parser.add_argument("--interval", type=_seconds, default=1.0, help="seconds between two of them (default: 1)")
    parser.add_argument("--num-prompts", type=whole, default=10, help="long prompts that count (default: 10)")
    parser.add_argument("--num-warmups", type=at_least(0), default=2, help="long prompts before those (default: 2)")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def _as_text(figures: MixedResult) -> str:
    return "\n".join(
        [
            f"Gaps: worst {figures.worst_gap_ms:.2f} ms, of {figures.num_gaps}",
            *(f"{name}% percentile gap: {value:.2f} ms" for name, value in figures.gap_percentiles_ms.items()),
            f"TTFT of long prompts: median {figures.median_ttft_ms:.2f} ms, worst {figures.worst_ttft_ms:.2f} ms",
            f"Steady requests: {figures.steady_tokens_per_second:.2f} tokens/s",
            "",
            FORMULAS,
        ]
    )
