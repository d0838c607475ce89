"""``headrace simulate``: its flags, its report, its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main as headrace
from headrace.simulate.main import main, prepare

QUICK = ["--dataset-name", "sharegpt-like", "--num-prompts", "60", "--request-rate", "50", "--disable-tqdm"]


def result_of(tmp_path: Path, *flags: str) -> dict[str, object]:
    path = tmp_path / "result.json"
    assert main([*QUICK, "--output", str(path), *flags]) == 0
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    result = result_of(tmp_path, "--plot", str(picture))
    printed = capsys.readouterr()
    for words in ("Simulated Serving Result", "Successful requests:                     60", "TTFT", "in the queue"):
        assert words in printed.out
    assert "Nothing limits" in printed.out
    assert "h200-llama-8b" in printed.err
    assert "KV cache: 0.9 x 140 GiB" in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result["completed"] == 60
    assert result["failed"] == 0
    for name in (
        "request_throughput",
        "output_throughput",
        "mean_ttft_ms",
        "p99_tpot_ms",
        "median_itl_ms",
        "p90_e2el_ms",
    ):
        assert isinstance(result[name], float)
        assert result[name] > 0.0
    assert isinstance(result["series"], dict)
    assert len(result["series"]["running"]) == 120


@pytest.mark.parametrize(
    ("flags", "limit", "words"),
    [
        (["--max-num-seqs", "2"], "seats", "Seats limit"),
        (["--num-gpu-blocks", "200"], "blocks", "KV blocks limit"),
    ],
)
def test_what_limits_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], limit: str, words: str
) -> None:
    shares = result_of(tmp_path, *flags)["waiting_for"]
    assert isinstance(shares, dict)
    assert shares[limit] > 0.5
    assert words in capsys.readouterr().out


def test_a_trace_that_is_written_gives_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    drawn = result_of(tmp_path, "--write-trace", path)
    assert main([path, "--output", str(tmp_path / "again.json"), "--disable-tqdm"]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["mean_ttft_ms"] == pytest.approx(drawn["mean_ttft_ms"], rel=0.02)
    assert again["total_output_tokens"] == drawn["total_output_tokens"]


def test_the_flags_of_the_engine_apply(tmp_path: Path) -> None:
    plan = prepare(
        [
            *QUICK, "--max-num-seqs", "7", "--max-num-batched-tokens", "512", "--target-itl-ms", "25", "--block-size",
            "32", "--watermark", "0.05", "--no-enable-prefix-caching", "--max-num-queued-reqs", "9",
            "--steps-in-flight", "3", "--max-model-len", "2048", "--num-gpu-blocks", "99", "--max-tokens", "300",
        ]
    )  # fmt: skip
    core, scheduler = plan.core, plan.core.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len) == (7, 512, 2048)
    assert scheduler.chunk_target is not None
    assert scheduler.chunk_target.seconds == 0.025
    assert (core.block_size, core.watermark, core.enable_prefix_caching) == (32, 0.05, False)
    assert (core.max_num_queued_reqs, core.steps_in_flight) == (9, 3)
    assert plan.memory.num_blocks == 99
    assert all(request.max_tokens == max(300, request.output) for request in plan.trace)


def test_speed(tmp_path: Path) -> None:
    slow, fast = prepare(QUICK), prepare([*QUICK, "--speedup", "2"])
    assert fast.trace[-1].arrival_s == slow.trace[-1].arrival_s / 2


def test_defaults_are_those_of_the_kind_of_device() -> None:
    assert prepare([*QUICK, "--device", "cpu-demo"]).core.scheduler.max_num_seqs == 256
    assert prepare(QUICK).core.scheduler.max_num_seqs == 1024
    assert prepare([*QUICK, "--device", "cpu-demo"]).core.scheduler.chunk_target is None


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "sweep.png"
    result = result_of(tmp_path, "--sweep", "max-num-seqs=1,2,64", "--plot", str(picture))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["max-num-seqs", "1", "2", "64"]
    assert "seats" in lines[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert isinstance(result["values"], dict)
    assert list(result["values"]) == ["1", "2", "64"]
    assert result["values"]["1"]["mean_ttft_ms"] > result["values"]["64"]["mean_ttft_ms"]
    assert main([*QUICK, "--sweep", "enable-prefix-caching=true,false"]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "h100"], "--device h100 is neither"),
        (["--device", "cpu"], "has to come from --fit"),
        (["--fit", "/nowhere.jsonl"], "cannot be read"),
        (["--gpu-memory", "8"], "no KV cache fits"),
        (["--num-gpu-blocks", "1"], "at least 2 blocks"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_simulated_is_said(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *flags]) == 78
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [[], ["t.jsonl", "--dataset-name", "random"], [*QUICK, "--plot", "x.txt"], [*QUICK, "--sweep", "seats"]]
)
def test_flags_that_contradict_each_other(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(flags)
    assert exit.value.code == 2
    assert "headrace simulate: error: " in capsys.readouterr().err


def test_a_value_of_a_sweep_that_cannot_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--sweep", "gpu-memory=8,80"]) == 0
    _, small, large = capsys.readouterr().out.splitlines()
    assert small.split()[:5] == ["8", "no", "KV", "cache", "fits:"]
    assert large.split()[0] == "80"
    assert main([*QUICK, "--sweep", "gpu-memory=7,8"]) == 78


def test_a_value_of_a_sweep_that_is_none_is_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*QUICK, "--sweep", "watermark=0.1,2"])
    out, err = capsys.readouterr()
    assert out == ""
    assert "--watermark must be in [0, 1), got 2.0" in err


def test_nothing_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--max-model-len", "3"]) == 1
    assert "No request could run." in capsys.readouterr().out
    trace = tmp_path / "long.jsonl"
    trace.write_text('{"arrival": 0, "prompt": 9000000, "output": 3}\n')
    assert main([str(trace), "--num-gpu-blocks", "100", "--disable-tqdm"]) == 1
    assert "longer than --max-model-len 1,584 or the whole KV cache" in capsys.readouterr().out.replace("\n", " ")


def test_it_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(["simulate", "--dataset-name", "random", "--num-prompts", "3", "--disable-tqdm"]) == 0
    assert "Simulated" in capsys.readouterr().out
