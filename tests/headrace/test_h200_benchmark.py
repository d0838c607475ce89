"""``benchmarks/h200.sh``: its cases, what it keeps of them, its table; and some cases with real processes."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tiny_models import TinyModels

from benchmarks.h200 import __main__ as command
from benchmarks.h200 import table
from benchmarks.h200.measures import MEASURES
from benchmarks.h200.plan import CASES, GROUPS, MODELS, Group, Model
from benchmarks.h200.recovery import recovery
from benchmarks.h200.results import RATIOS, UNITS, Results
from benchmarks.h200.work import Skipped, Work

ENVIRONMENT = {"commit": "abc", "gpu": "NVIDIA H200", "torch": "2.11.0", "host_canary_s": 0.8}
SHAPE = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


@pytest.fixture
def results(tmp_path: pathlib.Path) -> Results:
    return Results(tmp_path / "results.json", dict(ENVIRONMENT))


def figures_in(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    _, *figures = json.loads(path.read_text())
    return {figure["case"]: figure for figure in figures}


def test_every_case_can_be_measured_and_has_a_unit() -> None:
    assert len(set(CASES)) == len(CASES)
    for case in CASES:
        first = case.partition("_")[0]
        assert first in MEASURES
        assert first in UNITS
    known = {*CASES, *RATIOS} | {row.case for row in table.ROWS if row.case.startswith(("mixed_", "documents_", "kv_"))}
    assert {row.case for row in table.ROWS} <= known
    assert {case for pair in RATIOS.values() for case in pair} <= set(CASES)


def test_models_and_their_cases() -> None:
    small, large = (Model.named(name) for name in MODELS)
    chosen = {model.name: [case for group in GROUPS for case in group.chosen(model, ())] for model in (small, large)}
    assert set(chosen["qwen06b"]) == set(CASES) - {"mixed", "documents"}
    assert set(chosen["llama8b"]) == set(CASES) - {"nano_fp8"}
    assert [case for group in GROUPS for case in group.chosen(small, ("mix", "mixed"))] == ["mix"]
    assert Model.named("smollm2-135m").shape.is_file()
    with pytest.raises(ValueError, match="'absent' is neither qwen06b nor llama8b"):
        Model.named("absent")


def test_work_is_the_workloads_own_unless_it_is_scaled() -> None:
    whole = Work(2).workload("nano", 10_001)
    assert (len(whole), sum(len(ids) for ids, _ in whole), sum(out for _, out in whole)) == (256, 142_827, 133_966)
    work = Work(2, 0.1)
    first, second = work.decode(3, 5000), work.decode(3, 5000)
    assert [(len(ids), out) for ids, out in first] == [(13, 26)] * 3
    assert first != second


def test_the_best_run_counts_and_completes_ratios(results: Results) -> None:
    results.add("qwen06b", "nano", [90.0, 100.0, 95.0])
    results.add("qwen06b", "decode_b1", [1.5, 1.25])
    results.add("llama8b", "decode_b1_eager", [9.0])
    results.add("qwen06b", "decode_b1_eager", [5.0, 6.0])
    environment, *figures = json.loads(results.path.read_text())
    assert environment == ENVIRONMENT
    assert [
        (figure["model"], figure["case"], figure["value"], figure["unit"], figure["repeats"]) for figure in figures
    ] == [
        ("qwen06b", "nano", 100.0, "output tok/s", 3),
        ("qwen06b", "decode_b1", 1.25, "ms/token", 2),
        ("llama8b", "decode_b1_eager", 9.0, "ms/token", 1),
        ("qwen06b", "decode_b1_eager", 5.0, "ms/token", 2),
        ("qwen06b", "graphs_gain_b1", 4.0, "ratio", 2),
    ]
    assert figures[0]["runs"] == [90.0, 100.0, 95.0]


def test_figures_that_are_kept_say_their_commit(results: Results) -> None:
    results.add("qwen06b", "nano", [100.0])
    results.add("qwen06b", "mix", [100.0])
    later = Results(results.path, {**ENVIRONMENT, "commit": "def"}, keep=True)
    later.add("qwen06b", "mix", [200.0])
    found = figures_in(results.path)
    assert (found["nano"]["value"], found["nano"]["commit"]) == (100.0, "abc")
    assert found["mix"]["value"] == 200.0
    assert "commit" not in found["mix"]
    assert "commit def (some figures, as the file says, are of abc), torch 2.11.0" in table.markdown(later.all())
    Results(results.path, dict(ENVIRONMENT)).add("qwen06b", "uniform", [1.0])
    assert set(figures_in(results.path)) == {"uniform"}


def test_the_table_tells_advantage_and_goals(results: Results) -> None:
    for model, case, value in (
        ("qwen06b", "decode_b8", 1.07),
        ("qwen06b", "nano", 20_000.0),
        ("llama8b", "nano", 12_036.25),
        ("llama8b", "mixed_worst_gap", 50.0),
        ("llama8b", "idle_b256", 0.031),
        ("smollm2-135m", "mix", 1.0),
    ):
        results.add(model, case, [value])
    lines = table.markdown(results.all()).splitlines()
    assert lines[2:6] == [
        "| decode, 8 rows, ms per token | **1.07** | 2.14–2.83 | 2.00 | ≤ 1.3 ✓ | – | 5.07 | – | ≤ 4.7 |",
        "| nano, output tok/s | **20,000** | 20,890 | 0.96 | ≥ 24,000, missed by 16.7% "
        "| **12,036** | 9,629 | 1.25 | ≥ 10,300 ✓ |",
        "| mixed, worst gap, ms | – | – | – | – | **50** | 208 or 36 ¹ | 0.72 | ≤ 40, missed by 25.0% |",
        "| GPU idle between decode steps, 256 rows | – | – | – | – | **3.1%** | – | – | ≤ 5.0% ✓ |",
    ]
    assert lines[-1].startswith("NVIDIA H200; commit abc, torch 2.11.0, ten million Python additions")
    assert not any("mix," in line for line in lines)
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    fresh = table.updated(page, results.all())
    assert fresh.startswith(f"before\n{table.BEGIN}\n\n| |")
    assert fresh.endswith(f"{table.END}\nafter\n")
    assert table.updated(fresh, results.all()) == fresh


def test_the_page_is_fresh() -> None:
    assert table.main(["--check"]) == 0


def test_a_picture_of_the_figures(results: Results, tmp_path: pathlib.Path) -> None:
    results.add("qwen06b", "nano", [20_000.0])
    results.add("llama8b", "startup_cold", [20.0])
    table.draw(tmp_path / "figures.png", results.all())
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_one_failure_does_not_end_the_others(
    results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    @contextlib.contextmanager
    def opened(model: Model, settings: Mapping[str, Any]) -> Iterator[str]:
        if "bad" in settings:
            raise TypeError("an unknown setting")
        yield "engine"
        ended.append("engine")

    def measure(subject: str, work: Work, case: str) -> Iterator[dict[str, float]]:
        assert subject == "engine"
        yield {case: 1.0}
        if case == "nano":
            raise RuntimeError("broken after the first run")
        if case == "decode_b8":
            raise Skipped("nothing to see")
        if case == "uniform":
            time.sleep(30)
        yield {case: 2.0}

    groups = (
        Group("bad", ("decode_b1_eager",), {"bad": True}, opens=opened),
        Group("good", ("nano", "decode_b1", "decode_b8"), opens=opened),
        Group("stuck", ("uniform", "mix"), opens=opened),
        Group("last", ("prefix",), opens=opened),
    )
    monkeypatch.setattr(command, "GROUPS", groups)
    monkeypatch.setattr(command, "MEASURES", dict.fromkeys(MEASURES, measure))
    monkeypatch.setattr(command, "MAX_CASE_S", 4.0)
    failed = command.Run(Model.named("qwen06b"), results, Work(2), 60.0).all([])
    assert [name.removeprefix("qwen06b ") for name in failed] == ["decode_b1_eager", "nano", "uniform", "mix"]
    found = {case: (figure["value"], figure["repeats"]) for case, figure in figures_in(results.path).items()}
    assert found == {
        "nano": (1.0, 1),
        "decode_b1": (1.0, 2),
        "decode_b8": (1.0, 1),
        "uniform": (1.0, 1),
        "prefix": (2.0, 2),
    }
    assert len(ended) == 2
    printed = capsys.readouterr()
    assert "qwen06b decode_b8: skipped, nothing to see" in printed.out
    assert "TypeError: an unknown setting" in printed.err

    assert command.Run(Model.named("qwen06b"), results, Work(2), 0.0).all([]) == []
    assert "qwen06b prefix: skipped, out of time" in capsys.readouterr().out


def test_every_measure_with_real_processes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shape, out = tmp_path / "tiny.json", tmp_path / "results.json"
    shape.write_text(json.dumps(SHAPE))
    settings = {"enable_prefix_caching": True, "target_itl_ms": None, "max_model_len": 16384}
    cases = ("decode_b8", "mix", "idle_b8", "mixed", "prefix", "documents")
    starts = next(group for group in GROUPS if "startup_warm" in group.cases)
    monkeypatch.setattr(command, "GROUPS", (Group("all in one engine", cases, settings), starts))
    assert command.main(["--models", str(shape), "--repeat=2", "--scale=0.02", f"--out={out}", "--commit=abc"]) == 0
    environment, *_ = json.loads(out.read_text())
    assert (environment["commit"], environment["scale"]) == ("abc", 0.02)
    found = figures_in(out)
    mixed = {"mixed_worst_gap", "mixed_median_ttft", "mixed_p50_gap", "mixed_p99_gap"}
    documents = {"documents", "documents_reserved", "kv_documents", "kv_documents_reserved"}
    assert set(found) == {"decode_b8", "mix", "idle_b8", "prefix", *mixed, *documents}
    assert {figure["model"] for figure in found.values()} == {"tiny"}
    assert [found[case]["repeats"] for case in ("decode_b8", "mix", "prefix", "mixed_worst_gap")] == [2, 2, 2, 1]
    assert min(found[case]["value"] for case in ("mix", "prefix", *mixed, *documents - {"kv_documents"})) > 0
    printed = capfd.readouterr().out
    assert (
        "tiny startup_cold, tiny startup_warm, tiny recovery_b64: skipped, checkpoints are made of the shapes"
        in printed
    )
    assert "NOT MEASURED: work scaled by 0.02" in printed


def test_streams_go_on_when_the_worker_is_killed(tiny_models: TinyModels) -> None:
    [found] = recovery(tiny_models.folder("qwen3"), Work(1, 0.1), "recovery_b8")
    assert 0 < found["recovery_b8_first"] <= found["recovery_b8"]
