"""What ``docker-compose.yml`` promises about restarts and replicas."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import yaml

from shared.config import ENGINE, GATEWAY, TOKENIZER, WORKER

FILE = pathlib.Path(__file__).parents[2] / "docker-compose.yml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
LASTING = (GATEWAY, TOKENIZER, ENGINE, WORKER, f"{WORKER}_gpu")


def test_the_lasting_services_are_these() -> None:
    assert {name for name, service in SERVICES.items() if service["restart"] != "no"} == set(LASTING)


@pytest.mark.parametrize("name", LASTING)
def test_what_ends_or_stops_is_started_again(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    check = service["healthcheck"]["test"]
    assert check[:4] == ["CMD", "python", "-m", "shared.healthcheck"]
    assert int(check[check.index("--kill-after") + 1]) > 30
    assert "HEADRACE_STUCK_TIMEOUT" in service["environment"]


@pytest.mark.parametrize("name", [name for name in LASTING if name != ENGINE])
def test_number_of_replicas_can_be_given(name: str) -> None:
    assert re.fullmatch(r"\$\{[A-Z_]+:-1\}", SERVICES[name]["deploy"]["replicas"])
