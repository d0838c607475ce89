"""The load of the two benchmark clients, and the verdict on their results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client_bench import CLOSE, EQUAL, SHOWN, Result, report, write_prompts


def result(**changes: float) -> Result:
    return {**dict.fromkeys((*CLOSE, *SHOWN), 100.0), **dict.fromkeys(EQUAL, 8), "failed": 0, **changes}


def test_prompts_are_the_same_for_a_seed_and_of_many_lengths(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_prompts(tmp_path / name, 32, 20, 10, seed)
    one, again, other = ((tmp_path / name).read_text() for name in ("one", "again", "other"))
    assert one == again != other
    items = [json.loads(line) for line in one.splitlines()]
    assert len(items) == 32
    assert {len(item["prompt"].split()) for item in items} <= set(range(10, 31))
    assert {item["output_tokens"] for item in items} <= set(range(5, 16))


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"mean_ttft_ms": 104.0}, True),
        ({"mean_ttft_ms": 106.0}, False),
        ({"median_itl_ms": 90.0}, False),
        ({"p99_ttft_ms": 200.0}, True),
        ({"total_output_tokens": 9}, False),
        ({"failed": 1}, False),
    ],
)
def test_verdict(changes: dict[str, float], good: bool, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{"vllm": result(), "headrace": result(**changes)}]
    assert report(rounds, 0.05) == good
    assert ("They agree" if good else "They do NOT agree") in capsys.readouterr().out


def test_one_odd_round_of_three_does_not_count() -> None:
    good, odd = {"vllm": result(), "headrace": result()}, {"vllm": result(), "headrace": result(mean_ttft_ms=150.0)}
    assert report([good, odd, good], 0.05)
