"""Which steps get a graph, and that a capture is in nobody's way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from gpu_worker.cuda_graphs import LAUNCH_BOUND, WAITS_FOR_HOST, GraphCache

ON_GPU = torch.cuda.is_available()
on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="nothing is captured elsewhere")
BUSY_CYCLES = 2_000_000_000
"""Of the device: about a second."""
Noted = tuple[str, float, float]
"""A key, seconds to launch it, seconds of the device."""
KNOWN: Noted = ("known", 0.010, 0.010)


@pytest.mark.parametrize(
    ("noted", "is_worth"),
    [
        pytest.param([], False, id="unknown"),
        pytest.param([("step", 0.010, 0.010 * LAUNCH_BOUND - 1e-6)], True, id="the device is quick with it"),
        pytest.param([KNOWN, ("step", 0.012, 0.010 * LAUNCH_BOUND)], False, id="the device takes longer than the host"),
        # The first launch of a shape takes long, and the device waits for it.
        pytest.param([KNOWN, ("step", 0.200, 0.201)], False, id="kernels are loaded"),
        pytest.param([KNOWN, ("step", 0.200, 0.201), ("step", 0.010, 0.030)], False, id="kernels were loaded"),
        # What it once took to launch a step says nothing any more: the device waits for each launch.
        pytest.param([KNOWN, ("step", 0.024, 0.024)], False, id="the host may have become slow"),
        pytest.param(
            [KNOWN, ("step", 0.024, 0.024), ("step", 0.024, 0.024 * WAITS_FOR_HOST - 1e-6)],
            True,
            id="the host has become slow",
        ),
    ],
)
def test_which_steps_gain_from_a_graph(device: torch.device, noted: list[Noted], is_worth: bool) -> None:
    graphs = GraphCache(device, enabled=True)
    for key, launch_s, compute_s in noted:
        graphs.note(key, launch_s, compute_s)
    assert graphs.is_worth("step") is is_worth


@contextlib.contextmanager
def room_of(num_bytes: int, device: torch.device) -> Iterator[None]:
    """No more of the GPU's memory than is taken now and so many bytes."""
    index = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + num_bytes) / total, index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


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
    graphs, counter = GraphCache(device, enabled=True), torch.zeros(1, device=device)

    def launch() -> None:
        scratch = torch.ones(half, dtype=torch.uint8, device=device)
        counter.add_(scratch[-1])

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    launch()
    graphs.note_short("step", 1.0)
    assert torch.cuda.memory_reserved(device) >= before + half
    with room_of(half // 2, device):
        graphs.run("step", launch)
        graphs.run("step", launch)
    assert "step" in graphs
    assert counter.item() == 3


@on_a_gpu
def test_a_capture_that_finds_no_memory(device: torch.device) -> None:
    """The step is launched, and earlier graphs go on."""
    counter = torch.zeros(4, device=device)
    scratch: list[torch.Tensor] = []
    graphs = GraphCache(device, enabled=True)

    def small() -> None:
        counter[0] += 1

    def large() -> None:
        if torch.cuda.is_current_stream_capturing():
            scratch.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))
        counter[1] += 1

    for key, launch in (("small", small), ("large", large)):
        launch()
        graphs.note_short(key, 1.0)
    graphs.run("small", small)
    torch.cuda.empty_cache()
    with room_of(1 << 29, device):
        for _ in range(3):
            graphs.run("large", large)
            graphs.run("small", small)
    assert counter.tolist() == [5, 4, 0, 0]
    assert scratch == []
    assert "large" not in graphs
    assert not graphs.is_worth("large")
    assert graphs.is_worth("small")
    graphs.clear()
    graphs.run("large", large)
    graphs.run("large", large)
    assert "large" in graphs
    assert counter[1].item() == 6
