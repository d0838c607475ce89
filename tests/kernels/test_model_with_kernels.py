"""Whole models whose layers are made of the kernels, against the same models in torch operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runner_harness import Harness, make_runner
from tiny_models import ARCHITECTURES, TinyModels

from gpu_worker import kernels
from gpu_worker.attention.base import KVScales, Spans
from gpu_worker.attention.registry import BACKENDS
from gpu_worker.attention.torch_paged import Metadata, TorchPagedAttention
from gpu_worker.kernels.rope_kv import rotate_and_write
from gpu_worker.layers.norm import HeadNorm


class WithKernel(TorchPagedAttention):
    """Attends in torch over a cache that the kernel wrote."""

    def prepare(
        self, spans: Spans, block_tables: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Metadata:
        self.slot_mapping = slot_mapping
        return super().prepare(spans, block_tables, positions, slot_mapping)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        head_norm: HeadNorm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        metadata: Metadata,
        scales: KVScales,
    ) -> torch.Tensor:
        weights, eps = (head_norm.weights, head_norm.eps) if head_norm is not None else (None, 0.0)
        return rotate_and_write(qkv, weights, eps, cos, sin, cache, self.slot_mapping, *scales)


PROMPTS = {0: list(range(10, 27)), 1: list(range(40, 53)), 2: [7]}


def logits_of(folder: Any) -> list[torch.Tensor]:
    """Of three prompts in one step, and of two decode steps of all three."""
    harness = Harness(make_runner(folder))
    harness.start(PROMPTS, room=4)
    found = [harness.logits]
    for _ in range(2):
        harness.decode(list(PROMPTS), 0)
        found.append(harness.logits)
    return [logits for logits in found if logits is not None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the harness runs on a CPU, where the interpreter is needed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    folder = tiny_models.folder(architecture)
    expected = logits_of(folder)
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: True)
    monkeypatch.setitem(BACKENDS, "torch_paged", f"{__name__}:WithKernel")
    actual = logits_of(folder)
    assert len(actual) == len(expected) == 3
    for some, others in zip(actual, expected, strict=True):
        assert (some - others).abs().max() < 1e-4
