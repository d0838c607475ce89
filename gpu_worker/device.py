"""Which device and which dtype a worker computes with."""

from __future__ import annotations

import ctypes
import importlib.util
import sys

import torch

from gpu_worker.attention.registry import DEFAULT_OF_DEVICE
from shared.errors import StartupError
from shared.logging import get_logger
from shared.model_config import ModelConfig

FLOAT8_CAPABILITY = (8, 9)
"""From which on a GPU converts e4m3 in hardware."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_LIMIT = 32 * 2**20


def select_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` as a device; auto takes a GPU where there is one and Triton for it.

    Raises:
        StartupError: the device is not there, or not supported.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and _has_triton() else "cpu"
    if name not in DEFAULT_OF_DEVICE:
        raise StartupError(f"--device {name} is not supported; there are {', '.join(sorted(DEFAULT_OF_DEVICE))}")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no usable GPU (nvidia-smi shows what the driver sees)")
    if name == "cuda" and not _has_triton():
        raise StartupError("--device cuda needs the package triton: pip install headrace[gpu]")
    return torch.device(name)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def select_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations for ``--dtype``.

    A CPU computes float16 hundreds of times slower than bfloat16, so that it gets bfloat16 where float16 is asked for.

    Raises:
        StartupError: an unknown name.
    """
    if name == "auto":
        name = config.checkpoint_dtype if config.checkpoint_dtype in ("bfloat16", "float16") else "float32"
    known = {
        "float32": torch.float32,
        "float": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "half": torch.float16,
    }
    if name not in known:
        raise StartupError(f"--dtype {name} is not supported; there are auto, {', '.join(known)}")
    dtype = known[name]
    if device.type == "cpu" and dtype == torch.float16:
        get_logger().info("float16 is computed as bfloat16 on a CPU, which is hundreds of times slower at float16")
        return torch.bfloat16
    return dtype


def select_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache for ``--kv-cache-dtype`` and a model of ``dtype``.

    Raises:
        StartupError: an unknown name, or a GPU without instructions for float8.
    """
    known = {
        "auto": dtype,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
    }
    if name not in known:
        raise StartupError(f"--kv-cache-dtype {name} is not supported; there are {', '.join(known)}")
    chosen = known[name]
    if chosen.itemsize == 1 and device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise StartupError(
            f"--kv-cache-dtype {name} needs a GPU of compute capability 8.9 or higher, and "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
        )
    return chosen


def keep_freed_memory() -> None:
    """Let the C library keep freed memory of activations instead of returning it to the system.

    Each step allocates the same megabytes again; fresh pages would have to be zeroed each time.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MMAP_LIMIT)
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
