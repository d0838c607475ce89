"""``python -m benchmarks.h200.table``: the table and the picture in docs/benchmarks.md, from the file of figures.

``--check`` only compares the table. The picture needs matplotlib, and stays as it is without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.h200.plan import MODELS
from benchmarks.h200.results import RATES, UNITS

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "h200.png"
BEGIN, END = "<!-- h200: begin -->", "<!-- h200: end -->"
PEER = "vLLM 0.26.0, measured on 2026-11-29 with torch 2.11.0+cu130"
NAMES = {"qwen06b": "Qwen3-0.6B", "llama8b": "Llama-3.1-8B"}
COLORS = {"qwen06b": "#0072B2", "llama8b": "#D55E00"}


class Peer(NamedTuple):
    """vLLM's figure; its best one counts where it was measured more than once, or with more than one setting."""

    best: float
    shown: str = ""


class Row(NamedTuple):
    """A case; vLLM's figures and the goals are in the order of ``NAMES``."""

    case: str
    what: str
    peer: tuple[Peer | None, Peer | None] = (None, None)
    goal: tuple[float | None, float | None] = (None, None)
    """At most, or for rates and ``graphs_gain_b1`` at least."""

    @property
    def more_is_better(self) -> bool:
        return self.case == "graphs_gain_b1" or UNITS.get(self.case.partition("_")[0]) in RATES


ROWS = (
    Row("decode_b1", "decode, 1 row, ms per token", (Peer(2.57), Peer(4.95)), (1.0, 4.4)),
    Row("decode_b8", "decode, 8 rows, ms per token", (Peer(2.14, "2.14–2.83"), Peer(5.07)), (1.3, 4.7)),
    Row("decode_b32", "decode, 32 rows, ms per token", (Peer(2.45, "2.45–2.83"), Peer(5.51)), (1.6, 5.2)),
    Row("nano", "nano, output tok/s", (Peer(20890), Peer(9629)), (24000, 10300)),
    Row("uniform", "uniform, output tok/s", (Peer(16861), Peer(3944)), (18500, 4200)),
    Row("mix", "mix, output tok/s", (Peer(21348), Peer(11128)), (25000, 12000)),
    Row("nano_fp8", "nano with fp8 KV, output tok/s", (Peer(24860), None), (32000, None)),
    Row("prefix", "prefix, output tok/s", (Peer(9450), Peer(5330)), (14000, 6500)),
    Row("documents", "documents, requests per second"),
    Row("documents_reserved", "documents with memory reserved for the longest request, requests per second"),
    Row("kv_documents", "documents, KV tokens held at most"),
    Row("kv_documents_reserved", "documents, KV tokens reserved"),
    Row("mixed_worst_gap", "mixed, worst gap, ms", (None, Peer(36, "208 or 36 ¹")), (None, 40)),
    Row("mixed_median_ttft", "mixed, median time to first token, ms", (None, Peer(224, "224 or 261 ¹")), (None, 240)),
    Row("mixed_p50_gap", "mixed, median gap, ms", (None, Peer(6.5))),
    Row("mixed_p99_gap", "mixed, P99 gap, ms", (None, Peer(31))),
    Row("startup_cold", "start to ready, caches cold, s", (Peer(89), Peer(113)), (40, 45)),
    Row("startup_warm", "start to ready, caches warm, s", (Peer(65), Peer(30, "30–45")), (12, 15)),
    Row("recovery_b64", "kill -9 of the worker, 64 streams: all go on after, s"),
    Row("graphs_gain_b1", "eager ÷ graphs, 1 row", goal=(2, 1.3)),
    Row("idle_b32", "GPU idle between decode steps, 32 rows", goal=(0.10, 0.05)),
    Row("idle_b256", "GPU idle between decode steps, 256 rows", goal=(None, 0.05)),
    Row("target_itl_cost", "nano without ÷ with --target-itl-ms", goal=(1.02, 1.02)),
    Row("invariant_cost_b1", "batch-invariant ÷ plain, decode, 1 row"),
    Row("invariant_cost_b32", "batch-invariant ÷ plain, decode, 32 rows"),
    Row("invariant_cost_nano", "plain ÷ batch-invariant, nano"),
)
assert tuple(NAMES) == tuple(MODELS)


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of a file's contents: all rows that have a figure, beside vLLM's and the goals."""
    environment, *figures = results
    found = {(figure["model"], figure["case"]): float(figure["value"]) for figure in figures}
    heads = [f"{name} | vLLM | × | goal" for name in NAMES.values()]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * 4 * len(NAMES)}"]
    for row in ROWS:
        if any((model, row.case) in found for model in NAMES):
            cells = [
                cell for index, model in enumerate(NAMES) for cell in _cells(row, index, found.get((model, row.case)))
            ]
            lines.append(f"| {row.what} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _circumstances(environment, figures)])


def advantage(row: Row, index: int, value: float | None) -> float | None:
    """How many times as good as vLLM's figure this one is."""
    peer = row.peer[index]
    if value is None or peer is None or not value:
        return None
    return value / peer.best if row.more_is_better else peer.best / value


