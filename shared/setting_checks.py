"""Which values of settings there can be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.config import Settings

KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3")
AT_LEAST_ONE = (
    "block_size",
    "data_parallel_size",
    "kv_cache_bytes",
    "max_body_bytes",
    "max_connections",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_partial_prefills",
    "max_num_seqs",
    "max_output_tokens",
    "max_prefill_tokens",
    "num_gpu_blocks_override",
    "steps_in_flight",
    "threads",
    "tokenizers",
)
NOT_NEGATIVE = (
    "kv_offloading_size",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_restarts",
    "restart_window",
    "resume_window",
    "shutdown_timeout",
    "swap_space",
)
ABOVE_ZERO = ("beat_s", "lease_s", "priority_ageing_s", "step_timeout_s")


def check_settings(settings: Settings) -> None:
    """Refuse what can never work.

    Raises:
        ValueError: names the flag.
    """
    for name in AT_LEAST_ONE:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if any(not key or key != key.strip() for key in settings.api_key):
        raise ValueError("--api-key must not be empty, nor begin or end with white space")
    if settings.kv_cache_dtype == "fp8_e5m2":
        raise ValueError(
            "--kv-cache-dtype fp8_e5m2 is not supported: two bits of mantissa cost more accuracy than its range "
            "gains; take fp8, which is e4m3 with scales for each layer"
        )
    if settings.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {settings.kv_cache_dtype} is not supported; there are {', '.join(KV_CACHE_DTYPES)}"
        )
    for name in NOT_NEGATIVE:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {value}")
    if settings.stuck_timeout and not 5.0 <= settings.stuck_timeout < math.inf:
        raise ValueError(f"--stuck-timeout must be 0 (never) or at least 5, got {settings.stuck_timeout}")
    if not 0.0 < settings.gpu_memory_utilization <= 1.0:
        raise ValueError(f"--gpu-memory-utilization must be in (0, 1], got {settings.gpu_memory_utilization}")
    if settings.target_itl_ms is not None and not 0.0 <= settings.target_itl_ms < math.inf:
        raise ValueError(f"--target-itl-ms must be 0 or more, got {settings.target_itl_ms}")
    for name in ABOVE_ZERO:
        if not 0.0 < getattr(settings, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(settings, name)}")
    if settings.preemption_mode == "swap" and not settings.swap_space:
        raise ValueError("--preemption-mode swap needs host memory to swap to: give --swap-space as well")
    if not 0.0 <= settings.watermark < 1.0:
        raise ValueError(f"--watermark must be in [0, 1), got {settings.watermark}")
    if not 0 <= settings.port < 65536:
        raise ValueError(f"--port must be in 0..65535, got {settings.port}")
