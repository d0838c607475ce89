"""``--plot FILE.png``: latency percentiles, and tokens and running requests over time."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.metrics import LATENCIES, Distribution, Metrics, RequestRecord, running_requests, tokens_by_second
from shared.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"ttft": "#0072B2", "tpot": "#D55E00", "itl": "#009E73", "e2el": "#7A5195"}
"""Distinct for colour-blind readers too (three of Okabe and Ito's, and a purple darker than theirs)."""
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency"}
FORMATS = (".png", ".svg", ".pdf")
INK, FAINT, GRID = "#333333", "#777777", "#E4E4E4"
DASHED = (0, (5, 3))
PERCENTILE_TICKS = (0, 50, 75, 90, 95, 99, 99.9, 99.99, 99.999)
SHOWN = (50, 90, 99)
MONOSPACE = {"family": "monospace", "size": 9}
MOST_BUCKETS = 120
WIDTHS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
"""Widths of the buckets in which tokens are counted."""


def plotting_problem(path: str) -> str | None:
    """Why ``draw`` will not be able to write ``path``, in words; None: it will."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed; pip install 'headrace[bench]' adds it"
    folder, ending = os.path.dirname(path) or ".", os.path.splitext(path)[1]
    if ending not in FORMATS:
        return f"{path!r} does not end in {', '.join(FORMATS)}"
    return None if os.path.isdir(folder) else f"there is no folder {folder!r}"


def draw(path: str, records: Sequence[RequestRecord], metrics: Metrics, title: str) -> None:
    """Write the picture of a run with at least one successful request; the ending of ``path`` tells the format.

    Raises ``StartupError`` when it cannot be written.
    """
    from matplotlib.figure import Figure

    done = [record for record in records if not record.error]
    figure = Figure(figsize=(13, 6.5), dpi=120, layout="constrained")
    axes = figure.subplot_mosaic([["latency", "tokens"], ["latency", "running"]], width_ratios=[1, 1.15])
    latency_curves(axes["latency"], metrics.latencies)
    _tokens(axes["tokens"], done, metrics)
    _running(axes["running"], done)
    axes["tokens"].sharex(axes["running"])
    axes["tokens"].tick_params(labelbottom=False)
    for each in axes.values():
        plain_style(each)
    failed = f", {metrics.failed} failed" if metrics.failed else ""
    figure.suptitle(f"{title}{failed}", x=0.01, ha="left", fontsize=13, color=INK)
    save(figure, path)


def save(figure: Figure, path: str) -> None:
    """Write a picture; the ending of ``path`` tells the format.

    Raises ``StartupError`` when it cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise StartupError(f"--plot {path} cannot be written: {error}") from error


def plain_style(axes: Axes) -> None:
    """Faint grid, no frame."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(which="both", colors=INK, labelsize=9)


def level(axes: Axes, value: float, name: str, shown: str) -> None:
    """A dashed line, named beside the axes so that nothing lies behind the words."""
    axes.axhline(value, color=INK, linewidth=1, linestyle=DASHED)
    axes.annotate(
        f"{name}\n{shown}", (1, value), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
        ha="left", va="center", fontsize=9, color=INK,
    )  # fmt: skip


def latency_curves(axes: Axes, latencies: Mapping[str, Distribution]) -> None:
    """Percentile curves of ``LATENCIES`` on a scale that gives each further nine of the tail the same room."""
    shown = [name for name in LATENCIES if latencies[name].ms.max() > 0]
    most = max(len(latencies[name].ms) for name in shown)
    for name in shown:
        found = latencies[name]
        share = (np.arange(len(found.ms)) + 0.5) / len(found.ms)
        axes.plot(1 / (1 - share), np.sort(found.ms), color=COLORS[name], linewidth=2, label=_legend(name, found))
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [tick for tick in PERCENTILE_TICKS if 1 / (1 - tick / 100) <= 2 * most]
    axes.set_xticks([1 / (1 - tick / 100) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(1, 2 * max(most, 2))
    # Outputs that arrive together have gaps of nearly 0, which would take most of a logarithmic axis.
    axes.set_ylim(bottom=0.7 * min(_least(latencies[name]) for name in shown))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("percentile", color=INK)
    axes.set_title("Latency, ms", loc="left", fontsize=11, color=INK)
    axes.legend(
        title=f"{'':<17}" + "".join(f"{f'P{p}':>9}" for p in SHOWN), alignment="left", loc="upper left",
        bbox_to_anchor=(-0.02, -0.1), frameon=False, labelcolor=INK, prop=MONOSPACE, title_fontproperties=MONOSPACE,
    )  # fmt: skip


def _least(found: Distribution) -> float:
    """The smallest sample that is worth showing: not below a twentieth of the median."""
    return float(found.ms[found.ms >= max(found.median / 20, 1e-3)].min())


def _legend(name: str, found: Distribution) -> str:
    values = (found.percentile(p) for p in SHOWN)
    return f"{NAMES[name]:<12}" + "".join(f"{value:>9,.{0 if value >= 1000 else 1}f}" for value in values)


def _tokens(axes: Axes, records: Sequence[RequestRecord], metrics: Metrics) -> None:
    span = max(record.ended for record in records) - min(record.sent for record in records)
    width = next((width for width in WIDTHS_S if span / width <= MOST_BUCKETS), WIDTHS_S[-1])
    rates = np.array(tokens_by_second(records, width)) / width
    axes.stairs(rates, np.arange(len(rates) + 1) * width, fill=True, color=COLORS["ttft"], alpha=0.35)
    axes.stairs(rates, np.arange(len(rates) + 1) * width, color=COLORS["ttft"], linewidth=1.2)
    level(axes, metrics.output_throughput, "mean", f"{metrics.output_throughput:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Output tokens/s, in steps of {width:g} s", loc="left", fontsize=11, color=INK)


def _running(axes: Axes, records: Sequence[RequestRecord]) -> None:
    changes = running_requests(records)
    began = changes[0][0]
    times, counts = np.array([time - began for time, _ in changes]), [count for _, count in changes]
    axes.fill_between(times, counts, step="post", color=COLORS["e2el"], alpha=0.25, linewidth=0)
    axes.step(times, counts, where="post", color=COLORS["e2el"], linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title("Running requests", loc="left", fontsize=11, color=INK)
    axes.set_xlabel("seconds since the first request", color=INK)
