"""Bad words: ``-inf`` for the last id of a sequence, where the tokens so far end in all the others.

Formula: ``transformers.NoBadWordsLogitsProcessor``, over the prompt and the output (vLLM looks at the output only, so
that a word could be completed whose first part is in the prompt). A sequence of one id is always masked. Place: vLLM's,
after the allowed ids and before everything else (``vllm/v1/sample/sampler.py``).

A row keeps at least one token: where all that is allowed would be masked, the bad words give way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.base import Int64, SampleRows
from gpu_worker.sampling.masking import mask_ids
from gpu_worker.sampling.slot_lists import SlotLists
from shared.messages import SlotInit

ANY = -1
"""Stands to the left of prefixes that are shorter than the longest one, and equals every token."""


class Words(NamedTuple):
    """The sequences of one slot."""

    prefixes: npt.NDArray[np.int32]
    """[words, longest prefix] all ids but the last."""
    last: Int64
    """[words]."""


class BadWords:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.words: SlotLists[Words, tuple[torch.Tensor, ...]] = SlotLists(self._stage)

    def add(self, request: SlotInit) -> None:
        words = request.params.bad_words_token_ids
        last = np.array([word[-1] for word in words], np.int64)
        self.words.put(request.slot, Words(left_padded([word[:-1] for word in words]), last) if words else None)

    def apply(self, logits: torch.Tensor, rows: SampleRows) -> None:
        staged = self.words.of(rows.slots)
        if staged is None:
            return
        row, slot, prefixes, last = staged
        length = prefixes.shape[1]
        places = rows.positions[row, None] + torch.arange(-length, 0, device=logits.device)
        seen = rows.token_ids[slot[:, None], places.clamp_min(0)]
        completed = ((seen == prefixes) & (places >= 0)).logical_or_(prefixes == ANY).all(-1)
        mask_ids(logits, row, last, completed)

    def _stage(self, rows: Int64, slots: Int64, parts: list[Words]) -> tuple[torch.Tensor, ...]:
        """The sequences of some rows: [words] rows, [words] slots, [words, longest prefix] prefixes, [words] last."""
        counts = [len(part.last) for part in parts]
        columns = (
            np.repeat(rows, counts),
            np.repeat(slots, counts),
            left_padded([prefix for part in parts for prefix in part.prefixes]),
            np.concatenate([part.last for part in parts]),
        )
        return tuple(torch.from_numpy(column).to(self.device) for column in columns)


def left_padded(lists: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """[lists, longest] with ``ANY`` to the left of the shorter ones."""
    padded = np.full((len(lists), max(map(len, lists))), ANY, np.int32)
    for line, ids in zip(padded, lists, strict=True):
        line[len(line) - len(ids) :] = ids
    return padded
