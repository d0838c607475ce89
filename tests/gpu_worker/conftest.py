"""A runner in this process, driven like an engine drives it, and the references that it is held against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scripted_engine import ScriptedEngine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests do not compete for cores, and leave the number of threads as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ScriptedEngine]:
    """With a worker of its own."""
    made = ScriptedEngine(tmp_path)
    yield made
    made.close()
