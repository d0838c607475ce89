"""What ``benchmarks/gpu_gemm.py`` measures, in which order, and what it makes of that."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator

import pytest
import torch

from benchmarks import gpu_gemm
from gpu_worker.kernels.gemm import KernelError
from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig, SplitKConfig, encode_choice
from gpu_worker.layers.gemm_choice import BUCKETS, SHIPPED, GemmShape, read_choices

GATED = "bfloat16 6144x1024 gated"


class Timer:
    """Products that take as long as their kind says."""

    def __init__(self, device: torch.device) -> None:
        self.compiled: set[tuple[GemmShape, int, GemmChoice]] = set()
        self.measured: list[tuple[GemmShape, int]] = []
        timers.append(self)

    def compile(self, shape: GemmShape, tokens: int, choice: GemmChoice) -> None:
        self.compiled.add((shape, tokens, choice))

    def error(self, shape: GemmShape, tokens: int, choice: GemmChoice) -> float:
        assert (shape, tokens, choice) in self.compiled
        if isinstance(choice, SplitKConfig) and choice.block_k == 256:
            raise KernelError("too large")
        return 1.0 if isinstance(choice, GemvConfig) and choice.rows == 8 else 0.0

    def microseconds(self, shape: GemmShape, tokens: int, choice: GemmChoice) -> float:
        self.measured.append((shape, tokens))
        if isinstance(choice, GemvConfig):
            return 1.0 if choice.rows == 8 else 3.0
        return 4.0 if choice is None else 5.0 - shape.gated * 4.5


timers: list[Timer] = []


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_gemm, "GemmTimer", Timer)
    monkeypatch.setattr(gpu_gemm, "compiled_together", lambda threads: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    yield
    timers.clear()


def test_every_bucket_is_in_a_round() -> None:
    assert sorted(tokens for numbers in gpu_gemm.ROUNDS for tokens in numbers) == list(BUCKETS)


def test_gated_products_are_measured_as_such(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_gemm.main(["--out", str(tmp_path)]) == 1, "kernels that compute something else"
    table = json.loads((tmp_path / "gemm_choices.json").read_text())
    choices = read_choices(table["NVIDIA H200"])
    assert set(choices) == set(json.loads(SHIPPED.read_text())["NVIDIA H200"])
    assert all(list(by_tokens) == list(BUCKETS) for by_tokens in choices.values())
    assert {key for key in choices if " gated" in key} == {GATED, "bfloat16 28672x4096 gated"}
    for key, by_tokens in choices.items():
        for tokens, choice in by_tokens.items():
            if " gated" in key and 1 < tokens <= 128:
                assert isinstance(choice, SplitKConfig)
                assert choice.block_k < 256, "one that cannot be compiled"
            elif tokens <= 4:
                assert isinstance(choice, GemvConfig)
                assert choice.rows < 8, "a wrong one"
            else:
                assert choice is None
    order = list(dict.fromkeys(tokens for _, tokens in timers[0].measured))
    assert order == [tokens for numbers in gpu_gemm.ROUNDS for tokens in numbers]
    output = capsys.readouterr().out
    assert "WRONG: bfloat16 4096x1024, 1 tokens, GemvConfig(rows=8" in output
    assert "90 of 90 measured" in output
    assert len(json.loads((tmp_path / "gemm.json").read_text())["steps"]) == 2 * len(BUCKETS)


def test_what_is_not_measured_is_kept(tmp_path: pathlib.Path) -> None:
    shipped = json.loads(SHIPPED.read_text())
    assert gpu_gemm.main(["--out", str(tmp_path), "--tokens", "16", "--models", "qwen3-0.6b"]) == 0
    table = json.loads((tmp_path / "gemm_choices.json").read_text())
    new, old = table["NVIDIA H200"][GATED], shipped["NVIDIA H200"][GATED]
    assert new == {**old, "16": encode_choice(SplitKConfig(128, 16, 128, 1, 4, 4))}
    assert list(new) == list(old)
    untouched = "bfloat16 28672x4096 gated"
    assert table["NVIDIA H200"][untouched] == shipped["NVIDIA H200"][untouched]
    assert gpu_gemm.main(["--out", str(tmp_path), "--seconds", "0"]) == 0
    assert (tmp_path / "gemm_choices.json").read_text() == SHIPPED.read_text()
