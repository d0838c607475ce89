"""Workers that see the same GPUs never share one. The GPUs are a list of UUIDs; the locks and processes are real."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from runner_harness import worker_config
from scripted_engine import ROOT, ScriptedEngine
from tiny_models import TinyModels

from gpu_worker.device_lease import VISIBLE, DeviceLease, device_lease, visible_gpus
from gpu_worker.nvml import LIBRARY, installed_gpus
from shared.config import Settings
from shared.errors import StartupError
from shared.messages import Hello

GPUS = ["GPU-aa11", "GPU-bb22", "GPU-cc33"]


def lease(folder: Path, *uuids: str, owner: str = "") -> DeviceLease:
    return DeviceLease("cuda", uuids or GPUS, folder=str(folder), owner=owner, environ={})


def chosen(
    folder: Path, device: str, visible: str | None = None, gpus: Sequence[str] = GPUS
) -> tuple[DeviceLease, Any]:
    """The lease of a worker with these settings, and its environment."""
    environ = {} if visible is None else {VISIBLE: visible}
    settings = Settings(device=device, device_lease_dir=str(folder), name="w")
    return device_lease(settings, installed=lambda: gpus, environ=environ), environ


def test_each_worker_gets_a_gpu_of_its_own(tmp_path: Path) -> None:
    leases = [lease(tmp_path, owner=f"w{number}") for number in range(4)]
    assert [each.take() for each in leases] == [True, True, True, False]
    assert [each.uuid for each in leases] == [*GPUS, None]
    holders = "GPU-aa11 is held by w0, GPU-bb22 is held by w1, GPU-cc33 is held by w2"
    assert leases[3].status == f"waiting for a free GPU: {holders}"
    assert leases[1].take(), "what is held stays held"
    leases[1].give_back()
    assert leases[3].take()
    assert leases[3].uuid == "GPU-bb22"
    assert leases[1].held, "a worker that needs none waits for none"


def test_a_gpu_is_the_only_one_that_cuda_sees(tmp_path: Path) -> None:
    first, environ = chosen(tmp_path, "auto", "2,0")
    assert environ == {VISIBLE: "2,0"}, "nothing is decided before it is held"
    assert first.take()
    assert (first.device, environ) == ("auto", {VISIBLE: "GPU-cc33"})
    second, environ = chosen(tmp_path, "cuda", "2,0")
    assert second.take()
    assert environ == {VISIBLE: "GPU-aa11"}
    third, _ = chosen(tmp_path, "cuda", "2,0")
    assert not third.take()


def test_a_numbered_device_is_that_one_or_none(tmp_path: Path) -> None:
    first, environ = chosen(tmp_path, "cuda:1", "GPU-cc,0")
    assert first.take()
    assert (first.device, environ) == ("cuda", {VISIBLE: "GPU-aa11"})
    second, _ = chosen(tmp_path, "cuda:0")
    assert not second.take()
    assert second.status == "waiting for a free GPU: GPU-aa11 is held by w"
    with pytest.raises(StartupError, match="there are 2 visible GPUs"):
        chosen(tmp_path, "cuda:2", "GPU-cc,0")


@pytest.mark.parametrize(("visible", "entry"), [(None, "1"), ("4,GPU-7", "GPU-7"), ("4", "")])
def test_a_numbered_device_where_nobody_lists_gpus(tmp_path: Path, visible: str | None, entry: str) -> None:
    made, environ = chosen(tmp_path, "cuda:1", visible, [])
    assert made.held
    assert (made.device, environ) == ("cuda", {VISIBLE: entry})


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_what_is_no_gpu_needs_no_lease(tmp_path: Path, device: str) -> None:
    made, environ = chosen(tmp_path / "none", device)
    assert made.take()
    assert (made.device, made.uuid, environ) == (device, None, {})
    assert not (tmp_path / "none").exists()


def test_without_triton_auto_is_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert chosen(tmp_path, "auto")[0].uuid is None
    assert chosen(tmp_path, "auto")[0].held
    assert not chosen(tmp_path, "cuda")[0].held


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, GPUS),
        ("1, 0", [GPUS[1], GPUS[0]]),
        ("GPU-bb22,GPU-c", [GPUS[1], GPUS[2]]),
        ("0,7,1", [GPUS[0]]),
        ("1,-1,0", [GPUS[1]]),
        ("0,0,1", [GPUS[0]]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("MIG-GPU-aa11/1/0", ["MIG-GPU-aa11/1/0"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_sees(visible: str | None, expected: list[str]) -> None:
    assert visible_gpus(GPUS, {} if visible is None else {VISIBLE: visible}) == expected


def test_a_part_of_a_gpu_has_a_lock_too(tmp_path: Path) -> None:
    assert lease(tmp_path, "MIG-GPU-aa11/1/0").take()
    assert not lease(tmp_path, "MIG-GPU-aa11/1/0").take()
    assert lease(tmp_path, "MIG-GPU-aa11/2/0").take()


def test_a_folder_that_others_could_have_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    made = Path("/tmp/headrace-leases-4000000000")
    try:
        with pytest.raises(StartupError, match="only this user writes to"):
            DeviceLease("cuda", GPUS)
        assert made.stat().st_mode & 0o777 == 0o700
    finally:
        made.rmdir()


def test_locks_that_cannot_be_opened_are_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "GPU-aa11").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match=r"--device-lease-dir: the lock .*GPU-aa11"):
        lease(tmp_path).take()
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="--device-lease-dir"):
        lease(tmp_path / "file")


HOLDER = """
import sys, time
from gpu_worker.device_lease import DeviceLease
from shared.logging import setup_logging
setup_logging("gpu_worker", "error", "console")
print(DeviceLease("cuda", ["GPU-aa11"], folder=sys.argv[1], owner="first").take(), flush=True)
time.sleep(60)
"""
WORKER = """
from gpu_worker.device_lease import DeviceLease
from gpu_worker.worker import Worker
from shared.config import parse_settings
import sys
settings = parse_settings("gpu_worker", sys.argv[1:])
lease = DeviceLease("cpu", ["GPU-aa11"], folder=settings.device_lease_dir, owner="second")
assert not lease.take()
Worker(settings, lease).run()
"""


def test_a_waiting_worker_takes_the_gpu_of_one_that_was_killed(tmp_path: Path, tiny_models: TinyModels) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        engine = ScriptedEngine(tmp_path, f"--device-lease-dir={tmp_path}", program=("-c", WORKER))
        try:
            engine.expect(Hello, lambda hello: hello.status == "waiting for a free GPU: GPU-aa11 is held by first")
            holder.send_signal(signal.SIGKILL)
            assert engine.begin(1, worker_config(tiny_models.folder("llama"))).error is None
            assert lease(tmp_path, "GPU-aa11").take(), "a worker that computes on the CPU gives the GPU back"
        finally:
            engine.process.kill()
            engine.close()
            holder.kill()


class Nvml:
    """NVIDIA's library with a plain GPU, one that may not be used, and one in two parts."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def nvmlInit_v2(self) -> int:
        return self.code

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, gpu: Any) -> int:
        gpu._obj.value = index + 1
        return 4 if index == 1 else 0

    def nvmlDeviceGetMigMode(self, gpu: Any, current: Any, pending: Any) -> int:
        current._obj.value = int(gpu.value == 3)
        return 0 if gpu.value == 3 else 3

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Any, count: Any) -> int:
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Any, index: int, part: Any) -> int:
        part._obj.value = 10 + index
        return 0 if index in (0, 4) else 6

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: int) -> int:
        text.value = f"{'MIG' if handle.value >= 10 else 'GPU'}-{handle.value}".encode()
        return 0


@pytest.mark.parametrize(("code", "expected"), [(0, ["GPU-1", "MIG-10", "MIG-14"]), (9, [])])
def test_the_driver_lists_gpus_and_parts(monkeypatch: pytest.MonkeyPatch, code: int, expected: list[str]) -> None:
    opened: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or Nvml(code))
    assert installed_gpus() == expected
    assert opened == [LIBRARY]


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert installed_gpus() == []
