"""A tiny model that two deployments and their undisturbed answers are made of."""

from __future__ import annotations

import os

import pytest
from tiny_models import TinyModels

SEED_VARIABLE = "HEADRACE_CHAOS_SEED"


@pytest.fixture(scope="session")
def model(tiny_models: TinyModels) -> str:
    return str(tiny_models.folder("llama"))


@pytest.fixture(scope="session")
def chaos_seed() -> int:
    """``HEADRACE_CHAOS_SEED``, else 0: the same every time, so that a failure can be repeated."""
    return int(os.environ.get(SEED_VARIABLE, "0"))
