"""What a worker does before it is ready: parts of the start in the log, what begins before the engine answers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpu_worker import early_start
from gpu_worker.start_parts import EVENT, part_of_start


class Driver:
    """The driver's calls in their order; each returns ``code``."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> int:
            self.calls.append(name)
            return self.code

        return call


def test_a_part_is_logged_with_its_time() -> None:
    with capture_logs() as lines, part_of_start("imports"):
        pass
    assert [(line["event"], line["part"]) for line in lines] == [(EVENT, "imports")]
    assert 0 <= lines[0]["seconds"] < 60


def test_a_part_that_fails_is_not_logged() -> None:
    with capture_logs() as lines, pytest.raises(ValueError), part_of_start("imports"):
        raise ValueError
    assert lines == []


@pytest.mark.parametrize(
    ("code", "calls"), [(0, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), (100, ["cuInit"])]
)
def test_the_device_is_opened_as_far_as_the_driver_goes(
    monkeypatch: pytest.MonkeyPatch, code: int, calls: list[str]
) -> None:
    driver = Driver(code)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    with capture_logs() as lines:
        for thread in early_start.start_early("auto"):
            thread.join()
    assert driver.calls == calls
    assert imported == ["torch", "triton"]
    assert {line["part"] for line in lines} == {"context", "packages"}


@pytest.mark.parametrize(("device", "spec"), [("cpu", object()), ("auto", None), ("cuda", object())])
def test_no_device_is_opened_without_need(monkeypatch: pytest.MonkeyPatch, device: str, spec: object) -> None:
    def no_driver(name: str) -> None:
        assert device == "cuda"
        raise OSError("no such file")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert early_start.start_early(device) == []
