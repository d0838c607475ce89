"""Kernels run natively where there is a GPU, and in Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read by triton when a kernel is decorated, that is, when a kernel's module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
