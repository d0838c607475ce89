"""Which products ``headrace tune`` measures."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCABULARY, TinyModels

from gpu_worker import tuning
from gpu_worker.attention.registry import BACKENDS, DEFAULT_OF_DEVICE
from gpu_worker.layers.cuda_linear import CudaGatedLinear, CudaHead, CudaLinear
from gpu_worker.layers.gemm_choice import GemmShape
from headrace.tune import main as tune
from shared.lifecycle import EXIT_CONFIG, EXIT_OK
from shared.model_config import load_model_config
from shared.model_source import local_source


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_products_of_a_model(
    tiny_models: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setitem(DEFAULT_OF_DEVICE, device.type, backend)
    for name, layer in (("make_linear", CudaLinear), ("make_gated_linear", CudaGatedLinear)):
        monkeypatch.setattr(f"gpu_worker.models.base.{name}", layer)
    monkeypatch.setattr("gpu_worker.models.llama.make_head", CudaHead)
    folder = tiny_models.folder("qwen3")
    config = load_model_config(local_source(folder, "m"))
    assert config.num_layers == 3
    half, full = torch.float16, torch.float32
    assert tuning.product_shapes(config, half, device) == [
        GemmShape((4 + 2 * 2) * 32, 64, half, half),
        GemmShape(64, 4 * 32, half, half),
        GemmShape(2 * 96, 64, half, half, gated=True),
        GemmShape(64, 96, half, half),
        GemmShape(VOCABULARY, 64, half, full),
    ]


def test_tuning_goes_on_until_nothing_is_left_or_the_time_is_up(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [3, 2, 0]
    monkeypatch.setattr(tuning, "select_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(tuning, "product_shapes", lambda *_: [])
    monkeypatch.setattr(tuning, "tune", lambda shapes, device, seconds: left.pop(0))
    folder = str(tiny_models.folder("qwen3"))
    assert tune([folder, "--seconds=0"]) == EXIT_OK
    assert len(left) == 3
    assert tune([folder]) == EXIT_OK
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["3 products measured", "5 products measured"]
    assert printed.out.splitlines()[-1].startswith("5 products were measured")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_needs_a_gpu(tiny_models: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune([str(tiny_models.folder("qwen3"))]) == EXIT_CONFIG
    assert "headrace tune: --device cuda: torch finds no usable GPU" in capsys.readouterr().err
