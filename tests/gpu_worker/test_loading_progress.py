"""How far loading is: in words for whoever asks, as a bar for a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from runner_harness import worker_config
from tiny_models import TinyModels

from gpu_worker import model_loading
from gpu_worker.loading.progress import Progress
from gpu_worker.model_loading import ModelLoading
from shared.errors import StartupError

ROOT = Path(__file__).parents[2]
DRAW = """
from gpu_worker.loading.progress import Progress
progress = Progress(1000)
progress.update(300)
progress.close()
"""


def drawn(on_terminal: bool, **variables: str) -> str:
    """What a program that loads weights writes to standard error."""
    command, environ = [sys.executable, "-P", "-c", DRAW], {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    if not on_terminal:
        return subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=True).stderr
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    try:
        subprocess.run(command, env=environ, stderr=theirs, check=True)
        os.write(theirs, b"end")
        text = b""
        while not text.endswith(b"end"):
            text += os.read(ours, 4096)
        return text.removesuffix(b"end").decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_bar_is_drawn_on_a_terminal_only() -> None:
    shown = drawn(True)
    assert "loading weights:" in shown
    assert "100%" in shown
    assert drawn(False) == ""
    assert drawn(True, TQDM_DISABLE="1") == ""


def test_percent_goes_up_in_steps() -> None:
    progress = Progress(1000)
    shown = [progress.percent]
    for _ in range(60):
        progress.update(13)
        shown.append(progress.percent)
    assert shown[0] == 0
    assert sorted(set(shown)) == list(range(0, 80, 5))  # type: ignore[type-var]
    progress.close()
    assert progress.percent == 100
    progress.update(13)
    assert progress.percent == 100


def test_percent_of_an_unknown_size_is_unknown() -> None:
    progress = Progress(0)
    progress.update(13)
    progress.close()
    assert progress.percent is None


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_status_says_how_much_is_loaded(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    made, loading, seen = threading.Event(), [], []
    update = Progress.update

    def watched(progress: Progress, nbytes: int) -> None:
        assert made.wait(60)
        update(progress, nbytes)
        seen.append(loading[0].status)

    monkeypatch.setattr(Progress, "update", watched)
    loading.append(ModelLoading(worker_config(tiny_models.folder("qwen3"), load_format=load_format), "cpu", None, None))
    made.set()
    loading[0]._thread.join(120)
    assert loading[0].error is None
    if load_format == "dummy":
        assert loading[0].status == "loading the weights"
    else:
        shown = [int(status.removeprefix("loading the weights: ").removesuffix(" %")) for status in seen]
        assert shown == sorted(shown)
        assert len(set(shown)) > 5
        assert loading[0].status == "loading the weights: 100 %"


def test_what_nobody_foresaw_may_end_better_the_next_time(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told apart from what is wrong with the model."""

    def fails(*_: object, **__: object) -> None:
        raise MemoryError("not now")

    monkeypatch.setattr(model_loading, "open_weights", fails)
    loading = ModelLoading(worker_config(tiny_models.folder("llama")), "cpu", None, None)
    while not loading.finished:
        time.sleep(0.01)
    assert loading.runner is None
    assert isinstance(loading.error, RuntimeError)
    assert str(loading.error) == "loading the model failed: MemoryError: not now"
    assert not isinstance(loading.error, StartupError)
