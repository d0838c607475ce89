"""A runner on a GPU: how much memory is left for the KV cache, and kernels that are ready before the first request."""

from __future__ import annotations

import time

import numpy as np
import torch

from gpu_worker.attention.base import AttentionShape
from gpu_worker.attention.triton_paged import TritonPagedAttention
from gpu_worker.cuda_runner import CudaRunner
from gpu_worker.kv_cache import KVCache
from gpu_worker.models.base import CausalLM
from shared.logging import get_logger
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import ModelConfig
from shared.sampling import SamplingParams

log = get_logger()

MARGIN_BYTES = 2**30
"""Kept free for captured graphs, kernels and what the driver takes."""
WAIT_S = 30.0
"""How long to wait for the memory of a process that has just ended."""


def make_attention(config: WorkerConfig, shape: AttentionShape, dtype: torch.dtype) -> TritonPagedAttention:
    """The attention backend of a GPU for this worker."""
    return TritonPagedAttention(
        shape,
        torch.device("cuda"),
        cache_dtype=dtype,
        max_rows=config.num_slots,
        max_context=config.max_model_len,
    )


def assemble(
    config: WorkerConfig,
    model_config: ModelConfig,
    model: CausalLM,
    backend: TritonPagedAttention,
    dtype: torch.dtype,
    device: torch.device,
) -> CudaRunner:
    """The runner, with a KV cache of the memory that is left.

    Raises:
        StartupError: the KV cache is too small.
    """
    cache = KVCache(model_config.num_layers, backend, dtype, device, 0, 2)
    runner = CudaRunner(
        model_config,
        model,
        backend,
        cache,
        block_size=config.block_size,
        num_slots=config.num_slots,
        max_model_len=config.max_model_len,
        num_tokens=config.num_token_ids,
        graphs=not config.enforce_eager,
    )
    peak = _peak_of_a_step(runner, config.max_num_batched_tokens)
    size = config.kv_cache_bytes or _free_bytes(config.gpu_memory_utilization, device) - peak - MARGIN_BYTES
    log.info("memory of the GPU", step_peak_mib=peak >> 20, kv_cache_mib=size >> 20)
    runner.use_cache(KVCache(model_config.num_layers, backend, dtype, device, size, config.num_blocks_override))
    return runner


def _peak_of_a_step(runner: CudaRunner, tokens: int) -> int:
    """Bytes that the largest step allocates, and drops; compiles the kernels of prefills.

    Every position lies in the null block, whose contents nobody reads.
    """
    length = min(tokens, runner.max_model_len - 1)
    count = min(-(-tokens // length), runner.num_slots)
    slots = np.arange(count, dtype=np.int32)
    params = SamplingParams()
    new = [SlotInit(slot, "", 0, length, length, 0, length + 1, params, []) for slot in slots.tolist()]
    nothing, pairs = np.empty(0, np.int32), np.empty((0, 2), np.int32)
    prefill = np.stack([slots, np.zeros_like(slots), np.full_like(slots, length)], 1)
    step = Step(
        Epoch(0, 0), 0, new, np.zeros(count * length, np.int32), prefill, nothing,
        np.stack([slots, slots], 1), pairs, nothing, pairs,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.launch(step).wait()
    peak = torch.cuda.max_memory_allocated(runner.device) - before
    torch.cuda.empty_cache()
    return peak


def _free_bytes(utilization: float, device: torch.device) -> int:
    """What may still be taken of the share of the GPU's memory that is ours.

    A process that was killed may hold its memory for a moment: as long as more becomes free, wait.
    """
    free, total = torch.cuda.mem_get_info(device)
    end = time.monotonic() + WAIT_S
    while free < total * utilization / 2 and time.monotonic() < end:
        time.sleep(0.5)
        before, (free, _) = free, torch.cuda.mem_get_info(device)
        if free <= before:
            break
    return int(free - total * (1.0 - utilization))
