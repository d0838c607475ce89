"""Traces of requests: the formats, what is wrong with a line, and the ids that prompts consist of."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import pytest

from headrace.simulate.generate import generate
from headrace.simulate.trace import STOP_ID, VOCAB_SIZE, TraceRequest, group_ids, prompt_ids, read_trace, write_trace
from shared.errors import StartupError


def entry(prompt: int = 8, output: int = 4, **fields: object) -> TraceRequest:
    return TraceRequest(**{"arrival_s": 0.0, "prompt": prompt, "output": output} | fields)  # type: ignore[arg-type]


def test_own_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 7.5, "prompt": 1500, "output": 80, "max_tokens": 512, "prefix": [["system-3", 512], ["chat", 900]]'
        ', "priority": 2, "user": "ann", "n": 2}\n\n'
        '{"arrival": 5, "prompt": 10, "output": 1}\n'
    )
    assert read_trace(str(path)) == [
        entry(10, 1),
        TraceRequest(
            arrival_s=2.5, prompt=1500, output=80, max_tokens=512, prefix=(("system-3", 512), ("chat", 900)),
            priority=2, user="ann", n=2,
        ),
    ]  # fmt: skip
    assert [request.prompt for request in read_trace(str(path), limit=1)] == [1500]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    requests = [entry(), entry(20, 2, arrival_s=1.25, max_tokens=9, prefix=(("a", 16),), priority=-1, user="u", n=3)]
    write_trace(str(tmp_path / "t.jsonl"), requests)
    assert read_trace(str(tmp_path / "t.jsonl")) == requests


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [46, 47]}\n')
        file.write('{"timestamp": 3500, "input_length": 1030, "output_length": 0, "hash_ids": [46, 48, 49]}\n')
    first, second = read_trace(str(path))
    assert (first.prefix, second.prefix) == ((("46", 512), ("47", 188)), (("46", 512), ("48", 512), ("49", 6)))
    assert (first.arrival_s, second.arrival_s, second.output) == (0.0, 2.5, 1)
    one, two = prompt_ids(first, 0), prompt_ids(second, 1)
    assert (one[:512] == two[:512]).all()
    assert (one[512:] != two[512:700]).any()


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "AzureLLMInferenceTrace_code.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    first, second = read_trace(str(path))
    assert (first.prompt, first.output, second.prompt, second.output) == (4808, 10, 3180, 8)
    assert second.arrival_s == pytest.approx(0.052, abs=1e-5)


def test_fields_that_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('\n\n{"arrival": -3, "prompt": 10.0, "output": 1, "prefix": null, "user": null, "n": null}\n')
    assert read_trace(str(path)) == [entry(10, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"arrival": 0, "prompt": 4, "output": 1}\n{"arrival": 0, "prompt": 4}\n', "line 2: 'output' is missing"),
        ('{"arrival": 0, "prompt": 0, "output": 1}\n', "line 1: prompt, output and n must be at least 1"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "max_tokens": 0}\n', "line 1: max_tokens must be at least 1"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "n": 129}\n', "line 1: n must be at most 128, got 129"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "prefix": [["a", 5]]}\n', "more tokens than the prompt, 4"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "promt": 3}\n', "line 1: unknown field 'promt'"),
        ('{"arrival": 0, "prompt": 4 "output": 1}\n', "line 1: no JSON: .* at column 28"),
        ('{"arrival": 0, "prompt": "many", "output": 1}\n', "line 1: prompt must be a whole number, got 'many'"),
        ('{"arrival": 0, "prompt": 4.5, "output": 1}\n', "line 1: prompt must be a whole number, got 4.5"),
        ('{"arrival": 0, "prompt": 99999999999, "output": 1}\n', "line 1: prompt and output must be at most"),
        ('{"arrival": NaN, "prompt": 4, "output": 1}\n', "line 1: the time of arrival must be a finite number"),
        ('{"arrival": "now", "prompt": 4, "output": 1}\n', "line 1: arrival must be a number, got 'now'"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "prefix": "a"}\n', "line 1: prefix must be groups"),
        ('{"arrival": 0, "prompt": 4, "output": 1, "prefix": [["a", 0]]}\n', "line 1: a prefix group must have"),
        ('{"arrival": 0, "prompt": 4, "output": 1}\n[4]\n', "line 2: not a JSON object"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": 5}\n', "line 1: hash_ids must be a list"),
        ("Some text\nof a letter\n", "line 1: this is no trace: 'Some text' is neither"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,x\n", "line 2: GeneratedTokens must be"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n", "line 2: 'GeneratedTokens' is missing"),
        ("", "holds no request"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(StartupError, match=words):
        read_trace(str(path))


def test_no_file() -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        read_trace("/nowhere/trace.jsonl")


def test_ids_are_shared_within_groups_only() -> None:
    request = entry(100, prefix=(("system", 30), ("chat", 20)))
    one, two = prompt_ids(request, 1), prompt_ids(request, 2)
    assert len(one) == 100
    assert (one[:50] == two[:50]).all()
    assert (one[50:] != two[50:]).sum() > 45
    assert (prompt_ids(request, 1) == one).all()
    assert (one[:30] == group_ids("system", 0, 30)).all()
    assert (group_ids("system", 10, 5) == group_ids("system", 0, 30)[10:15]).all()
    many = group_ids("many", 0, 100_000)
    assert many.dtype == np.int32
    assert STOP_ID < many.min() < many.max() < VOCAB_SIZE
    assert len(np.unique(many)) > 50_000


def test_a_group_that_reaches_the_end_goes_on() -> None:
    assert entry(50, prefix=(("system", 20), ("chat", 30))).tail == ("chat", 30)
    assert entry(51, prefix=(("system", 20), ("chat", 30))).tail is None
    assert entry(51).tail is None


FLAGS = {
    "num_prompts": 2000,
    "request_rate": 100.0,
    "burstiness": 1.0,
    "seed": 1,
    "random_input_len": 200,
    "random_output_len": 50,
    "random_prefix_len": 32,
    "random_range_ratio": 0.5,
    "input_len": None,
    "output_len": 400,
    "prefix_repetition_prefix_len": 64,
    "prefix_repetition_suffix_len": 16,
    "prefix_repetition_num_prefixes": 4,
    "prefix_repetition_output_len": 8,
}


def drawn(name: str, **flags: object) -> list[TraceRequest]:
    return generate(argparse.Namespace(**FLAGS | {"dataset_name": name} | flags))


def test_random() -> None:
    requests = drawn("random")
    assert len(requests) == 2000
    prompts = np.array([request.prompt for request in requests]) - 32
    assert (prompts.min(), prompts.max()) == (100, 300)
    assert np.mean([request.output for request in requests]) == pytest.approx(50, rel=0.03)
    assert all(request.prefix == (("shared", 32),) for request in requests)
    assert requests[-1].arrival_s == pytest.approx(20.0)
    assert requests == drawn("random")
    with pytest.raises(StartupError, match="range-ratio"):
        drawn("random", random_range_ratio=1.0)


def test_sharegpt_like() -> None:
    requests = drawn("sharegpt-like", request_rate=float("inf"))
    assert np.mean([request.output for request in requests]) == pytest.approx(380, rel=0.1)
    assert np.mean([request.prompt for request in requests]) == pytest.approx(215, rel=0.1)
    assert {request.arrival_s for request in requests} == {0.0}


def test_prefix_repetition() -> None:
    names = [request.prefix[0][0] for request in drawn("prefix_repetition")]
    assert set(names) == {f"prefix-{number}" for number in range(4)}
    assert names.count("prefix-0") > 1.5 * names.count("prefix-1")
