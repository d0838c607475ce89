"""The benches without HTTP, each run once with real processes and random weights of a tiny shape."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import TinyModels

from headrace.bench import latency, mixed, offline, prefix, startup, throughput
from headrace.bench.main import main as bench
from headrace.bench.tokenizer import open_tokenizer
from headrace.llm import LLM
from headrace.sampling_params import SamplingParams
from shared.config import Settings
from shared.lifecycle import EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from shared.model_config import load_model_config
from shared.model_source import resolve_model

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
Run = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def shape_file(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(SHAPE))
    return file


@pytest.fixture
def run_bench(shape_file: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``headrace bench KIND`` on the tiny shape; its result file and what it printed."""

    def run(kind: str, *flags: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / f"{kind}.json"
        common = ("--model-config", str(shape_file), "--threads=1", "--output-json", str(file))
        code = bench([kind, *common, *flags])
        printed, errors = capfd.readouterr()
        assert code == EXIT_OK, errors
        result = json.loads(file.read_text())
        check_record(result, kind, shape_file)
        return result, printed + errors

    return run


def check_record(result: dict[str, Any], kind: str, shape_file: pathlib.Path) -> None:
    assert result["bench"] == kind
    assert result["model"] == str(shape_file)
    assert result["settings"] | {"load_format": "dummy", "threads": 1} == result["settings"]
    assert result["versions"]["headrace"]
    assert result["versions"]["torch"]
    assert result["machine"]["cpu"]["cores"] >= 1
    assert result["options"]["model_config"] == str(shape_file)


def test_latency(run_bench: Run) -> None:
    flags = ("--input-len=8", "--output-len=4", "--batch-size=3", "--num-iters-warmup=1", "--num-iters=4")
    result, printed = run_bench("latency", *flags)
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert result["settings"]["enable_prefix_caching"] is False
    assert f"Avg latency: {result['avg_latency']} seconds" in printed
    assert "99% percentile latency: " in printed
    assert latency.FORMULAS in printed
    assert "Bench iterations: 100%" in printed


def test_throughput(run_bench: Run) -> None:
    flags = ("--input-len=20", "--output-len=5", "--num-prompts=7", "--repeat=3", "--disable-tqdm")
    result, printed = run_bench("throughput", *flags)
    assert len(result["runs"]) == 3
    assert sorted(run["elapsed_time"] for run in result["runs"])[1] == result["elapsed_time"]
    for figures in (result, *result["runs"]):
        assert figures["num_requests"] == 7
        assert (figures["total_prompt_tokens"], figures["total_output_tokens"]) == (140, 35)
        assert figures["total_num_tokens"] == 175
        assert figures["cached_prompt_tokens"] == 0
        assert figures["requests_per_second"] == pytest.approx(7 / figures["elapsed_time"])
        assert figures["tokens_per_second"] == pytest.approx(175 / figures["elapsed_time"])
    rates = f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total tokens/s"
    assert f"Throughput: {rates}, {result['output_tokens_per_second']:.2f} output tokens/s" in printed
    assert "Total num prompt tokens:  140\nTotal num output tokens:  35\n" in printed
    assert throughput.FORMULAS in printed
    assert "it/s" not in printed


def test_throughput_of_a_workload(run_bench: Run) -> None:
    result, printed = run_bench("throughput", "--dataset-name=decode", "--num-prompts=2", "--n=2")
    assert (result["total_prompt_tokens"], result["total_output_tokens"]) == (2 * 128, 2 * 2 * 256)
    gained = result["elapsed_time"] - result["elapsed_time_one_token"]
    assert result["ms_per_token"] == pytest.approx(1000 * gained / 255)
    assert f"{result['ms_per_token']:.3f} ms per token" in printed
    assert throughput.DECODE_FORMULA in printed


def test_prefix(run_bench: Run) -> None:
    flags = ("--num-prompts=4", "--repeat-count=2", "--input-length-range=70:80", "--prefix-len=64", "--output-len=3")
    result, printed = run_bench("prefix", *flags, "--cache-prefix-first")
    assert result["off"]["cached_prompt_tokens"] == 0
    assert result["on"]["cached_prompt_tokens"] >= 8 * 64
    assert result["on"]["total_output_tokens"] == result["off"]["total_output_tokens"] == 8 * 3
    assert result["speedup"] == pytest.approx(result["off"]["elapsed_time"] / result["on"]["elapsed_time"])
    assert f"hit rate {result['on']['hit_rate']:.1%}" in printed
    assert prefix.FORMULAS in printed


def test_mixed(run_bench: Run) -> None:
    flags = ("--num-decodes=3", "--decode-input-len=8", "--prompt-len=150", "--num-prompts=3", "--num-warmups=1")
    result, printed = run_bench("mixed", *flags, "--interval=0.05", "--max-num-batched-tokens=64")
    assert len(result["ttfts_ms"]) == 3
    assert 0 < result["median_ttft_ms"] == sorted(result["ttfts_ms"])[1] <= result["worst_ttft_ms"]
    assert result["num_gaps"] >= 3 * 3
    assert 0 < result["gap_percentiles_ms"]["50"] <= result["gap_percentiles_ms"]["99"] <= result["worst_gap_ms"]
    assert result["worst_gap_ms"] <= 1000 * result["duration_s"]
    assert result["steady_tokens_per_second"] > 0
    assert result["settings"]["enable_prefix_caching"] is False
    assert "target_itl_ms" not in result["settings"]
    assert f"Gaps: worst {result['worst_gap_ms']:.2f} ms, of {result['num_gaps']}" in printed
    assert mixed.FORMULAS in printed


def test_mixed_needs_room_for_the_steady_requests(shape_file: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--decode-input-len=500", "--prompt-len=8", "--num-decodes=2", "--num-prompts=1", "--num-warmups=4"]
    code = bench(["mixed", "--model-config", str(shape_file), "--threads=1", "--interval=0.5", *flags])
    assert code == EXIT_USAGE
    assert "the context is too short" in capfd.readouterr().err


def test_cold_startup(run_bench: Run) -> None:
    result, printed = run_bench("startup", "--num-iters-cold=1", "--num-iters-warmup=0", "--num-iters-warm=0")
    phases = result["cold_phases"]
    assert list(phases) == list(startup.PHASES)
    reached = [times[0] for times in phases.values()]
    assert reached == sorted(reached)
    assert reached[0] > 0
    assert result["cold_startup_times"] == phases["ready"]
    assert result["cold_startup_percentiles"]["90"] == result["avg_cold_startup_time"] == phases["ready"][0]
    assert "warm_startup_times" not in result
    assert {"imports", "device", "weights"} <= result["cold_parts"].keys()
    assert all(0 <= seconds < phases["ready"][0] for (seconds,) in result["cold_parts"].values())
    assert "Parts of the worker's start" in printed
    assert f"COLD STARTUP\nAvg startup time: {phases['ready'][0]:.2f} seconds" in printed
    assert "WARM" not in printed
    assert startup.FORMULAS in printed


def test_warm_startup_of_a_server(run_bench: Run, tiny_models: TinyModels) -> None:
    flags = ("--num-iters-cold=0", "--num-iters-warmup=0", "--num-iters-warm=1")
    result, printed = run_bench("startup", "--serve", "--tokenizer", str(tiny_models.folder("llama")), *flags)
    reached = [times[0] for times in result["warm_phases"].values()]
    assert len(reached) == len(startup.PHASES)
    assert reached[-3:] == sorted(reached)[-3:]
    assert "WARM STARTUP" in printed


def test_a_start_that_fails_says_why(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.json").write_text(json.dumps({**SHAPE, "model_type": "mamba9"}))
    assert bench(["startup", "--model-config", str(tmp_path / "odd.json"), "--num-iters-cold=1"]) == EXIT_CONFIG
    assert "'mamba9' is not supported" in capfd.readouterr().err.splitlines()[-1]


def test_a_shape_is_served_with_token_ids(shape_file: pathlib.Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = []
    for _ in range(2):
        with LLM(str(shape_file), load_format="dummy", seed=1, threads=1, skip_tokenizer_init=True) as llm:
            assert (llm.card.vocab_size, llm.card.max_model_len) == (400, 512)
            answer = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
            outputs.append(answer.outputs[0].token_ids)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["latency", "--ouput-len=3"], "did you mean --output-len?"),
        (["latency", "--max-modl-len=3"], "did you mean --max-model-len?"),
        (["latency", "--batch-size=0"], "0 is below 1"),
        (["latency", "--model-config=absent.json"], "neither a .json file nor one of llama-3.1-8b, qwen3-0.6b"),
        (["latency", "--model=org/name", "--model-config=qwen3-0.6b"], "not both"),
        (["latency", "demo", "--input-len=9000"], "= 9128 tokens, more than max_model_len 8192"),
        (["throughput", "demo", "--max-model-len=100"], "the longest prompt + output = 1152 tokens"),
        (["throughput", "--model-config=qwen3-0.6b", "--dataset-name=nano", "--num-prompts=257"], "nano has 256"),
        (["prefix", "--num-prompts=2"], "--input-length-range"),
        (["prefix", "--num-prompts=2", "--input-length-range=9:8"], "'9:8' is not MIN:MAX"),
        (["prefix", "demo", "--num-prompts=2", "--input-length-range=8:9", "--prefix-len=9"], "the shortest prompt"),
        (["prefix", "demo", "--num-prompts=2", "--input-length-range=8:9", "--dataset-path=absent"], "absent"),
        (["mixed", "demo"], "--prompt-len + 1 = 8193 tokens, more than max_model_len 8192"),
        (["mixed", "demo", "--interval=-1"], "-1 is not a number of seconds"),
        (["startup", "--model-config=qwen3-0.6b", "--serve"], "give one with --tokenizer"),
        (["latency", "demo", "--output-json=/absent/file.json"], "it cannot be written there"),
        (["sartup"], "did you mean startup?"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_starts(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = bench(flags)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code in (EXIT_USAGE, EXIT_CONFIG)
    assert words in capsys.readouterr().err


def test_prompts_of_a_sharegpt_file(tmp_path: pathlib.Path) -> None:
    turns = [
        [{"value": "word " * words}, {"value": "an answer that is long enough to count"}] for words in (10, 20, 300)
    ]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    options = argparse.Namespace(
        dataset_path=str(file),
        num_prompts=2,
        repeat_count=3,
        input_length_range=(5, 40),
        output_len=4,
        prefix_len=0,
        sort=True,
    )
    requests, shared = prefix.make_requests(options, open_tokenizer("demo"), 0)
    assert len(requests) == 6
    assert shared == []
    assert [request.prompt_len for request in requests] == sorted(request.prompt_len for request in requests)
    assert {request.prompt_len for request in requests} == {len(request.prompt) for request in requests}
    assert len({tuple(request.prompt) for request in requests}) == 2
    options.num_prompts = 3
    with pytest.raises(offline.BenchError, match="has 2 prompts of 5 to 40 tokens, fewer than --num-prompts 3"):
        prefix.make_requests(options, open_tokenizer("demo"), 0)


def test_the_shapes_that_come_with_headrace() -> None:
    numbers = {
        name: load_model_config(resolve_model(offline.with_shape(Settings(), name).model))
        for name in offline.shipped_shapes()
    }
    assert {name: (c.num_layers, c.hidden_size, c.head_dim, c.vocab_size) for name, c in numbers.items()} == {
        "llama-3.1-8b": (32, 4096, 128, 128256),
        "qwen3-0.6b": (28, 1024, 128, 151936),
        "smollm2-135m": (30, 576, 64, 49152),
    }
    assert {name: c.rope_theta for name, c in numbers.items()} == {
        "llama-3.1-8b": 5e5,
        "qwen3-0.6b": 1e6,
        "smollm2-135m": 1e5,
    }
    assert numbers["qwen3-0.6b"].qk_norm
    assert numbers["qwen3-0.6b"].tie_word_embeddings
    assert not numbers["llama-3.1-8b"].tie_word_embeddings
    assert all(config.checkpoint_dtype == "bfloat16" for config in numbers.values())
