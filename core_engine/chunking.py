"""How many tokens of a prompt a step takes, so that those who decode beside it get their next token in time."""

from __future__ import annotations

import dataclasses
import math

from core_engine.step_time import CPU_COSTS, GPU_COSTS, KNEE, MOST_FACTOR, StepCosts, StepTimeModel
from shared.step_shapes import padded_rows, padded_total, whole_total

HEADROOM = 0.91
"""Share of the target that a step is planned for; the rest is the model's error and the way to the reader. On a GPU
steps that are alike differ by 3 %, and the slowest of a hundred takes 9 % more than predicted. Steps that are shorter
by 3 % make a prompt slower by 0.6 %."""
LEAST_CHUNK = 64
"""On a GPU a prompt gets on by this much in each step, even where the decode rows alone break the target."""
MULTIPLE = 6.0
"""A step of this many times its fixed cost, mostly reading the weights, wastes little on it: the shortest target that
is set without being asked for."""
SIZES_TRIED = 3
"""Sizes above the wanted one of which one may be computed in less time."""
GROWTH = 2
"""A step holds at most this many times the tokens of the largest one that was timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkTarget:
    """Time between two tokens of a sequence that chunks have to keep, and what to begin with."""

    seconds: float
    prior: StepCosts
    first_chunk: int
    """Most prefill tokens beside decode rows before any step was timed."""
    pads_steps: bool = False
    """The worker pads steps as ``shared.step_shapes`` says."""
    least_chunk: int = LEAST_CHUNK
    multiple: float = 0.0
    """The target is at least this many times the fixed cost of a step."""

    @classmethod
    def on(cls, device: str, seconds: float, *, is_default: bool = False) -> ChunkTarget:
        """For a kind of device: ``cpu``, or any other for a GPU. A default gives way to models that are slow."""
        multiple = MULTIPLE if is_default else 0.0
        if device.startswith("cpu"):
            return cls(seconds=seconds, prior=CPU_COSTS, first_chunk=32, least_chunk=16, multiple=multiple)
        return cls(seconds=seconds, prior=GPU_COSTS, first_chunk=512, pads_steps=True, multiple=multiple)


class ChunkLimit:
    """The prefill tokens of one step with decode rows, chunk by chunk.

    A worker computes its steps one after another without a pause, so that the gap that a reader sees is the time of
    one step, however many are in flight. Those are planned before the steps in front of them were timed: what the
    model learns takes effect ``steps_in_flight`` steps later.

    Args:
        num_decodes: decode rows of the step.
        context: tokens that they attend to, all together.
        num_prompts: that want to be computed, in this step or later.
    """

    def __init__(
        self, target: ChunkTarget, model: StepTimeModel, *, num_decodes: int, context: int, num_prompts: int
    ) -> None:
        self.least_chunk = target.least_chunk
        self._rows = padded_rows(num_decodes) if target.pads_steps else None
        """What the decode rows are padded to; None: steps are not padded."""
        self._costs, self._factor = model.costs, model.factor
        self._seconds = HEADROOM * max(target.seconds, target.multiple * self._costs.step)
        self._base = self._costs.step + self._costs.context * context
        self._num_decodes = num_decodes
        self._is_alone = num_prompts == 1
        self._pairs = 0.0
        self._most = max(target.first_chunk, GROWTH * model.most_tokens - num_decodes)
        self.num_tokens = 0
        """Prefill tokens that were taken."""

    @property
    def is_open(self) -> bool:
        """Whether one more prompt may take a chunk: the first always, others if there is time for it."""
        return self.num_tokens == 0 or self.room(0) >= self.least_chunk

    @property
    def predicted_s(self) -> float:
        """Time of the step with all that was taken."""
        return self._seconds_with(0, 0)

    def room(self, start: int) -> int:
        """Tokens that a chunk from position ``start`` on may have, by time and growth."""
        return max(0, min(self._most - self.num_tokens, self._in_time(start)))

    def _in_time(self, start: int) -> int:
        """Largest chunk from ``start`` on that keeps the target."""
        if self._rows is None:
            return self._within(self._seconds, start)
        # A factor belongs to the size that comes out: the largest size that holds what fits by its own factor.
        taken = self._rows + self.num_tokens
        total = padded_total(taken + self._within(MOST_FACTOR * self._seconds, start))
        while total > taken:
            smaller = whole_total(total - 1)
            count = min(self._within(self._seconds / self._factor(total), start), total - taken)
            if count > smaller - taken:
                return count
            total = smaller
        return 0

    def take(self, start: int, missing: int, budget: int) -> int:
        """Take a chunk from position ``start`` of a prompt that lacks ``missing`` tokens.

        What does not fit one step is cut into chunks of equal time, so that the last one is no small remainder; if
        other prompts wait these fill its step up, and each chunk is as large as it can be.

        Args:
            budget: tokens at most; at least 1.

        Returns:
            Its tokens: ``missing`` or ``budget`` if that fits, and never fewer than ``least_chunk`` of these.
        """
        most = min(budget, self.room(start))
        if missing <= most:
            count = missing
        else:
            count = min(most, self._even(start, missing, most)) if self._is_alone else most
            count = self._rounded(start, count, most)
        count = min(max(count, self.least_chunk), missing, budget)
        self.add(start, count)
        return count

    def add(self, start: int, count: int) -> None:
        """Count a chunk that was taken whole."""
        self.num_tokens += count
        self._pairs += count * (start + count / 2)

    def _even(self, start: int, missing: int, most: int) -> int:
        """Tokens of the first of several chunks that take equally long."""
        costs, steep = self._costs, self._lines()[1]
        time = self._seconds - steep
        if time <= 0.0 or most == 0:
            return 0
        work = (costs.token + costs.more_token) * missing + costs.pair * missing * (start + missing / 2)
        num_chunks = max(math.ceil(work / time), math.ceil(missing / most))
        return self._within(steep + work / num_chunks, start)

    def _rounded(self, start: int, count: int, most: int) -> int:
        """``count``, or a little more or less, so that the step gets a size that is computed well."""
        if self._rows is None:
            return count
        taken = self._rows + self.num_tokens
        total = padded_total(taken + count)
        for _ in range(SIZES_TRIED):
            if total - taken <= most and self._seconds_with(start, total - taken) <= self._seconds:
                return total - taken
            total = padded_total(total + 1)
        total = whole_total(taken + count)
        while total > taken and self._seconds_with(start, total - taken) > self._seconds:
            total = whole_total(total - 1)
        return max(total - taken, 0)

    def _seconds_with(self, start: int, count: int) -> float:
        """Predicted time of the step with a chunk of ``count`` tokens more."""
        return max(self._lines(start, count)) * self._factor(self._num_decodes + self.num_tokens + count)

    def _lines(self, start: int = 0, count: int = 0) -> tuple[float, float]:
        """Both lines of the model with a chunk of ``count`` tokens more; the step takes the longer time."""
        costs, tokens = self._costs, self._num_decodes + self.num_tokens + count
        pairs = self._pairs + count * (start + count / 2)
        flat = self._base + costs.token * tokens + costs.pair * pairs
        return flat, flat + costs.more_token * (tokens - KNEE)

    def _within(self, seconds: float, start: int) -> int:
        """Largest chunk from ``start`` on that keeps the step within ``seconds``."""
        costs, (flat, steep) = self._costs, self._lines()
        fewer = _root(costs.pair, costs.token + costs.pair * start, seconds - flat)
        more = _root(costs.pair, costs.token + costs.more_token + costs.pair * start, seconds - steep)
        return int(min(fewer, more, self._most))


def _root(square: float, linear: float, value: float) -> float:
    """The x ≥ 0 with square / 2 * x² + linear * x = value; 0 where value is negative."""
    if value <= 0.0:
        return 0.0
    denominator = linear + math.sqrt(linear * linear + 2.0 * square * value)
    return 2.0 * value / denominator if denominator > 0.0 else math.inf
