"""``--plot FILE.png``: percentiles of the latencies, and the engine over time; or a sweep's values side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.plot import COLORS, DASHED, FAINT, INK, latency_curves, level, plain_style, save
from headrace.simulate.advice import limit_of
from headrace.simulate.figures import Figures
from headrace.simulate.timeline import Cause, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_SPANS = 240
WIDE = 30.0
"""Latencies of a sweep that differ by more are drawn on a logarithmic axis."""
LIMITS = {Cause.NOBODY_WAITS: "nothing", Cause.SEATS: "seats", Cause.BLOCKS: "KV blocks", Cause.STEP: "step time"}
RUNNING, WAITING, MEMORY, PREEMPTED = COLORS["e2el"], COLORS["tpot"], COLORS["itl"], "#C0392B"
LINE = 190
"""Letters of a line of advice."""


def draw(path: str, figures: Figures, title: str, words: Sequence[str], max_num_seqs: int) -> None:
    """Write the picture of a simulation in which at least one request succeeded.

    Args:
        max_num_seqs: seats of all replicas together.

    Raises:
        StartupError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8.5), dpi=120, layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1, 1.25])[0]
    latency = left.subplots()
    latency_curves(latency, figures.latencies)
    plain_style(latency)
    names = ("tokens", "requests", "memory", "preemptions")
    axes = right.subplot_mosaic([[name] for name in names], height_ratios=[1.1, 1.1, 0.8, 0.5])
    series = figures.outcome.timeline.series(NUM_SPANS)
    edges = series["edges"] - series["edges"][0]
    _tokens(axes["tokens"], edges, series["output_tokens"], figures)
    _requests(axes["requests"], edges, series, max_num_seqs)
    _memory(axes["memory"], edges, series["used_blocks"] / figures.outcome.num_blocks, figures)
    _preemptions(axes["preemptions"], edges, series["preemptions"], figures)
    for each in axes.values():
        plain_style(each)
    for name in names[:-1]:
        axes[name].sharex(axes["preemptions"])
        axes[name].tick_params(labelbottom=False)
    axes["preemptions"].set_xlim(0, edges[-1])
    axes["preemptions"].set_xlabel("seconds of simulated time", color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    if words:
        sentence = "\n".join(textwrap.fill(each, LINE, break_on_hyphens=False) for each in words)
        figure.supxlabel(sentence, x=0.01, ha="left", fontsize=9.5, color=INK)
    save(figure, path)


def _filled(axes: Axes, edges: Floats, values: Floats, color: str, label: str | None = None) -> None:
    axes.stairs(values, edges, fill=True, color=color, alpha=0.3)
    axes.stairs(values, edges, color=color, linewidth=1.2, label=label)


def _tokens(axes: Axes, edges: Floats, rates: Floats, figures: Figures) -> None:
    _filled(axes, edges, rates, COLORS["ttft"])
    mean = figures.per_s(figures.output_tokens)
    level(axes, mean, "mean", f"{mean:,.0f}")
    axes.set_ylim(0, max(1.15 * rates.max(), 1.0))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(f"Output tokens/s, means over {edges[1]:.2g} s", loc="left", fontsize=11, color=INK)


def _requests(axes: Axes, edges: Floats, series: dict[str, Floats], max_num_seqs: int) -> None:
    from matplotlib.ticker import MaxNLocator

    _filled(axes, edges, series["running"], RUNNING, "running")
    axes.stairs(series["waiting"], edges, color=WAITING, linewidth=1.4, label="waiting")
    most = max(series["running"].max(), series["waiting"].max(), 1.0)
    if max_num_seqs < 2 * most:
        level(axes, max_num_seqs, "seats", f"{max_num_seqs:,}")
        most = max(most, max_num_seqs)
    axes.set_ylim(0, 1.2 * most)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title("Requests", loc="left", fontsize=11, color=INK)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 1.2), ncols=2, frameon=False, fontsize=9, labelcolor=INK)


