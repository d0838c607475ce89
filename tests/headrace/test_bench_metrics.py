"""Metrics of hand-made timelines, and the block and the keys in which they are told."""

from __future__ import annotations

import pytest

from headrace.bench.metrics import (
    FORMULAS,
    Distribution,
    RequestRecord,
    compute_metrics,
    errors_by_kind,
    running_requests,
    tokens_by_second,
)
from headrace.bench.report import formulas, serving_block, serving_result


def timeline(sent: float, *outputs: float, tokens: int | None = None, prompt: int = 10) -> RequestRecord:
    """A successful request that got ``outputs`` at these times."""
    count = len(outputs) if tokens is None else tokens
    return RequestRecord(
        sent=sent, output_times=list(outputs), ended=outputs[-1], prompt_tokens=prompt, output_tokens=count
    )


FAILED = RequestRecord(
    sent=0.5, output_times=[0.75], ended=0.75, prompt_tokens=10, output_tokens=1, error="HTTP 503: x"
)
RECORDS = [
    timeline(0.0, 0.25, 0.5, 0.75, 1.25),  # TTFT 250, gaps 250 250 500, E2EL 1250, TPOT 1000/3
    timeline(0.5, 1.5, 2.0, tokens=5, prompt=30),  # TTFT 1000, gap 500, E2EL 1500, TPOT 500/4
    timeline(2.0, 2.125),  # TTFT = E2EL = 125, no TPOT
    FAILED,
]


def test_sums_and_rates_are_those_of_successful_requests() -> None:
    metrics = compute_metrics(RECORDS, 2.5, {})
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input, metrics.total_output) == (50, 10)
    assert metrics.request_throughput == 3 / 2.5
    assert metrics.output_throughput == 10 / 2.5
    assert metrics.total_token_throughput == 60 / 2.5
    assert metrics.request_goodput is None


def test_latencies_follow_their_formulas() -> None:
    found = compute_metrics(RECORDS, 2.5, {}).latencies
    assert found["ttft"].ms.tolist() == [250, 1000, 125]
    assert found["tpot"].ms.tolist() == pytest.approx([1000 / 3, 125])
    assert found["itl"].ms.tolist() == [250, 250, 500, 500]
    assert found["e2el"].ms.tolist() == [1250, 1500, 125]


def test_statistics() -> None:
    found = Distribution([0.001, 0.002, 0.003, 0.006])
    assert (found.mean, found.median) == (3.0, 2.5)
    assert found.std == pytest.approx(3.5**0.5)
    assert [found.percentile(p) for p in (0, 50, 75, 100)] == pytest.approx([1.0, 2.5, 3.75, 6.0])


def test_peak_spreads_tokens_over_the_outputs_that_carried_them() -> None:
    # Seconds 0..1: 3 outputs of the first request; 1..2: its last and 2.5 tokens; 2..3: 2.5 tokens and 1.
    assert tokens_by_second(RECORDS[:3]) == [3.0, 3.5, 3.5]
    assert compute_metrics(RECORDS, 2.5, {}).max_output_tokens_per_s == 3.5


def test_an_end_at_the_time_of_a_send_makes_room_first() -> None:
    # 0.0 one, 0.5 two, 1.25 one, 2.0 an end and a send.
    assert running_requests(RECORDS[:3]) == [(0.0, 1), (0.5, 2), (1.25, 1), (2.0, 0), (2.0, 1), (2.125, 0)]
    assert compute_metrics(RECORDS, 2.5, {}).max_concurrent_requests == 2


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        ({"ttft": 1000}, 3),
        ({"ttft": 999}, 2),
        ({"tpot": 125}, 2),
        ({"e2el": 1250}, 2),
        ({"ttft": 250, "tpot": 200}, 1),
        ({"ttft": 100, "tpot": 500, "e2el": 5000}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(goodput: dict[str, float], good: int) -> None:
    assert compute_metrics(RECORDS, 2.5, goodput).request_goodput == good / 2.5


def test_nothing_but_failures() -> None:
    metrics = compute_metrics([FAILED], 1.0, {"ttft": 100.0})
    assert (metrics.completed, metrics.failed, metrics.request_goodput) == (0, 1, 0)
    assert {found.mean for found in metrics.latencies.values()} == {0.0}
    assert (metrics.max_output_tokens_per_s, metrics.max_concurrent_requests) == (0, 0)


def test_errors_are_counted_by_kind() -> None:
    records = [RequestRecord(error=error) for error in ("a", "b", "", "b")]
    assert errors_by_kind(records) == [("b", 2), ("a", 1)]


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     3         
Failed requests:                         1         
Maximum request concurrency:             8         
Request rate configured (RPS):           4.00      
Benchmark duration (s):                  2.50      
Total input tokens:                      50        
Total generated tokens:                  10        
Request throughput (req/s):              1.20      
Request goodput (req/s):                 0.80      
Output token throughput (tok/s):         4.00      
Peak output token throughput (tok/s):    3.50      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          24.00     
---------------Time to First Token----------------
Mean TTFT (ms):                          458.33    
Median TTFT (ms):                        250.00    
P50 TTFT (ms):                           250.00    
P99.9 TTFT (ms):                         998.50    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          229.17    
Median TPOT (ms):                        229.17    
P50 TPOT (ms):                           229.17    
P99.9 TPOT (ms):                         333.12    
---------------Inter-token Latency----------------
Mean ITL (ms):                           375.00    
Median ITL (ms):                         375.00    
P50 ITL (ms):                            375.00    
P99.9 ITL (ms):                          500.00    
----------------End-to-end Latency----------------
Mean E2EL (ms):                          958.33    
Median E2EL (ms):                        1250.00   
P50 E2EL (ms):                           1250.00   
P99.9 E2EL (ms):                         1499.50   
=================================================="""  # noqa: W291


def test_the_block_has_the_shape_that_scripts_know() -> None:
    metrics = compute_metrics(RECORDS, 2.5, {"ttft": 999})
    names = ["ttft", "tpot", "itl", "e2el"]
    block = serving_block(
        metrics, percentile_metrics=names, percentiles=[50.0, 99.9], request_rate=4.0, max_concurrency=8
    )
    assert block == BLOCK


def test_what_was_not_asked_for_is_not_in_the_block() -> None:
    metrics = compute_metrics(RECORDS, 2.5, {})
    block = serving_block(
        metrics, percentile_metrics=["itl"], percentiles=[99.0], request_rate=float("inf"), max_concurrency=None
    )
    missing = ("Maximum request concurrency", "Request rate", "goodput", "TTFT", "TPOT", "E2EL")
    assert not [words for words in missing if words in block]
    assert "P99 ITL (ms):" in block


def test_each_metric_has_its_formula_on_a_line() -> None:
    assert formulas(FORMULAS).splitlines() == list(FORMULAS.values())


def test_the_keys_are_those_of_a_saved_result() -> None:
    result = serving_result(compute_metrics(RECORDS, 2.5, {"e2el": 1250}), [99.0])
    latencies = {
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert set(result) - latencies == {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests",
    }  # fmt: skip
    assert latencies < set(result)
    assert (result["median_ttft_ms"], result["request_goodput"]) == (250, 0.8)
