"""How long a step will take: a few costs, fitted while the engine runs to what its steps took.

    seconds = step + token * tokens + more_token * max(tokens - KNEE, 0)      weights and products
            + context * decode context + pair * prefill pairs                 attention

A product takes the longer of reading the weights and doing the arithmetic; two lines are close to that at few tokens
and at many. All costs stay at or above zero, so that more work never looks faster.

How well a device computes a number of tokens goes up and down with it, by a tenth on a GPU, as its tiles fill the last
round of multiprocessors or not. What steps of a size take beyond the lines is remembered by size, as a factor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

KNEE = 256
"""Tokens at which the second line of the products begins; arithmetic outweighs reading from about 200 on an H200."""
PREFILL_MEMORY, DECODE_MEMORY = 0.97, 0.99
"""What is left of the weight of an observation after the next one of its kind: about 33 and 100 of them count."""
DECODE_WEIGHT = 0.2
"""Of a decode step beside a step with prefills, whose time is what has to be predicted."""
MOST_SURPRISE = 4.0
"""A step counts as at least the predicted time over this, so that one odd clock does not outweigh all others."""
SIZE = 128
"""Tokens of one of the sizes that have a factor."""
NUM_SIZES = 64
"""Larger steps have none."""
FACTOR_RATE, FACTOR_MEMORY = 0.5, 0.995
"""How far a factor moves to what is observed, and what is left of its difference from 1 after a step of another size:
a size that was slow once is tried again."""
MOST_FACTOR = 1.25
"""A factor is between this and its inverse."""
LEAST_STEPS = 8
"""Steps with prefills that are observed before there are factors; the lines come first."""
SHAPE_WEIGHT, SCALE_WEIGHT = 0.002, 0.01
"""Of the prior's proportions and of its scale, beside 1 for each step with prefills."""


class StepLoad(NamedTuple):
    """What a step computes."""

    tokens: int
    """Prefill and decode rows."""
    context: int
    """Tokens that the decode rows attend to, all rows together."""
    pairs: float
    """Query-key pairs of the prefill chunks: start * count + count² / 2 of each."""
    is_prefill: bool


class StepCosts(NamedTuple):
    """Seconds."""

    step: float
    token: float
    more_token: float
    """Of each token beyond ``KNEE``, on top of ``token``."""
    context: float
    pair: float

    def of(self, load: StepLoad) -> float:
        """Seconds of a step."""
        products = self.step + self.token * load.tokens + self.more_token * max(load.tokens - KNEE, 0)
        return products + self.context * load.context + self.pair * load.pairs


NUM_COSTS = len(StepCosts._fields)
PAIRS = [(i, j) for i in range(NUM_COSTS) for j in range(i, NUM_COSTS)]
FULL = np.array([[PAIRS.index((min(i, j), max(i, j))) for j in range(NUM_COSTS)] for i in range(NUM_COSTS)])
"""[5, 5] where in ``PAIRS`` each entry of a symmetric matrix is."""
IDENTITY = np.eye(NUM_COSTS)
GPU_COSTS = StepCosts(step=4.2e-3, token=1e-5, more_token=1.2e-5, context=3.5e-8, pair=1.2e-9)
"""An 8B model in 16 bits on an H200."""
CPU_COSTS = StepCosts(step=5e-3, token=1e-3, more_token=1e-5, context=2e-6, pair=5e-7)
"""A 135M model on two cores."""


