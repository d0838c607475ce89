"""A graph for which there is no memory: the step is launched, and earlier graphs go on."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.cuda_graphs import GraphCache

if not torch.cuda.is_available():
    pytest.skip("nothing is captured elsewhere", allow_module_level=True)


def test_a_capture_that_finds_no_memory(device: torch.device) -> None:
    index = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(index).total_memory
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
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + (1 << 29)) / total, index)
    try:
        for _ in range(3):
            graphs.run("large", large)
            graphs.run("small", small)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
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
