"""What keeps requests waiting, and when to say so: under pressure the engine tells which setting would change it.

Each plan that leaves requests waiting notes what the first of them lacked (``Replica.waits``). About once a second the
counts are read, and two things are said in words, each at most once a minute: requests were preempted because the KV
cache was full; and requests wait, no fewer than before, although not as many run as may.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_engine.core import EngineCore

LOOK_S = 1.0
SILENCE_S = 60.0
"""Between two warnings of one kind."""
PATIENCE_S = 5.0
"""A queue that is served within this time is none to speak of."""


class Wait(enum.Enum):
    """What the first request that waits was not let in for. The value is its label on the metrics page."""

    WORKER = "worker"
    SEATS = "seats"
    BLOCKS = "kv_blocks"
    RESERVE = "kv_reserve"
    WATERMARK = "watermark"
    LEAVING = "leaving"
    BUDGET = "prefill_budget"
    SHARED = "shared_prefix"
    PLACEMENT = "placement"
    SUSPECT = "suspect"
    STEP = "next_step"


MEMORY = (
    "give the cache more memory (--gpu-memory-utilization, --kv-cache-bytes, --kv-cache-dtype), or have fewer or "
    "shorter requests share it (--max-num-seqs, --max-model-len, --max-output-tokens)"
)
ADVICE = {
    Wait.SEATS: "as many seats as a beam search takes at once: raise --max-num-seqs",
    Wait.BLOCKS: f"KV blocks for its prompt: {MEMORY}",
    Wait.RESERVE: "KV blocks beside those that the running requests are expected to fill: ask for smaller max_tokens "
    f"or cap them (--max-output-tokens), or {MEMORY}",
    Wait.WATERMARK: f"KV blocks beside those that are always kept free: lower --watermark, or {MEMORY}",
    Wait.LEAVING: f"requests that have ended or were preempted to leave: {MEMORY}",
    Wait.BUDGET: "prompts that are computed before it: raise whichever is lowest of --max-num-batched-tokens, "
    "--max-prefill-tokens, --max-num-partial-prefills and --target-itl-ms; those that run then pause for longer",
    Wait.SHARED: "a prefix that it shares and that is being computed: it passes by itself; a larger "
    "--max-num-batched-tokens computes it in fewer steps",
    Wait.PLACEMENT: "the worker that would serve it soonest, or a prefix that is being computed there: add workers",
    Wait.SUSPECT: "the turn of a request that workers may be lost by, which runs alone: the log tells which workers "
    "were lost, and why",
}
"""What a request waits for, and what changes that. Without a worker, or before the first step, there is nothing to."""


def read_waits(core: EngineCore, before: Wait | None) -> Wait | None:
    """What most plans since the last call left the first one waiting for, or, during a long step, those before it.

    None: nobody waits. The counts begin anew: an engine has one reader.

    Args:
        before: what the last call gave.
    """
    found: Counter[Wait] = Counter()
    for replica in core.replicas:
        found.update(replica.waits)
        replica.waits.clear()
    if not core.waiting:
        return None
    if not core.replicas:
        return Wait.WORKER
    return max(found, key=found.__getitem__, default=before if before in ADVICE else Wait.STEP)


class Pressure:
    """Looks at an engine now and then.

    Args:
        clock: seconds of the process's running time.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._look_due = 0.0
        self._preempted = 0.0
        """Preemptions for want of memory that were told of."""
        self._swapped = 0.0
        """All whose blocks were kept in host memory, at that time."""
        self._preempted_since = clock()
        self._queue_since: float | None = None
        """Since when somebody waits although there are seats; None: nobody does."""
        self._queue_before = 0
        """How many waited then."""
        self._silent_until: dict[str, float] = {}

    def look(self) -> list[str]:
        """What there is to warn of now; call it as often as you like."""
        now = self._clock()
        if now < self._look_due:
            return []
        self._look_due = now + LOOK_S
        metrics = self._core.metrics
        metrics.waiting_for = wait = read_waits(self._core, metrics.waiting_for)
        return self._preemptions(now) + self._queue(now, wait)

    def _preemptions(self, now: float) -> list[str]:
        metrics, core = self._core.metrics, self._core
        total = metrics.preemptions.value - metrics.priority_preemptions.value
        count = int(total - self._preempted)
        if not count:
            self._preempted_since = now
        if not count or not self._may_speak("preemptions", now):
            return []
        seconds = max(now - self._preempted_since, LOOK_S)
        num_swapped = min(int(metrics.swaps.value - self._swapped), count)
        self._preempted, self._swapped, self._preempted_since = total, metrics.swaps.value, now
        usage = max((replica.kv.pool.usage for replica in core.replicas), default=0.0)
        what = "1 request was" if count == 1 else f"{count} requests were"
        return [
            f"{what} preempted in the last {seconds:.0f} s because the KV cache was full ({usage:.0%} in use now, "
            f"{self._num_active} requests run, {len(core.waiting)} wait), and {_fate(num_swapped, count)}: {MEMORY}"
        ]

    def _queue(self, now: float, wait: Wait | None) -> list[str]:
        waiting, running, most = len(self._core.waiting), self._num_active, self._most
        if wait is None or running >= most or not self._is_worth_a_word(wait):
            self._queue_since = None
            return []
        if self._queue_since is None or waiting < self._queue_before:
            self._queue_since, self._queue_before = now, waiting
        if now - self._queue_since < PATIENCE_S or not self._may_speak("queue", now):
            return []
        self._queue_before = waiting
        what = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        return [
            f"{what} although {running} of at most {most} run (--max-num-seqs); the first one waits for {ADVICE[wait]}"
        ]

    def _may_speak(self, kind: str, now: float) -> bool:
        if now < self._silent_until.get(kind, now):
            return False
        self._silent_until[kind] = now + SILENCE_S
        return True

    @property
    def _num_active(self) -> int:
        return sum(replica.num_active for replica in self._core.replicas)

    @property
    def _most(self) -> int:
        return self._core.scheduler.config.max_num_seqs * sum(not replica.leaving for replica in self._core.replicas)

    def _is_worth_a_word(self, wait: Wait) -> bool:
        """Not that a priority makes somebody leave, nor that all seats were taken until just now."""
        waiting = self._core.waiting
        if wait is Wait.SEATS:
            return next(iter(waiting)).request.num_seats > 1
        return wait in ADVICE and not (wait is Wait.LEAVING and waiting.preempts)


def _fate(num_swapped: int, count: int) -> str:
    """What becomes of preempted requests."""
    if not num_swapped:
        return "will be computed again, as far as they are not cached (--swap-space keeps them in host memory)"
    return f"{num_swapped} of them will come back from host memory" if num_swapped < count else "wait in host memory"
