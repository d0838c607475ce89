"""Result blocks as vLLM prints them, so that scripts which read its output read ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.bench.metrics import FORMULAS, LATENCIES, Metrics

WIDTH = 50
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def banner(title: str) -> str:
    """The first line of a block."""
    return f"{f' {title} ':=^{WIDTH}}"


def section(title: str) -> str:
    """The first line of a part of a block."""
    return f"{title:-^{WIDTH}}"


def row(label: str, value: int | float) -> str:
    """A line of a block; a float has two decimals."""
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def closing() -> str:
    """The last line of a block."""
    return "=" * WIDTH


def formulas(names: Iterable[str]) -> str:
    """What the metrics mean, a line each; it follows the block."""
    return "\n".join(FORMULAS[name] for name in names)


def percentile_name(p: float) -> str:
    """``99``, ``99.9``: as in ``p99_ttft_ms``."""
    return str(int(p)) if p == int(p) else str(p)


def serving_block(
    metrics: Metrics,
    *,
    percentile_metrics: Sequence[str],
    percentiles: Sequence[float],
    request_rate: float,
    max_concurrency: int | None,
) -> str:
    """The block of ``headrace bench serve``.

    Args:
        percentile_metrics: which of ``LATENCIES`` have a part.
        percentiles: in percent.
        request_rate: requests/s; infinity: all were sent at once.
    """
    rows: list[tuple[str, int | float | None]] = [
        ("Successful requests:", metrics.completed),
        ("Failed requests:", metrics.failed),
        ("Maximum request concurrency:", max_concurrency),
        ("Request rate configured (RPS):", None if request_rate == float("inf") else request_rate),
        ("Benchmark duration (s):", metrics.duration_s),
        ("Total input tokens:", metrics.total_input),
        ("Total generated tokens:", metrics.total_output),
        ("Request throughput (req/s):", metrics.request_throughput),
        ("Request goodput (req/s):", metrics.request_goodput),
        ("Output token throughput (tok/s):", metrics.output_throughput),
        ("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        ("Peak concurrent requests:", float(metrics.max_concurrent_requests)),
        ("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    lines = [banner("Serving Benchmark Result"), *(row(label, value) for label, value in rows if value is not None)]
    for key in LATENCIES:
        if key in percentile_metrics:
            found, name = metrics.latencies[key], _NAMES[key]
            lines += [section(_TITLES[key]), row(f"Mean {name} (ms):", found.mean)]
            lines += [row(f"Median {name} (ms):", found.median)]
            lines += [row(f"P{percentile_name(p)} {name} (ms):", found.percentile(p)) for p in percentiles]
    return "\n".join([*lines, closing()])


def serving_result(metrics: Metrics, percentiles: Sequence[float]) -> dict[str, Any]:
    """The same figures by vLLM's keys of ``--save-result``; all latencies, whichever are printed."""
    result: dict[str, Any] = {
        "duration": metrics.duration_s,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for key, found in metrics.latencies.items():
        result |= {f"mean_{key}_ms": found.mean, f"median_{key}_ms": found.median, f"std_{key}_ms": found.std}
        result |= {f"p{percentile_name(p)}_{key}_ms": found.percentile(p) for p in percentiles}
    return result
