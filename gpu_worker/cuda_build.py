"""A runner on a GPU: how much memory is left for the KV cache, and kernels that are ready before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpu_worker.attention.triton_paged import TritonPagedAttention
from gpu_worker.cuda_runner import CudaRunner
from gpu_worker.cuda_transfers import bytes_of_pieces
from gpu_worker.cuda_warm_up import capture_graphs, compile_kernels, peak_of_a_step
from gpu_worker.host_pool import HostPool, measure_rates
from gpu_worker.kv_cache import KVCache
from gpu_worker.models.base import CausalLM
from gpu_worker.start_parts import in_background, part_of_start
from shared.logging import get_logger
from shared.messages import WorkerConfig
from shared.model_config import ModelConfig

log = get_logger()

MARGIN_BYTES = 2**30
"""Kept free for captured graphs, kernels and what the driver takes."""
WAIT_S = 30.0
"""How long to wait for the memory of a process that has just ended."""


def assemble(
    config: WorkerConfig,
    model_config: ModelConfig,
    model: CausalLM,
    backend: TritonPagedAttention,
    cache_dtype: torch.dtype,
    device: torch.device,
    finish_weights: Callable[[], None] = lambda: None,
) -> CudaRunner:
    """The runner, with a KV cache of the memory that is left, ready for requests.

    Args:
        finish_weights: returns when the model's weights are there.

    Raises:
        StartupError: the KV cache is too small, or of ``finish_weights``.
    """
    host_pool = in_background(lambda: _host_pool(config, model_config, backend, cache_dtype, device))
    cache = KVCache(model_config.num_layers, backend, cache_dtype, device, 0, 2)
    runner = CudaRunner(
        model_config,
        model,
        backend,
        cache,
        block_size=config.block_size,
        num_slots=config.num_slots,
        max_model_len=config.max_model_len,
        num_tokens=config.num_token_ids,
        max_tokens=config.max_num_batched_tokens,
        graphs=not config.enforce_eager,
    )
    with part_of_start("kernels"):
        compile_kernels(runner, config.max_num_batched_tokens, config.host_bytes > 0)
    if host_pool.done():
        # What is wrong with it is told before the weights are there.
        host_pool.result()
    with part_of_start("weights"):
        finish_weights()
    with part_of_start("memory"):
        peak = peak_of_a_step(runner, config.max_num_batched_tokens)
    reserved = peak + MARGIN_BYTES + (bytes_of_pieces(cache.block_bytes) if config.host_bytes else 0)
    size = config.kv_cache_bytes or _free_bytes(config.gpu_memory_utilization, device) - reserved
    log.info("memory of the GPU", step_peak_mib=peak >> 20, kv_cache_mib=size >> 20)
    cache = KVCache(model_config.num_layers, backend, cache_dtype, device, size, config.num_blocks_override)
    pool = host_pool.result()
    runner.use_cache(cache, pool)
    if pool is not None:
        pool.rates = measure_rates(runner.transfers.seconds_of, cache, pool)
        to_host, to_device = (round(rate / 1e9, 1) for rate in pool.rates)
        log.info("pool in host memory", blocks=pool.num_blocks, gb_per_s_to_it=to_host, gb_per_s_from_it=to_device)
    if not config.enforce_eager:
        with part_of_start("graphs"):
            capture_graphs(runner)
    return runner


def _host_pool(
    config: WorkerConfig,
    model_config: ModelConfig,
    backend: TritonPagedAttention,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> HostPool | None:
    """Locking gigabytes takes seconds, in which kernels are compiled and weights are read."""
    if not config.host_bytes:
        return None
    return HostPool(model_config.num_layers, backend, cache_dtype, device, config.host_bytes)


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
