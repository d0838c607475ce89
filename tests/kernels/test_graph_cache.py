"""Which steps get a graph, and that a capture is in nobody's way."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.cuda_graphs import LAUNCH_BOUND, WAITS_FOR_HOST, GraphCache

ON_GPU = torch.cuda.is_available()
on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="nothing is captured elsewhere")
BUSY_CYCLES = 2_000_000_000
"""Of the device: about a second."""


def test_a_step_that_the_device_is_quick_with_gains(device: torch.device) -> None:
    graphs = GraphCache(device, enabled=True)
    graphs.note("small", launch_s=0.010, compute_s=0.010 * LAUNCH_BOUND - 1e-6)
    graphs.note("large", launch_s=0.012, compute_s=0.010 * LAUNCH_BOUND)
    assert graphs.is_worth("small")
    assert not graphs.is_worth("large")
    assert not graphs.is_worth("unknown")


def test_loading_kernels_makes_no_step_look_quick(device: torch.device) -> None:
    """The first launch of a shape takes long, and the device waits for it."""
    graphs = GraphCache(device, enabled=True)
    graphs.note("known", launch_s=0.010, compute_s=0.010)
    graphs.note("large", launch_s=0.200, compute_s=0.201)
    assert not graphs.is_worth("large")
    graphs.note("large", launch_s=0.010, compute_s=0.030)
    assert not graphs.is_worth("large")


def test_a_host_that_has_become_slow(device: torch.device) -> None:
    """What it once took to launch a step says nothing any more: the device waits for each launch."""
    graphs = GraphCache(device, enabled=True)
    graphs.note("small", launch_s=0.010, compute_s=0.010)
    graphs.note("other", launch_s=0.024, compute_s=0.024)
    assert not graphs.is_worth("other")
    graphs.note("other", launch_s=0.024, compute_s=0.024 * WAITS_FOR_HOST - 1e-6)
    assert graphs.is_worth("other")


@on_a_gpu
def test_a_capture_waits_for_no_step_before(device: torch.device) -> None:
    graphs, counter = GraphCache(device, enabled=True), torch.zeros(1, device=device)

    def launch() -> None:
        counter.add_(torch.ones(1, device=device))

    launch()
    graphs.note_short("step", 1.0)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(BUSY_CYCLES)
    step_before = torch.cuda.Event()
    step_before.record()
    graphs.run("step", launch)
    is_busy = not step_before.query()
    assert "step" in graphs
    assert is_busy
    graphs.run("step", launch)
    assert counter.item() == 3


@on_a_gpu
def test_a_capture_takes_what_steps_have_left(device: torch.device) -> None:
    """Memory that the allocator keeps for launched steps is given back for a graph, if there is no other."""
    half = 1 << 29
    index = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(index).total_memory
    graphs, counter = GraphCache(device, enabled=True), torch.zeros(1, device=device)

    def launch() -> None:
        scratch = torch.ones(half, dtype=torch.uint8, device=device)
        counter.add_(scratch[-1])

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    launch()
    graphs.note_short("step", 1.0)
    assert torch.cuda.memory_reserved(device) >= before + half
    torch.cuda.set_per_process_memory_fraction((before + half * 3 // 2) / total, index)
    try:
        graphs.run("step", launch)
        graphs.run("step", launch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
    assert "step" in graphs
    assert counter.item() == 3
