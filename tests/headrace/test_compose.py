"""What ``docker-compose.yml`` promises about restarts, replicas, leases and the order of a stop."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import yaml

from shared.config import ENGINE, GATEWAY, TOKENIZER, WORKER, Settings

FILE = pathlib.Path(__file__).parents[2] / "docker-compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (FILE.parent / "Dockerfile").read_text()
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


@pytest.mark.parametrize("name", [GATEWAY, WORKER, f"{WORKER}_gpu"])
def test_what_drains_has_the_time_to(name: str) -> None:
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= Settings().shutdown_timeout + 10
    assert "HEADRACE_SHUTDOWN_TIMEOUT" not in SERVICES[name]["environment"]


@pytest.mark.parametrize(
    ("name", "behind"), [(GATEWAY, [TOKENIZER]), (TOKENIZER, [ENGINE]), (ENGINE, [WORKER, f"{WORKER}_gpu"])]
)
def test_what_running_requests_need_is_stopped_after_the_gateways(name: str, behind: list[str]) -> None:
    """Compose stops a service before those that it depends on."""
    needed = {key: value for key, value in SERVICES[name]["depends_on"].items() if SERVICES[key]["restart"] != "no"}
    assert list(needed) == behind
    assert all(value["condition"] == "service_started" for value in needed.values())
    optional = [key for key, value in needed.items() if value.get("required") is False]
    assert optional == [key for key in behind if key in (WORKER, f"{WORKER}_gpu")]


def test_workers_that_see_all_gpus_have_their_locks_in_one_volume() -> None:
    service = SERVICES[f"{WORKER}_gpu"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == "all"
    folder = service["environment"]["HEADRACE_DEVICE_LEASE_DIR"]
    (volume,) = [each for each in service["volumes"] if each.split(":")[1] == folder]
    assert volume == f"gpu-leases:{folder}"
    assert "gpu-leases" in COMPOSE["volumes"]
    # A new volume takes over the owner and the mode that the folder has in the image.
    assert re.search(rf"mkdir -p .* {folder} \\\n(?s:.*)chown -R 2000:0 .* {folder} ", DOCKERFILE)
