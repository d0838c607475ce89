"""How many KV blocks fit the memory that is to be bought."""

from __future__ import annotations

import dataclasses

from core_engine.block_pool import LEAST_BLOCKS
from core_engine.host_memory import HostMemorySpec
from headrace.simulate.device import GIB, Device
from shared.config import Settings
from shared.errors import StartupError
from shared.model_config import ModelConfig

DTYPE_BYTES = {"float32": 4, "float": 4}
WORKSPACE_BYTES = 2 * GIB
"""Of a GPU: activations of the largest step, CUDA's context and its graphs."""
CPU_CACHE_BYTES = GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The KV cache of one worker."""

    num_blocks: int
    """The null block included."""
    words: str
    """How that was found."""


def num_weights(model: ModelConfig) -> int:
    """Parameters of a dense transformer of this shape, norms and biases left out."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (2 * queries + 2 * keys)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * layer + embeddings


def with_model(device: Device, model: ModelConfig, settings: Settings) -> Device:
    """The device with the weights and the KV cache of another model; its times stay."""
    dtype = settings.dtype if settings.dtype != "auto" else model.checkpoint_dtype
    size = DTYPE_BYTES.get(dtype, 2)
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size
    return dataclasses.replace(device, weights_bytes=size * num_weights(model), kv_bytes_per_token=kv_bytes)


def find_memory(settings: Settings, device: Device) -> Memory:
    """The KV blocks: as given, of ``--kv-cache-bytes``, or what the device's memory has left.

    Raises:
        StartupError: something is not known, or the weights leave too little.
    """
    given = settings.num_gpu_blocks_override
    if given is not None:
        if given < LEAST_BLOCKS:
            raise StartupError(
                f"a KV cache has at least {LEAST_BLOCKS} blocks, one of them the null block, got {given}"
            )
        return Memory(given, f"{given:,} blocks, as given")
    per_token = device.kv_bytes_per_token
    if per_token is None:
        raise StartupError("what a token takes is not known: give --model, --kv-bytes-per-token or --num-gpu-blocks")
    if settings.kv_cache_dtype.startswith("fp8"):
        per_token //= 2
    cache, words = _cache_bytes(settings, device)
    num_blocks = cache // (per_token * settings.block_size)
    if num_blocks < LEAST_BLOCKS:
        raise StartupError(f"no KV cache fits: {words}")
    tokens = (num_blocks - 1) * settings.block_size
    return Memory(num_blocks, f"{words} = {tokens:,} tokens of {per_token:,} bytes")


def find_host_memory(settings: Settings, device: Device) -> HostMemorySpec | None:
    """The blocks of ``--swap-space`` and ``--kv-offloading-size``; None: there is none.

    Raises:
        StartupError: what a block takes is not known.
    """
    size = int((settings.swap_space + settings.kv_offloading_size) * GIB)
    if not size:
        return None
    if device.kv_bytes_per_token is None:
        raise StartupError("what a block in host memory takes is not known: give --model or --kv-bytes-per-token")
    halves = 2 if settings.kv_cache_dtype.startswith("fp8") else 1
    block_bytes = device.kv_bytes_per_token // halves * settings.block_size
    return HostMemorySpec(size // block_bytes, block_bytes, device.copy_rates)


def _cache_bytes(settings: Settings, device: Device) -> tuple[int, str]:
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes, f"{settings.kv_cache_bytes / GIB:.1f} GiB, as given"
    if device.kind == "cpu" and device.memory_bytes is None:
        return CPU_CACHE_BYTES, f"{CPU_CACHE_BYTES / GIB:.1f} GiB, the default on a CPU"
    if device.memory_bytes is None or device.weights_bytes is None:
        what = "--gpu-memory" if device.memory_bytes is None else "--model or --weights-bytes"
        raise StartupError(f"the size of the KV cache is not known: give {what}, --kv-cache-bytes or --num-gpu-blocks")
    used = settings.gpu_memory_utilization * device.memory_bytes
    cache = int(used) - device.weights_bytes - WORKSPACE_BYTES
    parts = f"{device.weights_bytes / GIB:.1f} GiB of weights - {WORKSPACE_BYTES / GIB:.0f} GiB of workspace"
    share = f"{settings.gpu_memory_utilization:g} x {device.memory_bytes / GIB:.0f} GiB"
    return cache, f"{share} - {parts} = {cache / GIB:.1f} GiB"
