"""Which GPUs there are, asked of NVIDIA's management library, which opens none of them. Imports no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

LIBRARY = "libnvidia-ml.so.1"
UUID_BYTES = 96
"""``NVML_DEVICE_UUID_V2_BUFFER_SIZE``."""


def installed_gpus() -> list[str]:
    """UUIDs of the GPUs that this process or container may use, in PCI order like ``nvidia-smi -L``; [] without any.

    ``GPU-…``, or for a GPU that is partitioned the ``MIG-…`` of each part. CUDA_VISIBLE_DEVICES is not looked at.
    """
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    count = ctypes.c_uint()
    # Never shut down: a GPU without persistence mode would be set up again, which takes seconds, when CUDA opens it.
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    return [uuid for index in range(count.value) for uuid in _uuids(nvml, index)]


def _uuids(nvml: ctypes.CDLL, index: int) -> Iterator[str]:
    """The UUID of one GPU, or of its parts; nothing for one that may not be used."""
    gpu, current, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)) != 0:
        return
    mode = nvml.nvmlDeviceGetMigMode(gpu, ctypes.byref(current), ctypes.byref(pending))
    for handle in _parts(nvml, gpu) if mode == 0 and current.value else [gpu]:
        text = ctypes.create_string_buffer(UUID_BYTES)
        if nvml.nvmlDeviceGetUUID(handle, text, UUID_BYTES) == 0:
            yield text.value.decode("ascii")


def _parts(nvml: ctypes.CDLL, gpu: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    most = ctypes.c_uint()
    nvml.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(most))
    for index in range(most.value):
        part = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, ctypes.byref(part)) == 0:
            yield part
