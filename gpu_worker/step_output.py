"""What a runner is to the worker, and what a step gives back."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.attention.base import PagedAttention
from gpu_worker.host_pool import HostPool
from gpu_worker.kv_cache import KVCache
from gpu_worker.models.base import CausalLM
from shared.messages import Step
from shared.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed, on the host; as in ``StepResult``."""

    tokens: npt.NDArray[np.int32]
    logprobs: list[tuple[int, bytes]]
    prompt_logprobs: list[tuple[int, list[bytes]]]
    compute_s: float
    """Time that the step took on the device."""
    idle_s: float = 0.0
    """Time between the step before and this one in which the device computed nothing; as far as it is known."""
    transferred: int = 0
    """All transfers of steps up to this number are complete."""


class Launched(Protocol):
    """A step that runs, or has run, on the device."""

    @property
    def number(self) -> int: ...

    def wait(self) -> StepOutput:
        """Wait for the device. Called by the result thread."""


class Runner(Protocol):
    """A model on a device, with the slots of its requests."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def model(self) -> CausalLM: ...

    @property
    def backend(self) -> PagedAttention: ...

    @property
    def cache(self) -> KVCache: ...

    @property
    def host_pool(self) -> HostPool | None: ...

    @property
    def device(self) -> torch.device: ...

    def launch(self, step: Step) -> Launched:
        """Run a step, without waiting for it.

        Raises:
            StepError: an index in the step is out of range; nothing was changed.
        """

    def prepare(self) -> bool:
        """Do a little that makes later steps faster, in an idle moment; returns whether there is more to do."""

    def reset(self) -> None:
        """Forget all requests."""
