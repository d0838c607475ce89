"""An engine core in front of devices that compute nothing but take as long as a formula says.

Time is simulated: steps run one after another on their device, and each is settled the moment it ends.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from core_engine.core import CoreConfig, EngineCore
from core_engine.replica import Replica
from core_engine.request import Request
from core_engine.scheduler import SchedulerConfig
from core_engine.step_time import StepLoad
from shared.messages import Epoch, Step, StepResult
from shared.sampling import SamplingParams

VOCAB = 1000
DeviceTime = Callable[[StepLoad], float]
PRODUCTS = ((1, 4.21e-3), (32, 4.43e-3), (256, 7.04e-3), (2048, 42.1e-3), (16384, 337e-3))
"""Seconds of all products of an 8B model by tokens, as measured on one H200."""


def llama_8b(load: StepLoad) -> float:
    """Seconds of a step of an 8B model on an H200: products and 8 % around them, reading the KV cache, attention of
    chunks (30 ms for a prompt of 8,192), launch and sampling."""
    tokens, seconds = zip(*PRODUCTS, strict=True)
    products = float(np.interp(load.tokens, tokens, seconds))
    return 0.5e-3 + 1.08 * products + 131_072 / 3.9e12 * load.context + 30e-3 / (8192**2 / 2) * load.pairs


@dataclasses.dataclass
class Timed:
    """One request: when it came, and when its tokens did."""

    request: Request
    arrived_at: float
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrived_at

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]


class TimedRig:
    """``submit`` requests with their times of arrival, then ``run``."""

    def __init__(
        self,
        device: DeviceTime,
        *,
        num_blocks: int = 40_000,
        num_replicas: int = 1,
        enable_prefix_caching: bool = False,
        **options: Any,
    ) -> None:
        limits: dict[str, Any] = {
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 8192,
            "max_model_len": 16384,
        } | options
        limits.setdefault("max_prefill_tokens", limits["max_num_batched_tokens"])
        scheduler = SchedulerConfig(**limits)
        config = CoreConfig(
            scheduler=scheduler,
            vocab_size=VOCAB,
            enable_prefix_caching=enable_prefix_caching,
            max_num_queued_reqs=10**6,
        )
        self.now = 0.0
        self.core = EngineCore(config, clock=lambda: self.now)
        for number in range(num_replicas):
            self.core.begin_epoch(f"w{number}", Epoch(1, number), num_blocks)
        self.replica = self.core.replicas[0]
        self.loads: list[StepLoad] = []
        self.steps: list[Step] = []
        self.seconds: list[float] = []
        self._device = device
        self._sent: dict[Replica, deque[tuple[float, float, Step]]] = {each: deque() for each in self.core.replicas}
        """Its end on the device, its time there, the step."""
        self._free_at = dict.fromkeys(self.core.replicas, 0.0)
        self._arrivals: list[tuple[float, int, Timed]] = []
        self._timed: dict[str, Timed] = {}

    def submit(self, prompt: int | npt.NDArray[np.int32], max_tokens: int, at: float = 0.0) -> Timed:
        """``prompt``: its ids, or how many there are."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        number = len(self._timed)
        if isinstance(prompt, int):
            prompt = np.full(prompt, 1, np.int32)
        request = Request(f"r{number}", params, prompt, number, at, stop_ids=frozenset(), eos_ids=())
        timed = self._timed[request.rid] = Timed(request, at)
        heapq.heappush(self._arrivals, (at, number, timed))
        return timed

    def run(self, until: float = float("inf")) -> None:
        """Until everything is done, or to a point in time."""
        while self.now < until:
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self.core.submit(heapq.heappop(self._arrivals)[2].request, {0: np.empty(0, np.int32)})
            for replica in self.core.replicas:
                while (step := self.core.plan(replica)) is not None:
                    self._launch(replica, step)
            coming = self._arrivals[0][0] if self._arrivals else float("inf")
            busy = [replica for replica in self.core.replicas if self._sent[replica]]
            first = min(busy, key=lambda replica: self._sent[replica][0][0], default=self.replica)
            ends = self._sent[first][0][0] if busy else float("inf")
            if ends == coming == float("inf"):
                return
            self.now = min(ends, coming)
            if ends <= coming:
                self._settle(first)

    def _launch(self, replica: Replica, step: Step) -> None:
        load = replica.window[-1].load
        seconds = self._device(load)
        self._free_at[replica] = max(self._free_at[replica], self.now) + seconds
        self._sent[replica].append((self._free_at[replica], seconds, step))
        self.steps.append(step)
        self.loads.append(load)
        self.seconds.append(seconds)

    def _settle(self, replica: Replica) -> None:
        _, seconds, step = self._sent[replica].popleft()
        tokens = np.ones(len(step.sample), np.int32)
        result = StepResult(step.epoch, step.number, tokens, np.empty(0, np.int32), compute_s=seconds)
        for sequence in self.core.settle(replica, result).sequences:
            self._timed[sequence.request.rid].times.append(self.now)
