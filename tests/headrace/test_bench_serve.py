"""``headrace bench serve`` against a running server, as a user runs it."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from headrace.bench.main import KINDS, main
from headrace.bench.metrics import RequestRecord, compute_metrics
from headrace.bench.plot import draw, plotting_problem
from headrace.bench.serve_flags import parse_flags

Run = Callable[..., "subprocess.CompletedProcess[str]"]
KEY = "the key of the test server"
PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ("--num-prompts=6", "--random-input-len=16", "--random-output-len=4", "--temperature=0")
KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
DETAILS = {
    "input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "latencies", "start_times", "queue_times"
}  # fmt: skip


class Bench:
    """``headrace bench`` within this process: what it returned and printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        code = main(words)
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    return Bench(capsys)


def figure(page: str, label: str) -> float:
    """The value of a line of the result block."""
    return float(re.findall(rf"^{re.escape(label)} +([\d.]+) *$", page, re.MULTILINE)[0])


def saved(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


def test_a_whole_run(demo_server: str, asks: Run, tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "p.png"
    done = asks(
        "bench", "serve", *SMALL, f"--base-url={demo_server}", "--max-concurrency=3", "--num-warmups=2",
        "--ready-check-timeout-sec=20", "--goodput", "ttft:60000", "e2el:60000", "--metric-percentiles=50,90",
        "--percentile-metrics=ttft,e2el", "--save-result", "--save-detailed", f"--result-dir={tmp_path / 'new'}",
        "--result-filename=r.json", "--metadata", "machine=here", f"--plot={picture}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    block, _, formulas = done.stdout.partition("=" * 50 + "\n")
    assert block.startswith("============ Serving Benchmark Result ============\n")
    expected = {"Successful requests:": 6, "Failed requests:": 0, "Maximum request concurrency:": 3,
                "Total input tokens:": 96, "Total generated tokens:": 24, "Peak concurrent requests:": 3}  # fmt: skip
    assert {label: figure(block, label) for label in expected} == expected
    assert {"P50 TTFT (ms):", "P90 E2EL (ms):"} <= set(re.findall(r"^P.*:", block, re.MULTILINE))
    assert "TPOT" not in block
    assert formulas.startswith("TTFT = ")
    result = saved(tmp_path / "new" / "r.json")
    assert set(result) == KEYS | DETAILS | {"machine"} | {
        f"p{p}_{name}_ms" for p in (50, 90) for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert result["request_goodput"] == result["request_throughput"] == 6 / result["duration"]
    assert (result["model_id"], result["backend"], result["request_rate"]) == ("demo", "openai", "inf")
    assert (result["input_lens"], result["output_lens"], result["errors"]) == ([16] * 6, [4] * 6, [""] * 6)
    assert all(len(gaps) <= 3 for gaps in result["itls"])
    assert all(result["generated_texts"])
    assert picture.read_bytes().startswith(PNG)


def test_chat_at_a_rate_with_appended_results(demo_server: str, bench: Bench, tmp_path: pathlib.Path) -> None:
    words = ("serve", *SMALL, f"--base-url={demo_server}", "--backend=openai-chat", "--request-rate=30")
    file = tmp_path / "r.json"
    for seed in (1, 2):
        assert bench(*words, f"--seed={seed}", "--append-result", f"--result-filename={file}") == 0, bench.err
        assert figure(bench.out, "Request rate configured (RPS):") == 30
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert [set(result) for result in results] == [KEYS, KEYS]
    assert [result["total_output_tokens"] for result in results] == [24, 24]
    # The chat template's tokens come on top of the 16.
    assert all(result["total_input_tokens"] > 6 * 16 for result in results)


def test_a_load_that_fails_is_counted_and_explained(demo_server: str, bench: Bench) -> None:
    words = ("serve", *SMALL, f"--base-url={demo_server}", "--model=demo")
    assert bench(*words, "--extra-body", '{"temperature": 1000}', "--num-warmups=1") == 1
    assert figure(bench.out, "Failed requests:") == 6
    assert "1 warm-up requests failed: HTTP 400: temperature" in bench.err
    assert "6 failed: HTTP 400: temperature" in bench.err
    assert bench(*words, "--served-model-name=another") == 1
    assert "6 failed: HTTP 404: " in bench.err
    assert bench(*words, "--header", "authorization=Bearer no") == 1
    assert "6 failed: HTTP 401: " in bench.err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ([], 1, "http://127.0.0.1:9/v1/models does not tell a model (give --model): "),
        (["--model=demo", "--ready-check-timeout-sec=0.1"], 1, "not ready after 0.1 s: ClientConnectorError"),
        (["--model=/none"], 78, "(--tokenizer says whose vocabulary to use)"),
        (["--model=demo", "--dataset-name=sharegpt"], 78, "sharegpt needs --dataset-path"),
    ],
)
def test_what_prevents_a_run_is_said(bench: Bench, flags: list[str], code: int, words: str) -> None:
    assert bench("serve", "--base-url=http://127.0.0.1:9", *flags) == code
    assert bench.out == ""
    assert words in bench.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-prompt=1"], "did you mean --num-prompts?"),
        (["--goodput", "itl:5"], "'itl:5' is not NAME:MS"),
        (["--goodput", "ttft:fast"], "'ttft:fast' is not NAME:MS"),
        (["--request-rate=0"], "0 is not above 0"),
        (["--max-concurrency=0"], "0 is below 1"),
        (["--percentile-metrics=ttft,ttf"], "'ttf' is not one of"),
        (["--metric-percentiles=101"], "not a list of numbers in 0..100"),
        (["--header", "X"], "'X' is not KEY=VALUE"),
        (["--extra-body", "[]"], "'[]' is not a JSON object"),
        (["--plot=p.txt"], "--plot: 'p.txt' does not end in .png"),
        (["--plot=/none/p.png"], "--plot: there is no folder '/none'"),
    ],
)
def test_flags_that_cannot_be_read(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags("headrace bench serve", flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_defaults_and_lists() -> None:
    args = parse_flags("", ["--host=::1", "--port=9", "--goodput", "ttft:200", "tpot:50", "--header", "A=b=c", "D=e"])
    assert (args.base_url, args.endpoint) == ("http://[::1]:9", "/v1/completions")
    assert args.goodput == {"ttft": 200, "tpot": 50}
    assert args.header == {"A": "b=c", "D": "e"}
    args = parse_flags("", ["--backend=openai-chat", "--base-url=http://x/", "--metric-percentiles=50,99.9"])
    assert (args.base_url, args.endpoint) == ("http://x", "/v1/chat/completions")
    assert (args.percentile_metrics, args.metric_percentiles) == (["ttft", "tpot", "itl"], [50, 99.9])


def test_kinds_of_benchmarks(bench: Bench) -> None:
    assert bench("serv") == 2
    assert bench.err == "headrace bench: error: unknown kind 'serv'; did you mean serve?\n"
    assert bench("--help") == 0
    assert all(kind in bench.out for kind in KINDS)
    assert bench() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_exists(kind: str) -> None:
    assert callable(importlib.import_module(f"headrace.bench.{kind}").main)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_smallest_runs_can_be_drawn(tmp_path: pathlib.Path, outputs: int) -> None:
    times = [1.0 + 0.0 * n for n in range(outputs)]
    record = RequestRecord(sent=0.0, output_times=times, ended=1.0, prompt_tokens=1, output_tokens=outputs)
    path = tmp_path / "p.svg"
    draw(str(path), [record, RequestRecord(error="x")], compute_metrics([record], 1.0, {}), "title")
    assert "</svg>" in path.read_text()


def test_plotting_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'headrace[bench]'" in (plotting_problem(os.devnull) or "")
