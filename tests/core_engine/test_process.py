"""``python -m core_engine`` as a process: it stops when asked, and says why it cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.lifecycle import EXIT_CONFIG, EXIT_OK
from tests.core_engine.loop_harness import MODEL, FrontEnd, until

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    command = [sys.executable, "-P", "-m", "core_engine", "--model", str(folder / "model")]
    command += [f"--listen=ipc://{folder}/f", f"--listen-workers=ipc://{folder}/w", *flags]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_when_asked(tmp_path: Path, signum: signal.Signals) -> None:
    with start(tmp_path) as process, FrontEnd(f"ipc://{tmp_path}/f") as front:
        front.wait(lambda: front.hello is not None)
        process.send_signal(signum)
        until(lambda: process.poll() is not None, 10)
        assert process.returncode == EXIT_OK


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with start(tmp_path, "--max-model-len=9999") as process:
        assert process.stderr is not None
        words = process.stderr.read()
        assert process.wait(10) == EXIT_CONFIG
    assert "--max-model-len 9999 is more than the model's 256 positions" in words
