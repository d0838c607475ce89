"""The named workloads: the same lengths for every engine, the same ids for a seed."""

from __future__ import annotations

import hashlib
import json

import pytest

from headrace.bench.workloads import WORKLOADS, Request

QWEN3_VOCABULARY = 151_936


def made(name: str, count: int | None = None, vocab_size: int = QWEN3_VOCABULARY, seed: int = 0) -> list[Request]:
    return WORKLOADS[name].make(count, vocab_size, seed)


def lengths(requests: list[Request]) -> list[tuple[int, int]]:
    return [(len(request.prompt_token_ids), request.output_len) for request in requests]


@pytest.mark.parametrize(
    ("name", "count", "tokens_in", "tokens_out", "digest"),
    [
        ("nano", 256, 142_827, 133_966, "d72f19b572464c05"),
        ("uniform", 256, 262_144, 32_768, "728901de7b826990"),
        ("mix", 1000, 196_305, 184_096, "0bb9dcfb71579b93"),
        ("decode", 1, 128, 256, "dfa0a1db31c9642c"),
    ],
)
def test_every_id_and_length_is_pinned(name: str, count: int, tokens_in: int, tokens_out: int, digest: str) -> None:
    requests = made(name)
    assert len(requests) == count
    assert sum(len(request.prompt_token_ids) for request in requests) == tokens_in
    assert sum(request.output_len for request in requests) == tokens_out
    assert hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", WORKLOADS)
def test_another_seed_gives_other_ids_and_the_same_lengths(name: str) -> None:
    first, other = made(name, 8), made(name, 8, seed=1)
    assert lengths(first) == lengths(other)
    starts = {tuple(request.prompt_token_ids[:16]) for request in [*first, *other]}
    assert len(starts) == 16 or name == "mix"
    assert first != other == made(name, 8, seed=1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_ids_fit_a_small_vocabulary(name: str) -> None:
    requests = made(name, 4, vocab_size=300)
    assert lengths(requests) == lengths(made(name, 4))
    assert {token for request in requests for token in request.prompt_token_ids} <= set(range(300))


def test_a_count_takes_the_first_requests() -> None:
    assert made("nano", 5) == made("nano")[:5]
    assert lengths(made("mix", 5)) == lengths(made("mix"))[:5]
    assert lengths(made("decode", 32)) == [(128, 256)] * 32
