"""From settings and the model's configuration to what the core and the workers need to know."""

from __future__ import annotations

import dataclasses

from core_engine.chunking import ChunkTarget
from core_engine.core import CoreConfig
from core_engine.scheduler import SchedulerConfig
from shared.config import Settings
from shared.errors import StartupError
from shared.messages import ModelCard, WorkerConfig
from shared.model_config import load_model_config, model_digest, resolve_max_model_len
from shared.model_source import ModelSource, resolve_model
from shared.token_ids import count_token_ids

CPU_BUDGET, GPU_BUDGET = 2048, 8192
CPU_SEQS, GPU_SEQS = 256, 1024
"""Decoding on a GPU reads all weights once a step, so that more rows cost little; a CPU computes longer for each."""
GPU_TARGET_ITL_MS = 40.0
"""Steps of about 1,400 tokens for an 8B model on an H200: some eight times what reading the weights takes, so that
steps of the whole token budget are little faster, and a reader sees at least 25 tokens a second."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is fixed while an engine runs, but the token budget where it depends on the worker's device."""

    card: ModelCard
    eos_ids: tuple[int, ...]
    core: CoreConfig
    worker: WorkerConfig


def load_engine_config(settings: Settings) -> EngineConfig:
    """Read the model's configuration and resolve every default.

    Until a worker says what its device is, ``--device auto`` plans for a GPU: ``WorkerConfig.max_num_batched_tokens``
    is the most that a step may ever hold, and ``scheduler_for`` lowers the budget once the worker is ready.

    Raises:
        StartupError: the model is not there, or a setting does not fit it or another one.
    """
    source = resolve_model(settings.model, settings.revision)
    model = load_model_config(source)
    max_model_len = resolve_max_model_len(model, settings.max_model_len)
    scheduler = scheduler_for(settings, max_model_len, settings.device)
    core = core_config_for(settings, scheduler, model.vocab_size)
    worker = WorkerConfig(
        model=str(source.path),
        dtype=settings.dtype,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        num_slots=core.num_slots,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_bytes=settings.kv_cache_bytes,
        num_blocks_override=settings.num_gpu_blocks_override,
        seed=settings.seed,
        batch_invariant=settings.batch_invariant,
        enforce_eager=settings.enforce_eager,
        load_format=settings.load_format,
        num_token_ids=_num_token_ids(source, model.vocab_size),
        kv_cache_dtype=settings.kv_cache_dtype,
        host_bytes=int((settings.swap_space + settings.kv_offloading_size) * 2**30),
    )
    card = ModelCard(source.name, model_digest(model, source), model.vocab_size, max_model_len)
    return EngineConfig(card, model.eos_token_ids, core, worker)


def core_config_for(settings: Settings, scheduler: SchedulerConfig, vocab_size: int) -> CoreConfig:
    """What the settings say to the bookkeeping, beside the limits of a step."""
    return CoreConfig(
        scheduler=scheduler,
        vocab_size=vocab_size,
        block_size=settings.block_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        eviction=settings.prefix_cache_policy,
        watermark=settings.watermark,
        steps_in_flight=settings.steps_in_flight,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        policy=settings.scheduling_policy,
        priority_ageing_s=settings.priority_ageing_s,
        max_output_tokens=settings.max_output_tokens,
        swap_space=settings.swap_space,
        kv_offloading_size=settings.kv_offloading_size,
        preemption_mode=settings.preemption_mode,
    )


def _num_token_ids(source: ModelSource, vocab_size: int) -> int | None:
    """``WorkerConfig.num_token_ids``."""
    count = count_token_ids(source)
    return count if count is not None and count < vocab_size else None


def max_num_seqs_for(settings: Settings, device: str) -> int:
    """``--max-num-seqs``, or the default on ``device`` (``auto``: as on a GPU)."""
    return settings.max_num_seqs or (CPU_SEQS if device.startswith("cpu") else GPU_SEQS)


def scheduler_for(settings: Settings, max_model_len: int, device: str) -> SchedulerConfig:
    """The limits of a step on ``device`` (``cpu``, ``cuda:0``, …; ``auto``: as on a GPU).

    Raises:
        StartupError: whole prompts are to be scheduled, and the longest does not fit a step, or a target is to be kept.
    """
    on_cpu = device.startswith("cpu")
    default = CPU_BUDGET if on_cpu else GPU_BUDGET
    if not settings.enable_chunked_prefill:
        default = max(default, max_model_len)
    budget = settings.max_num_batched_tokens or default
    prefill = min(settings.max_prefill_tokens or budget, budget)
    if not settings.enable_chunked_prefill and prefill < max_model_len:
        name = "--max-prefill-tokens" if prefill < budget else "--max-num-batched-tokens"
        raise StartupError(
            f"{name} {prefill} < max_model_len {max_model_len}: a prompt that long could never run with "
            f"--no-enable-chunked-prefill; raise it, lower --max-model-len, or allow chunks"
        )
    return SchedulerConfig(
        max_num_seqs=max_num_seqs_for(settings, device),
        max_num_batched_tokens=budget,
        max_prefill_tokens=prefill,
        max_num_partial_prefills=settings.max_num_partial_prefills,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        chunk_target=_chunk_target(settings, device),
        max_model_len=max_model_len,
    )


def _chunk_target(settings: Settings, device: str) -> ChunkTarget | None:
    """``--target-itl-ms``, or the default on ``device``; None: off."""
    if settings.target_itl_ms is None:
        if device.startswith("cpu") or not settings.enable_chunked_prefill:
            return None
        return ChunkTarget.on(device, GPU_TARGET_ITL_MS / 1000, is_default=True)
    if settings.target_itl_ms == 0.0:
        return None
    if not settings.enable_chunked_prefill:
        raise StartupError("--target-itl-ms cuts prompts into chunks: leave out --no-enable-chunked-prefill, or give 0")
    return ChunkTarget.on(device, settings.target_itl_ms / 1000)
