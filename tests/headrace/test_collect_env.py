"""``headrace collect-env`` says what is there, and hides what is secret."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from headrace.collect_env import as_text, collect, variables

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_json_has_versions_and_hardware(run: Run) -> None:
    done = run("collect-env", "--json", OMP_NUM_THREADS="3", HF_TOKEN="hf_secret", HEADRACE_API_KEY="also secret")
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout
    found = json.loads(done.stdout)
    for package in ("headrace", "torch", "transformers", "tokenizers", "pyzmq"):
        assert found["software"][package] == importlib.metadata.version(package)
    assert found["software"]["CURVE"] is True
    assert found["software"]["libzmq"][0].isdigit()
    assert found["cpu"]["model"]
    assert found["cpu"]["cores"] >= found["cpu"]["cores of this process"] >= 1
    assert found["memory"]["total"].endswith(" GiB")
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert found["environment"]["HF_TOKEN"] == found["environment"]["HEADRACE_API_KEY"] == "(hidden)"


def test_text_has_the_same(run: Run) -> None:
    done = run("collect-env", HEADRACE_PORT="81")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"  tokenizers: {importlib.metadata.version('tokenizers')}" in lines
    assert "  CURVE: yes" in lines
    assert "  HEADRACE_PORT: 81" in lines


def test_only_what_matters_is_shown_and_secrets_are_hidden() -> None:
    environ = {
        "HOME": "/root",
        "HF_ENDPOINT": "https://user:password@hub.example/x",
        "HEADRACE_MAX_NUM_BATCHED_TOKENS": "2k",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN": "",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert variables(environ) == {
        "CUDA_VISIBLE_DEVICES": "1",
        "HEADRACE_MAX_NUM_BATCHED_TOKENS": "2k",
        "HF_ENDPOINT": "https://(hidden)@hub.example/x",
        "HF_TOKEN": "",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_gpus_are_those_of_nvidia_smi(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 9.0, 570.86.15'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = collect({})
    assert found["gpu"]["driver"] == "570.86.15"
    assert found["gpu"]["GPUs"] == ["NVIDIA H200 (143771 MiB, compute capability 9.0)"]
    assert "  GPUs: NVIDIA H200 (143771 MiB, compute capability 9.0)" in as_text(found).splitlines()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, headrace.collect_env as c; c.collect(); "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'aiohttp') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
