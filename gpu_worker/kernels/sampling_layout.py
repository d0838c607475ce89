"""What the sampling kernels know about a slot: one record of int32 words, and lists in an arena.

The record ``[slots, RECORD]`` holds words by the names below; floats are bit patterns. A record of zeros means greedy
without any feature. The lists of a slot lie one after another in one block of the arena:

    allowed    [ceil(vocab / 32)]   bit i % 32 of word i // 32: id i may be sampled; not there without the flag
    words      [words, longest]     bad words without their last ids, ``ANY`` to the left of shorter ones
    last       [words]              their last ids
    ends       [ends]               ids masked until min_tokens are generated
    bias_ids   [biases]
    biases     [biases]             float32
    saved      [max(words, ends)]   logits that a kernel may have to put back

The arena is found through its address in memory of fixed place, so that it can grow under captured graphs.
"""

from __future__ import annotations

import triton.language as tl

RECORD = 32
"""Words of a record."""

FLAGS = tl.constexpr(0)
SCALE = tl.constexpr(1)
"""1 / temperature."""
TOP_K_COUNT = tl.constexpr(2)
TOP_P_SUM = tl.constexpr(3)
MIN_P_OFFSET = tl.constexpr(4)
"""temperature * log(min_p): what a logit may be below the largest one."""
REPETITION_FACTOR = tl.constexpr(5)
FREQUENCY_COST = tl.constexpr(6)
PRESENCE_COST = tl.constexpr(7)
MIN_TOKENS_COUNT = tl.constexpr(8)
LOGPROBS_COUNT = tl.constexpr(9)
KEY_LOW = tl.constexpr(10)
"""Half of what the noise of the slot is made from (``noise.request_keys``)."""
KEY_HIGH = tl.constexpr(11)
LISTS = tl.constexpr(12)
"""Where the slot's lists begin in the arena, in words."""
ALLOWED_COUNT = tl.constexpr(13)
WORDS_COUNT = tl.constexpr(14)
WORDS_LONGEST = tl.constexpr(15)
ENDS_COUNT = tl.constexpr(16)
BIASES_COUNT = tl.constexpr(17)

DRAWN = tl.constexpr(1)
"""Not greedy."""
ALLOWED = tl.constexpr(2)
BAD_WORDS = tl.constexpr(4)
MIN_TOKENS = tl.constexpr(8)
LOGIT_BIAS = tl.constexpr(16)
REPETITION = tl.constexpr(32)
OUTPUT_PENALTY = tl.constexpr(64)
"""Frequency or presence penalty."""
TOP_K = tl.constexpr(128)
TOP_P = tl.constexpr(256)
MIN_P = tl.constexpr(512)
LOGPROBS = tl.constexpr(1024)

PENALTIES = tl.constexpr(32 + 64)
CHANGED = tl.constexpr(2 + 4 + 8 + 16 + 32 + 64)
"""Features that change single logits before the draw."""
CUT = tl.constexpr(128 + 256 + 512)
"""Features that leave only the most probable tokens."""

ANY = tl.constexpr(-1)
"""In ``words``: equals every token."""

MOST_LOGPROBS = 32
RESULT = 1 + 2 * (MOST_LOGPROBS + 1)
"""Words of a row's log-probabilities: rank, ids [33], float32 log-probabilities [33]; the sampled token comes first."""
