"""The rules that make programmatic dependent launch right, checked in the source of all kernels that use it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from gpu_worker import kernels
from gpu_worker.kernels import programmatic_launch
from gpu_worker.kernels.gemm import gemm
from gpu_worker.kernels.gemm_config import GemvConfig, SplitKConfig
from gpu_worker.kernels.norm import add_rms_norm
from gpu_worker.kernels.programmatic_launch import pdl_options
from gpu_worker.kernels.split_k import make_arrivals

CONSTANTS = {"weight", "weight_ptr", "norm_weight_ptr", "weight_ptrs", "bias", "pointers"}
"""Pointers that a kernel may read through before its wait: to weights."""
WAITS = {"wait_for_previous", "start_after_previous"}
WRITES = {"store", "_store", "atomic_add", "atomic_max", "atomic_xchg", "atomic_cas"}


def kernels_with_a_wait() -> list[ast.FunctionDef]:
    folder = Path(str(kernels.__file__)).parent
    functions = [
        node
        for path in sorted(folder.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    return [node for node in functions if node.name.endswith("_kernel") and "PDL" in {a.arg for a in node.args.args}]


def called(node: ast.AST) -> list[tuple[str, ast.Call]]:
    calls = [some for some in ast.walk(node) if isinstance(some, ast.Call)]
    names = [(call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)) for call in calls]
    return list(zip(names, calls, strict=True))


def test_all_kernels_of_a_decode_step_are_found() -> None:
    names = {kernel.name for kernel in kernels_with_a_wait()}
    assert names >= {
        "_add_rms_norm_kernel",
        "_argmax_kernel",
        "_decode_kernel",
        "_gather_decode_kernel",
        "_gemv_kernel",
        "_plan_kernel",
        "_rotate_and_write_kernel",
        "_silu_mul_kernel",
        "_split_k_kernel",
        "_write_back_kernel",
    }


@pytest.mark.parametrize("kernel", kernels_with_a_wait(), ids=lambda kernel: kernel.name)
def test_a_kernel_waits_before_it_touches_what_others_write(kernel: ast.FunctionDef) -> None:
    """The wait is a statement of its own that every program reaches; before it there are only loads of constants."""
    waits = [
        index
        for index, statement in enumerate(kernel.body)
        if isinstance(statement, ast.Expr) and called(statement)[0][0] in WAITS
    ]
    assert len(waits) == 1
    before = ast.Module(kernel.body[: waits[0]], [])
    assert not [node for node in ast.walk(before) if isinstance(node, ast.Return)]
    calls = called(before)
    assert called(kernel.body[0])[0][0] in {"let_next_start", "start_after_previous"}
    for name, call in calls:
        assert name not in WRITES
        if "load" in name or name == "prefetch_rows":
            read = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
            assert read & CONSTANTS, ast.unparse(call)


def test_other_devices_launch_as_ever() -> None:
    assert pdl_options(torch.device("cpu")) == {"PDL": False}


class FeedForward:
    """Norms and gated products, one behind the other: each kernel reads what the one before it has just written, in
    memory that an allocator gives to others again and again."""

    def __init__(self, device: torch.device, tokens: int, hidden: int = 256, size: int = 384, layers: int = 4) -> None:
        torch.manual_seed(tokens)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self.start = torch.randn(tokens, hidden, device=device)
        self.gates = [(torch.randn(2 * size, hidden, device=device) / 16).to(dtype) for _ in range(layers)]
        self.downs = [(torch.randn(hidden, size, device=device) / 16).to(dtype) for _ in range(layers)]
        self.weight, self.arrivals = torch.ones(hidden, device=device), make_arrivals(device)
        self.choice = GemvConfig(2, 128, 2) if tokens == 1 else SplitKConfig(64, 16, 64, 2, 4, 3)

    def __call__(self) -> torch.Tensor:
        hidden = self.start.clone()
        delta = torch.zeros_like(hidden)
        for gate_up, down in zip(self.gates, self.downs, strict=True):
            normed = add_rms_norm(hidden, delta, self.weight, 1e-6, gate_up.dtype)
            inner = gemm(normed, gate_up, None, self.choice, self.arrivals, gated=True)
            delta = gemm(inner, down, None, self.choice, self.arrivals, out_dtype=torch.float32)
        return hidden + delta


@pytest.mark.parametrize("tokens", [1, 5])
def test_replays_give_the_bits_of_kernels_that_start_one_after_another(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pdl_options(device)["PDL"]:
        pytest.skip("needs a GPU of compute capability 9.0")
    chain = FeedForward(device, tokens)
    with monkeypatch.context() as patch:
        patch.setattr(programmatic_launch, "_is_supported", lambda device: False)
        expected = chain()
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    differs = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        graph.replay()
        differs += (result != expected).any()
    assert not differs.item()
