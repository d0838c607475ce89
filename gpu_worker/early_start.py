"""What a worker on a GPU does before the engine says which model it wants. Imports no torch itself."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import threading

from gpu_worker.start_parts import part_of_start

DRIVER = "libcuda.so.1"
MODULES = ("torch", "triton")


def start_early(device: str) -> list[threading.Thread]:
    """Begin to open the GPU and to import the large packages, side by side, if ``device`` may come to be a GPU.

    Args:
        device: of ``--device``.
    """
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return []
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return []
    threads = [
        threading.Thread(target=_open, args=(driver,), name="open-device", daemon=True),
        threading.Thread(target=_import, name="import-packages", daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _open(driver: ctypes.CDLL) -> None:
    """Make the first GPU's context, the one that torch will use, which holds no lock of Python.

    What fails here fails again, with an explanation, when torch does it.
    """
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with part_of_start("context"):
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _import() -> None:
    with part_of_start("packages"):
        for name in MODULES:
            importlib.import_module(name)
