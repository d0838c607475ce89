"""From a worker's configuration to a runner."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from gpu_worker.attention.base import AttentionBackend, AttentionShape
from gpu_worker.attention.registry import make_backend
from gpu_worker.device import keep_freed_memory, select_cache_dtype, select_device, select_dtype
from gpu_worker.host_pool import HostPool, measure_rates
from gpu_worker.kv_cache import DEFAULT_CPU_BYTES, KVCache
from gpu_worker.loading.load_model import load_model
from gpu_worker.loading.weights import Weights
from gpu_worker.models.base import CausalLM
from gpu_worker.runner import ModelRunner
from gpu_worker.start_parts import part_of_start
from gpu_worker.step_output import Runner
from shared.messages import WorkerConfig
from shared.model_config import ModelConfig


def build_runner(config: WorkerConfig, model_config: ModelConfig, weights: Weights, device_name: str) -> Runner:
    """Load the model and allocate the KV cache; ``weights`` are closed.

    Raises:
        StartupError: the model cannot be served as configured; the text says why.
    """
    with contextlib.closing(weights):
        with part_of_start("device"):
            device = select_device(device_name)
        if device.type == "cpu":
            keep_freed_memory()
        dtype = select_dtype(config.dtype, model_config, device)
        cache_dtype = select_cache_dtype(config.kv_cache_dtype, dtype, device)
        shape = AttentionShape(
            model_config.num_heads,
            model_config.num_kv_heads,
            model_config.head_dim,
            config.block_size,
            config.batch_invariant,
        )
        if device.type == "cuda":
            return _on_cuda(config, model_config, weights, shape, dtype, cache_dtype, device)
        backend = _make_attention(config, shape, dtype, cache_dtype, device)
        with part_of_start("weights"):
            model = load_model(model_config, weights, backend, dtype, device, config.batch_invariant, cache_dtype)
    return _assemble(config, model_config, model, backend, cache_dtype, device)


def with_other_cache(runner: Runner, config: WorkerConfig) -> Runner:
    """The model of ``runner``, which must not be used any more, with the KV cache and the slots of ``config``.

    Raises:
        StartupError: the KV cache is too small.
    """
    cache_dtype, device = runner.cache.tensor.dtype, runner.device
    runner.reset()
    if runner.host_pool is not None:
        runner.host_pool.close()
    runner.cache.tensor = runner.cache.tensor[:, :0].clone()
    if isinstance(runner, ModelRunner):
        return _assemble(config, runner.config, runner.model, runner.backend, cache_dtype, device)
    from gpu_worker.cuda_build import assemble

    on_gpu: Any = runner
    on_gpu.transfers.close()
    return assemble(config, runner.config, runner.model, on_gpu.backend, cache_dtype, device)


def _on_cuda(
    config: WorkerConfig,
    model_config: ModelConfig,
    weights: Weights,
    shape: AttentionShape,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> Runner:
    with part_of_start("kernel modules"):
        from gpu_worker.cuda_build import assemble

    with part_of_start("model"):
        backend = _make_attention(config, shape, dtype, cache_dtype, device)
        model = load_model(
            model_config, weights, backend, dtype, device, config.batch_invariant, cache_dtype, wait=False
        )
    return assemble(config, model_config, model, backend, cache_dtype, device, weights.finish)


def _make_attention(
    config: WorkerConfig, shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> Any:
    """The backend of the device: an ``AttentionBackend`` on a CPU, what a ``CudaRunner`` needs on a GPU."""
    return make_backend(
        shape,
        device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        max_rows=config.num_slots,
        max_context=config.max_model_len,
    )


def _assemble(
    config: WorkerConfig,
    model_config: ModelConfig,
    model: CausalLM,
    backend: AttentionBackend,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> ModelRunner:
    size = config.kv_cache_bytes or DEFAULT_CPU_BYTES
    cache = KVCache(model_config.num_layers, backend, cache_dtype, device, size, config.num_blocks_override)
    pool = None
    if config.host_bytes:
        pool = HostPool(model_config.num_layers, backend, cache_dtype, device, config.host_bytes)
        pool.rates = measure_rates(functools.partial(pool.seconds_of_copy, cache), cache, pool)
    return ModelRunner(
        model_config,
        model,
        backend,
        cache,
        block_size=config.block_size,
        num_slots=config.num_slots,
        max_model_len=config.max_model_len,
        num_tokens=config.num_token_ids,
        host_pool=pool,
    )
