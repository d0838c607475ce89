"""Tests that need a GPU, and are skipped where there is none.

``HEADRACE_GPU_TESTS=interpreter`` runs them all the same, with a few requests each, to see that they would run: the
kernels in Triton's interpreter, whole engines on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read by triton when a kernel is decorated, that is, when a kernel's module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("HEADRACE_GPU_TESTS") == "interpreter":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
