"""The backend: decode-only steps, mixed steps, and the same bits in any batch when that is asked for."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.attention import triton_paged
from gpu_worker.attention.base import AttentionShape, KVScales
from gpu_worker.attention.triton_paged import Metadata, TritonPagedAttention
from tests.kernels.attention_reference import HALF, Paged, attend, make_paged, tolerance

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
SCALE = HEAD_DIM**-0.5


def make_backend(device: torch.device, *, batch_invariant: bool = False, max_rows: int = 16) -> TritonPagedAttention:
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, batch_invariant)
    return TritonPagedAttention(shape, device, dtype=HALF, cache_dtype=HALF, max_rows=max_rows, max_context=2048)


def make_query(tokens: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(HALF).to(device)


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def mixed(
    backend: TritonPagedAttention, paged: Paged, spans: list[tuple[int, int, int]], decodes: list[tuple[int, int]]
) -> tuple[Metadata, int]:
    """Spans (slot, tokens, context), then decode rows (slot, context); and the number of query tokens."""
    device = paged.cache.device
    starts = np.cumsum([0, *(count for _, count, _ in spans)])
    table = np.array([(s, starts[i], n, c) for i, (s, n, c) in enumerate(spans)], np.int32).reshape(-1, 4)
    cut = backend.cut_prefill(table)
    slots, contexts = (int32([row[column] for row in decodes], device) for column in (0, 1))
    items = torch.from_numpy(cut.table).to(device)
    metadata = backend.prepare_mixed(cut, items, int(starts[-1]), slots, contexts, paged.block_tables)
    return metadata, int(starts[-1]) + len(decodes)


def expected(
    query: torch.Tensor,
    paged: Paged,
    spans: list[tuple[int, int, int]],
    window: int | None = None,
) -> torch.Tensor:
    results, start = [], 0
    for slot, count, context in spans:
        results.append(attend(query[start : start + count], *paged.context(slot, context), SCALE, window))
        start += count
    return torch.cat(results).flatten(1)


@pytest.mark.parametrize("window", [None, 24])
def test_a_decode_step(window: int | None, device: torch.device) -> None:
    paged = make_paged([70, 5, 33, 0], KV_HEADS, HEAD_DIM, BLOCK_SIZE, HALF, device)
    backend, query = make_backend(device), make_query(4, device)
    metadata = backend.prepare_decode(int32([2, 0, 3, 1], device), int32([33, 70, 0, 5], device), paged.block_tables)
    for _ in range(2):
        result = backend.attend(query, paged.cache, metadata, SCALE, window, KVScales()).float()
        rows = expected(query[:2], paged, [(2, 1, 33), (0, 1, 70)], window)
        torch.testing.assert_close(result[:2], rows, **tolerance(HALF))
        assert not result[2].any()
        torch.testing.assert_close(result[3:], expected(query[3:], paged, [(1, 1, 5)], window), **tolerance(HALF))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("decodes", [[], [(3, 40), (2, 9)]], ids=len)
@pytest.mark.parametrize("spans", [[], [(0, 20, 50), (1, 7, 7)]], ids=len)
def test_a_mixed_step(
    spans: list[tuple[int, int, int]], decodes: list[tuple[int, int]], batch_invariant: bool, device: torch.device
) -> None:
    if not spans and not decodes:
        return
    paged = make_paged([50, 7, 9, 40], KV_HEADS, HEAD_DIM, BLOCK_SIZE, HALF, device)
    backend = make_backend(device, batch_invariant=batch_invariant)
    metadata, tokens = mixed(backend, paged, spans, decodes)
    query = make_query(tokens + 2, device)
    result = backend.attend(query, paged.cache, metadata, SCALE, None, KVScales())
    rows = expected(query, paged, spans + [(slot, 1, context) for slot, context in decodes])
    torch.testing.assert_close(result[:tokens].float(), rows, **tolerance(HALF))
    assert not result[tokens:].any()


@pytest.mark.parametrize("window", [None, 24, 200])
def test_spans_of_whole_tiles(window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU of Hopper has a kernel for, but for windows: those take the other one, with the same items."""

    def never(*_: object) -> None:
        raise AssertionError("this kernel knows no windows")

    paged = make_paged([1300, 40, 9], KV_HEADS, HEAD_DIM, BLOCK_SIZE, HALF, device)
    backend = make_backend(device)
    if window is not None:
        monkeypatch.setattr(backend, "_hopper_prefill", never)
    spans, decodes = [(0, 60, 1300), (1, 40, 40)], [(2, 9)]
    metadata, tokens = mixed(backend, paged, spans, decodes)
    assert metadata.prefill_config is not None
    assert metadata.prefill_config.is_hopper or window is None
    assert metadata.prefill_programs is not None
    query = make_query(tokens, device)
    result = backend.attend(query, paged.cache, metadata, SCALE, window, KVScales())
    rows = expected(query, paged, spans + [(slot, 1, context) for slot, context in decodes], window)
    torch.testing.assert_close(result.float(), rows, **tolerance(HALF))


@pytest.mark.parametrize("problem", [ImportError("no gluon"), AttributeError("no warpgroup_mma")], ids=repr)
def test_a_triton_with_another_gluon(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs speed and no more."""
    load = builtins.__import__

    def failing(name: str, *rest: Any) -> Any:
        if name.endswith("hopper_prefill"):
            raise problem
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", failing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    with capture_logs() as logs:
        assert triton_paged._hopper_prefill(shape, HALF, HALF, torch.device("cuda")) is None
    assert [entry["error"] for entry in logs] == [str(problem)]


def test_batch_invariant_prefill_gives_the_bits_of_decode(device: torch.device) -> None:
    paged = make_paged([40, 20], KV_HEADS, HEAD_DIM, BLOCK_SIZE, HALF, device)
    backend, query = make_backend(device, batch_invariant=True, max_rows=8), make_query(30, device)
    metadata, _ = mixed(backend, paged, [(0, 25, 40)], [(1, 20)])
    together = backend.attend(query[:26], paged.cache, metadata, SCALE, None, KVScales())
    for token in (0, 7, 8, 24):
        slots, contexts = int32([0], device), int32([16 + token], device)
        alone = backend.prepare_decode(slots, contexts, paged.block_tables)
        result = backend.attend(query[token : token + 1], paged.cache, alone, SCALE, None, KVScales())
        assert torch.equal(result[0], together[token])
