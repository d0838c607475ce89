"""The report of a simulation as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from headrace.bench.report import banner, closing, row, section
from headrace.simulate.advice import limit_of
from headrace.simulate.figures import PERCENTILES, SHOWN, Figures
from headrace.simulate.run import NOT_YET

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency", "queue": "in the queue"}
WIDTH = 100


def text_report(figures: Figures, words: Sequence[str]) -> str:
    """The block of figures, and the sentences of ``advice``."""
    found = figures.outcome
    timeline = found.timeline
    lines = [
        banner("Simulated Serving Result"),
        row("Successful requests:", figures.completed),
        row("Refused requests:", figures.refused),
        row("Duration (s):", figures.duration_s),
        row("Total input tokens:", figures.input_tokens),
        row("Total generated tokens:", figures.output_tokens),
        row("Request throughput (req/s):", figures.per_s(figures.completed)),
        row("Output token throughput (tok/s):", figures.per_s(figures.output_tokens)),
        row("Total token throughput (tok/s):", figures.per_s(figures.input_tokens + figures.output_tokens)),
        section("Latency, ms"),
        f"{'':<13}{'mean':>10}" + "".join(f"{f'P{p}':>9}" for p in PERCENTILES),
    ]
    for key in SHOWN:
        each = figures.latencies[key]
        lines.append(
            f"{NAMES[key]:<13}{_ms(each.mean):>10}" + "".join(f"{_ms(each.percentile(p)):>9}" for p in PERCENTILES)
        )
    lines.append(section("Tokens of a request"))
    done = found.ended > NOT_YET
    if done.any():
        lengths = {"prompt": found.prompt, "output": found.output, "both": found.prompt + found.output}
        for name, tokens in lengths.items():
            shares = "".join(f"{np.percentile(tokens[done], p):>9,.0f}" for p in PERCENTILES)
            lines.append(f"{name:<13}{tokens[done].mean():>10,.0f}{shares}")
    lines += [
        section("Engine"),
        row("Running requests, mean:", timeline.mean("running")),
        row("Running requests, most:", int(figures.most("running"))),
        row("Waiting requests, mean:", timeline.mean("waiting")),
        row("Waiting requests, most:", int(figures.most("waiting"))),
        row("KV cache use, mean (%):", 100 * figures.usage_mean),
        row("KV cache use, most (%):", 100 * figures.usage_max),
        row("Preemptions:", found.preemptions),
        row("Tokens computed again:", found.recomputed_tokens),
        row("Prefix cache hit rate (%):", 100 * figures.hit_rate),
        row("Steps:", found.steps),
        row("Tokens in a step, mean:", found.step_tokens / max(found.steps, 1)),
        row("Time of a step, mean (ms):", 1000 * found.busy_s / max(found.steps, 1)),
        row("Device busy (%):", 100 * figures.busy_share),
        closing(),
    ]
    return "\n".join([*lines, *(textwrap.fill(sentence, WIDTH, break_on_hyphens=False) for sentence in words)])


SWEEP_COLUMNS = (
    "req/s", "out tok/s", "TTFT ms", "P99", "TPOT ms", "P99", "running", "KV max", "preempted", "refused", "limit",
)  # fmt: skip


def sweep_head(name: str) -> str:
    """The first line of a sweep's table."""
    return f"{name:>24}" + "".join(f"{column:>10}" for column in SWEEP_COLUMNS)


def sweep_row(value: str, figures: Figures) -> str:
    """One value's line."""
    ttft, tpot = figures.latencies["ttft"], figures.latencies["tpot"]
    cells = (
        f"{figures.per_s(figures.completed):.2f}",
        f"{figures.per_s(figures.output_tokens):,.0f}",
        _ms(ttft.mean),
        _ms(ttft.percentile(99)),
        _ms(tpot.mean),
        _ms(tpot.percentile(99)),
        f"{figures.outcome.timeline.mean('running'):.0f}",
        f"{figures.usage_max:.0%}",
        f"{figures.outcome.preemptions:,}",
        f"{figures.refused:,}",
        limit_of(figures).name.lower().replace("nobody_waits", "-"),
    )
    return f"{value:>24}" + "".join(f"{cell:>10}" for cell in cells)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