def _cells(row: Row, index: int, value: float | None) -> Iterator[str]:
    peer, goal, times = row.peer[index], row.goal[index], advantage(row, index, value)
    yield "–" if value is None else f"**{_shown(row, value)}**"
    yield "–" if peer is None else peer.shown or _shown(row, peer.best)
    yield "–" if times is None else f"{times:.2f}"
    yield _goal(row, value, goal)


def _goal(row: Row, value: float | None, goal: float | None) -> str:
    """The goal, and whether it is met, or by how much of it not."""
    if goal is None:
        return "–"
    text = f"{'≥' if row.more_is_better else '≤'} {_shown(row, goal)}"
    if value is None:
        return text
    is_met = value >= goal if row.more_is_better else value <= goal
    return f"{text} ✓" if is_met else f"{text}, missed by {abs(value - goal) / goal:.1%}"


def _shown(row: Row, value: float) -> str:
    if row.case.startswith("idle"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _circumstances(environment: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> str:
    words = [f"{name} {environment[name]}" for name in ("commit", "torch", "triton", "driver") if environment.get(name)]
    others = dict.fromkeys(str(figure["commit"]) for figure in figures if "commit" in figure)
    if others and environment.get("commit"):
        words[0] += f" (some figures, as the file says, are of {', '.join(others)})"
    canary = f"ten million Python additions on the host take {environment['host_canary_s']} s"
    scale = f"; NOT MEASURED: work scaled by {environment['scale']}" if "scale" in environment else ""
    return f"{environment.get('gpu') or 'No GPU'}; {', '.join([*words, canary])}. Beside it {PEER}{scale}."


def updated(page: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The page with a fresh table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}"


def update_docs() -> None:
    """Put the figures of ``RESULTS`` into the page and the picture."""
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(updated(PAGE.read_text(), results))
    if importlib.util.find_spec("matplotlib") is not None:
        draw(PICTURE, results)


def draw(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """How many times as good as vLLM each case is, as bars; starts, which are many times shorter, are left out."""
    from matplotlib.figure import Figure

    found = {(figure["model"], figure["case"]): float(figure["value"]) for figure in results[1:]}
    times = {
        (model, row.case): ratio
        for row in ROWS
        if UNITS.get(row.case.partition("_")[0]) != "s"
        for index, model in enumerate(NAMES)
        if (ratio := advantage(row, index, found.get((model, row.case)))) is not None
    }
    cases = [row for row in ROWS if any((model, row.case) in times for model in NAMES)]
    figure = Figure(figsize=(8, 0.6 + 0.42 * len(cases)), dpi=90, layout="constrained")
    axes = figure.subplots()
    for index, model in enumerate(NAMES):
        bars = [(place, times[model, row.case]) for place, row in enumerate(cases) if (model, row.case) in times]
        places = [place + 0.4 * index - 0.2 for place, _ in bars]
        shown = axes.barh(places, [ratio for _, ratio in bars], 0.38, color=COLORS[model], label=NAMES[model])
        axes.bar_label(shown, fmt=" %.2f", fontsize=8)
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks(range(len(cases)), [row.what for row in cases], fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("times as good as vLLM 0.26.0 on one H200", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Write table and picture, or check that the table is fresh."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.h200.table", description="Write table and picture.")
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args(argv)
    if args.check:
        page = PAGE.read_text()
        if page != updated(page, json.loads(RESULTS.read_text())):
            print(f"{PAGE} is behind {RESULTS}: run python -m benchmarks.h200.table", file=sys.stderr)
            return 1
        return 0
    update_docs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
