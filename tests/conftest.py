"""What the tests of all packages share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import TinyModels

# How long an example takes says how busy the machine is.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny random checkpoints with a tokenizer, made when first asked for: ``tiny_models.folder("qwen3")``."""
    return TinyModels(tmp_path_factory.mktemp("tiny_models"))