def _memory(axes: Axes, edges: Floats, usage: Floats, figures: Figures) -> None:
    _filled(axes, edges, 100 * usage, MEMORY)
    level(axes, 100 * figures.usage_mean, "mean", f"{100 * figures.usage_mean:.0f} %")
    axes.set_ylim(0, 105)
    axes.set_yticks([0, 50, 100])
    axes.set_title("KV blocks in use, %", loc="left", fontsize=11, color=INK)


def _preemptions(axes: Axes, edges: Floats, rates: Floats, figures: Figures) -> None:
    axes.set_title("Preemptions/s", loc="left", fontsize=11, color=INK)
    if not figures.outcome.preemptions:
        axes.set_yticks([0])
        axes.set_ylim(0, 1)
        axes.annotate("none", (0.5, 0.4), xycoords="axes fraction", ha="center", fontsize=10, color=FAINT)
        return
    _filled(axes, edges, rates, PREEMPTED)
    axes.set_ylim(0, 1.15 * rates.max())


def draw_sweep(path: str, name: str, values: Sequence[str], all_figures: Sequence[Figures], title: str) -> None:
    """Write the picture of a sweep: what is gained and what it costs, value by value.

    Raises:
        StartupError: it cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(13, 7), dpi=120, layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    places = np.arange(len(values))
    rates = [each.per_s(each.output_tokens) for each in all_figures]
    bars = axes[0][0].bar(places, rates, width=0.6, color=COLORS["ttft"], alpha=0.7)
    axes[0][0].bar_label(bars, [LIMITS[limit_of(each)] for each in all_figures], fontsize=9, color=INK, padding=3)
    axes[0][0].margins(y=0.1)
    axes[0][0].set_title("Output tokens/s, and what limits", loc="left", fontsize=11, color=INK)
    for place, key in (((0, 1), "ttft"), ((1, 0), "tpot")):
        panel = axes[place[0]][place[1]]
        for label, style, p in (("P99", DASHED, 99), ("P50", "solid", 50)):
            found = [each.latencies[key].percentile(p) for each in all_figures]
            panel.plot(places, found, color=COLORS[key], linestyle=style, marker="o", markersize=4, label=label)
        if all(each.latencies[key].median > 0 for each in all_figures) and _spread(all_figures, key) > WIDE:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            panel.yaxis.set_minor_locator(NullLocator())
        else:
            panel.set_ylim(bottom=0)
        panel.set_title(f"{key.upper()}, ms", loc="left", fontsize=11, color=INK)
        panel.legend(frameon=False, fontsize=9, labelcolor=INK)
    panel = axes[1][1]
    panel.plot(
        places, [100 * each.usage_mean for each in all_figures], color=MEMORY, marker="o", markersize=4,
        label="KV blocks in use, mean",
    )  # fmt: skip
    panel.plot(
        places, [100 * each.usage_max for each in all_figures], color=MEMORY, linestyle=DASHED, marker="o",
        markersize=4, label="KV blocks in use, most",
    )  # fmt: skip
    panel.plot(
        places, [100 * each.recomputed_share for each in all_figures], color=PREEMPTED, marker="o", markersize=4,
        label="computed again after preemptions, of prompt tokens",
    )  # fmt: skip
    panel.set_ylim(0, max(110, panel.get_ylim()[1]))
    panel.set_title("Memory, %", loc="left", fontsize=11, color=INK)
    panel.legend(frameon=False, fontsize=9, labelcolor=INK)
    for panel in axes.flat:
        plain_style(panel)
        panel.set_xticks(places, values)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    for panel in axes[1]:
        panel.set_xlabel(f"--{name}", color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    save(figure, path)


def _spread(all_figures: Sequence[Figures], key: str) -> float:
    """The largest P99 by the smallest median."""
    found = [each.latencies[key] for each in all_figures]
    return max(each.percentile(99) for each in found) / min(each.median for each in found)