class StepTimeModel:
    """Weighted least squares with forgetting on the relative errors, over the observed steps of one worker.

    Relative errors make slow outliers harmless: a step that compiled a kernel for seconds has an error of 1 at most,
    whatever is predicted. Steps with prefills and those without are forgotten apart, or an hour of decoding would wipe
    out what a prefill costs. What observations do not tell, such as the price of a long context before there was one,
    keeps its proportion to the rest as in ``prior``, whose scale is fitted.

    Not thread-safe. An observation takes a few microseconds, and the first look at ``costs`` after it some 30.
    """

    def __init__(self, prior: StepCosts) -> None:
        self._prior = prior
        self._costs = prior
        self._prefills = _Evidence(PREFILL_MEMORY)
        self._decodes = _Evidence(DECODE_MEMORY)
        self._is_stale = False
        self._factors = np.ones(NUM_SIZES)
        self._num_prefills = 0
        self.most_tokens = 0
        """Tokens of the largest step that was observed."""

    @property
    def costs(self) -> StepCosts:
        """The fit to all that was observed."""
        if self._is_stale:
            self._is_stale = False
            self._costs = StepCosts(*(a * b for a, b in zip(self._fitted(), self._prior, strict=True)))
        return self._costs

    def factor(self, tokens: int) -> float:
        """What a step with prefills and so many tokens takes, as a multiple of what ``costs`` say."""
        size = -(-tokens // SIZE)
        return float(self._factors[size]) if size < NUM_SIZES else 1.0

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took that long on the device, without what it waited for; 0 says nothing."""
        if seconds <= 0.0:
            return
        if MOST_SURPRISE * seconds < self._costs.of(load):
            seconds = max(seconds, self.costs.of(load) / MOST_SURPRISE)
        prior, tokens = self._prior, load.tokens
        parts = [
            prior.step / seconds,
            prior.token * tokens / seconds,
            prior.more_token * max(tokens - KNEE, 0) / seconds,
            prior.context * load.context / seconds,
            prior.pair * load.pairs / seconds,
        ]
        if load.is_prefill:
            self._note_size(load, seconds)
        (self._prefills if load.is_prefill else self._decodes).add(parts)
        self.most_tokens = max(self.most_tokens, tokens)
        self._is_stale = True

    def _note_size(self, load: StepLoad, seconds: float) -> None:
        self._num_prefills += 1
        size = -(-load.tokens // SIZE)
        if self._num_prefills <= LEAST_STEPS or size >= NUM_SIZES:
            return
        before = self._factors[size]
        self._factors += (1.0 - FACTOR_MEMORY) * (1.0 - self._factors)
        ratio = min(max(seconds / self._costs.of(load), 1.0 / MOST_FACTOR), MOST_FACTOR)
        self._factors[size] = before + FACTOR_RATE * (ratio - before)

    def _fitted(self) -> list[float]:
        """The costs as multiples of the prior's: least squares, and close to one common factor."""
        pairs = [a + DECODE_WEIGHT * b for a, b in zip(self._prefills.matrix, self._decodes.matrix, strict=True)]
        sides = [a + DECODE_WEIGHT * b for a, b in zip(self._prefills.vector, self._decodes.vector, strict=True)]
        matrix, vector = np.array(pairs)[FULL], np.array(sides)
        scale = (SCALE_WEIGHT + sum(sides)) / (SCALE_WEIGHT + float(matrix.sum()))
        matrix += SHAPE_WEIGHT / scale**2 * IDENTITY
        vector += SHAPE_WEIGHT / scale
        found: list[float] = np.linalg.solve(matrix, vector).tolist()
        while min(found) < 0.0:
            free = [i for i, x in enumerate(found) if x > 0.0]
            found = [0.0] * NUM_COSTS
            for i, x in zip(free, np.linalg.solve(matrix[np.ix_(free, free)], vector[free]).tolist(), strict=True):
                found[i] = x
        return found


class _Evidence:
    """Normal equations of observations of one kind, the older the lighter."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.matrix = [0.0] * len(PAIRS)
        """Its upper half, in the order of ``PAIRS``."""
        self.vector = [0.0] * NUM_COSTS

    def add(self, parts: list[float]) -> None:
        """``parts``: what each cost is of the observed time, by the prior."""
        memory = self._memory
        self.matrix = [memory * m + parts[i] * parts[j] for m, (i, j) in zip(self.matrix, PAIRS, strict=True)]
        self.vector = [memory * v + part for v, part in zip(self.vector, parts, strict=True)]
