"""Kernels compiled by threads before they run. In a process of its own: this one may interpret kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("compile_ahead_program.py")
ROOT = Path(__file__).parents[2]


def test_kernels_are_compiled_and_loaded_by_threads_and_launched_afterwards(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(PROGRAM)], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    said = [json.loads(line) for line in run.stdout.splitlines()]
    before, after = said[: said.index({"ready": True})], said[said.index({"ready": True}) + 1 :]
    assert {"zeros": [[0] * 16, [0, 0]], "first_row": 16.0} in before
    assert [line for line in before if "loaded" in line] == [{"loaded": "double", "thread": "compile"}] * 2
    assert not [line for line in before if "launched" in line]
    assert after == [{"launched": "double"}, {"error": "CompilationError"}]
