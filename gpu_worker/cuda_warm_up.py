"""What comes before the first request on a GPU: kernels compiled and loaded, memory measured, common graphs captured.

The steps here are steps of the engine with requests of zeros. Those that run write to the null block alone, which
nobody reads. The runner forgets them afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from gpu_worker.cuda_mixed import MAX_TOKENS
from gpu_worker.cuda_runner import CudaRunner
from gpu_worker.cuda_transfers import rehearse_transfers
from gpu_worker.kernels.compile_ahead import compiled_ahead
from gpu_worker.layers.gemm_choice import BUCKETS
from gpu_worker.threads import usable_cores
from shared.logging import get_logger
from shared.messages import Epoch, SlotInit, Step
from shared.sampling import SamplingParams
from shared.step_shapes import ROWS, padded_totals

log = get_logger()

PLAIN = SamplingParams(temperature=0.0)
FULL = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, logprobs=1)
"""Asks for all kernels of the sampler."""


class Rows(NamedTuple):
    """What a step computes."""

    decode: int = 0
    prefill: int = 0
    """Tokens."""
    common: int = 0
    """Tokens at the beginning of all decode rows."""
    params: SamplingParams = PLAIN


COMPILED_PREFILLS = tuple(total - ROWS[0] for total in padded_totals(0, MAX_TOKENS + 128))
"""With the decode rows that are added: all sizes of steps in graphs with up to 128 decode rows. cuBLAS loads a kernel
when it takes it first, and a step that waits for that is late."""
CAPTURED = (Rows(decode=1), Rows(prefill=COMPILED_PREFILLS[0]), Rows(decode=2), Rows(decode=4), Rows(decode=8))
"""Steps whose graphs are captured before the first request, the commonest first; others when they are needed."""
CAPTURE_S = 1.5
"""No further graph is begun after so long."""


def compile_kernels(runner: CudaRunner, max_num_batched_tokens: int, with_transfers: bool = False) -> None:
    """Compile and load what steps of all kinds launch; the model's weights may still be on their way.

    Args:
        with_transfers: there will be a pool in host memory.
    """
    slots = runner.num_slots
    kinds = [
        Rows(prefill=max_num_batched_tokens),
        *(Rows(decode=rows) for rows in BUCKETS if rows <= slots),
        *(Rows(prefill=tokens) for tokens in COMPILED_PREFILLS if tokens <= max_num_batched_tokens),
        *(Rows(decode=rows, params=FULL) for rows in (1, 8, 64) if rows <= slots),
        *(
            Rows(decode=rows, common=tokens)
            for rows, tokens in ((8, 2048), (64, 1024))
            if rows <= slots and tokens + 2 <= runner.max_model_len
        ),
    ]
    try:
        with compiled_ahead(usable_cores()):
            runner.rehearse(_steps(runner, kinds))
            if with_transfers:
                rehearse_transfers(runner.cache)
    except Exception:
        # The steps that are run next say what is wrong, if anything is.
        log.warning("compiling kernels ahead failed; each is compiled when it is first needed", exc_info=True)


def peak_of_a_step(runner: CudaRunner, max_num_batched_tokens: int) -> int:
    """Bytes that the largest step allocates, and drops."""
    (step,) = _steps(runner, [Rows(prefill=max_num_batched_tokens)])
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.launch(step).wait()
    peak = torch.cuda.max_memory_allocated(runner.device) - before
    runner.reset()
    torch.cuda.empty_cache()
    return peak


def capture_graphs(runner: CudaRunner) -> None:
    """Capture the commonest graphs, as far as the time allows: a step's first time is without one."""
    end = time.monotonic() + CAPTURE_S
    kinds = [rows for rows in CAPTURED if rows.decode <= runner.num_slots for _ in range(2)]
    for step in _steps(runner, kinds):
        if time.monotonic() > end:
            break
        runner.launch(step).wait()
    runner.reset()


def _steps(runner: CudaRunner, kinds: Iterable[Rows]) -> Iterator[Step]:
    """A step of each kind, for a runner without requests; each releases the slots of the one before."""
    longest = runner.max_model_len - 1
    taken = np.empty(0, np.int32)
    for rows in kinds:
        length = min(rows.prefill, longest)
        prompts = min(-(-rows.prefill // length), runner.num_slots) if length else 0
        lengths = np.array([length] * prompts + [rows.common + 1] * rows.decode, np.int32)
        slots = np.arange(len(lengths), dtype=np.int32)
        # Of block 1, whatever it holds.
        blocks = -(-(rows.common + 1) // runner.block_size) if rows.common else 0
        new = [
            SlotInit(slot, "", 0, known, known, 0, known + 1, rows.params, [])
            for slot, known in zip(slots.tolist(), lengths.tolist(), strict=True)
        ]
        yield Step(
            epoch=Epoch(0, 0),
            number=0,
            new=new,
            new_tokens=np.zeros(int(lengths.sum()), np.int32),
            prefill=np.stack([slots, np.zeros_like(slots), lengths], 1)[:prompts],
            decode=slots[prompts:],
            sample=np.stack([slots, slots], 1),
            blocks=np.stack([np.repeat(slots[prompts:], blocks), np.ones(rows.decode * blocks, np.int32)], 1),
            released=taken,
            copies=np.empty((0, 2), np.int32),
            transfers=np.empty((0, 3), np.int32),
        )
        taken = slots
