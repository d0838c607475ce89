"""``headrace collect-env``: what a bug report should say about the machine and what is installed on it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.version import installed_version
from shared.lifecycle import EXIT_OK

PACKAGES = ("torch", "transformers", "tokenizers", "triton", "safetensors", "numpy", "aiohttp", "uvloop", "pyzmq")
VARIABLES = re.compile(r"(HEADRACE|OMP|HF|MKL|KMP|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|TOKENIZERS|TRANSFORMERS)_")
SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|AUTH|CREDENTIALS?)(_|$)")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
"""Instructions on which the speed of matrix products depends."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader")
NVIDIA_SMI_LIMIT_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Print it as text, or with ``--json`` as one object. Returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="headrace collect-env",
        description="Print versions, hardware and variables for a bug report. Values of keys and tokens are hidden.",
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    as_json = parser.parse_args(list(argv)).json
    found = collect()
    print(json.dumps(found, indent=2) if as_json else as_text(found))
    return EXIT_OK


def collect(environ: Mapping[str, str] = os.environ) -> dict[str, dict[str, Any]]:
    """Sections of names and values; None is what is not there. Imports none of the packages that it tells of."""
    return {
        "software": {
            "headrace": installed_version(),
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": platform.platform(),
            **{package: _version(package) for package in PACKAGES},
            **_libzmq(),
        },
        "gpu": {"torch built for CUDA": _torch_cuda(), **_gpus()},
        "cpu": _cpu(),
        "memory": _memory(),
        "environment": variables(environ),
    }


def as_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Lines of ``name: value`` below a line for each section."""
    lines: list[str] = []
    for section, values in found.items():
        lines += [f"{section}:", *(f"  {name}: {_shown(value)}" for name, value in values.items())]
        if not values:
            lines.append("  none")
    return "\n".join(lines)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what Headrace and its libraries do, with secrets hidden."""
    return {name: _hidden(name, value) for name, value in sorted(environ.items()) if VARIABLES.match(name)}


def _hidden(name: str, value: str) -> str:
    if SECRET.search(name) and value:
        return "(hidden)"
    return re.sub(r"//[^/@\s]+@", "//(hidden)@", value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libzmq() -> dict[str, Any]:
    try:
        from shared.transport import libzmq
    except ImportError:
        return {"libzmq": None, "CURVE": False}
    version, curve = libzmq()
    return {"libzmq": version, "CURVE": curve}


def _torch_cuda() -> str | None:
    """The CUDA version in torch's ``version.py``, read as text: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        text = _text(pathlib.Path(folder) / "version.py")
        if match := re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE):
            return match[1]
    return None


def _gpus() -> dict[str, Any]:
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"driver": None, "GPUs": []}
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 3]
    return {
        "driver": rows[0][3] if rows else None,
        "GPUs": [f"{name} ({memory}, compute capability {capability})" for name, memory, capability, _ in rows],
    }


def _cpu() -> dict[str, Any]:
    text = _text(pathlib.Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "model": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores of this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": [flag for flag in CPU_FLAGS if flag in present],
    }


def _memory() -> dict[str, Any]:
    limit = _text(pathlib.Path("/sys/fs/cgroup/memory.max")).strip()
    return {
        "total": _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "limit of this container": _gib(int(limit)) if limit.isdigit() else None,
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
