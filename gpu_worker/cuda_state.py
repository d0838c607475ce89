"""The slots on a GPU: one copy brings all that a step changes, and kernels put it in its place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.host_copies import Staging
from gpu_worker.host_slots import HostSlots
from gpu_worker.kernels.state_kernels import append_blocks, scatter_new
from gpu_worker.shared_prefix import SharedPrefixes
from shared.messages import Step

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class CudaState(HostSlots):
    """Tensors by slot, and one row more, the padding slot, which is always empty.

    Attributes:
        token_ids: [slots + 1, max_model_len] int32.
        num_tokens: [slots + 1] int32.
        prompt_len: [slots + 1] int32.
        limit: [slots + 1] int32.
        block_tables: [slots + 1, max_blocks] int32; 0 is the null block.
        block_counts: [slots] int64 on the host, blocks in each table.
        prefixes: int32, ``shared_prefix.pack`` of the decode rows that have groups; empty if nobody looks for any.

    Args:
        shared: looks for decode rows that begin alike; None: nobody does.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        shared: SharedPrefixes | None = None,
    ) -> None:
        super().__init__(num_slots, max_model_len)
        self.device, self.shared = device, shared
        self.padding_slot = num_slots
        self.max_blocks = -(-max_model_len // block_size)
        rows = num_slots + 1
        self.token_ids = torch.zeros(rows, max_model_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(rows, self.max_blocks, dtype=torch.int32, device=device)
        self.num_tokens, self.prompt_len, self.limit = torch.zeros(3, rows, dtype=torch.int32, device=device)
        self.block_counts: Int64 = np.zeros(num_slots, np.int64)
        self._host_tables: Int32 = np.zeros((num_slots, self.max_blocks), np.int32)
        self._requests: Int64 = np.zeros(num_slots, np.int64)
        """That each slot has held."""
        self.prefixes = torch.zeros(sum(shared.layout.sizes) if shared else 0, dtype=torch.int32, device=device)
        self.staging = Staging(device)

    def reset(self) -> None:
        """Forget all requests; addresses stay."""
        super().__init__(self.num_slots, self.max_model_len)
        self.block_counts[:] = 0
        if self.shared:
            self.shared.reset()
        for tensor in (self.block_tables, self.num_tokens, self.prompt_len, self.limit):
            tensor.zero_()

    def padded(self, slots: Int32, rows: int) -> Int32:
        """[rows] ``slots``, then the padding slot."""
        padded = np.full(rows, self.padding_slot, np.int32)
        padded[: len(slots)] = slots
        return padded

    @property
    def has_groups(self) -> bool:
        """Decode rows of the step that was entered last begin alike, as ``prefixes`` says."""
        return self.shared is not None and bool(self.shared.groups)

    def update(self, step: Step, *arrays: Int32) -> list[torch.Tensor]:
        """Enter what a step changes: slots taken, blocks appended, common beginnings of the decode rows. Returns
        ``arrays``, int32 on the device, which were brought along."""
        self.release(step.released.astype(np.int64))
        self.block_counts[step.released] = 0
        requests, longest = self._enter(step)
        requests_there, tokens, blocks, prefixes, *staged = self.staging.copy(
            requests, step.new_tokens, self._blocks(step), self._prefixes(step), *arrays
        )
        if len(prefixes):
            self.prefixes.copy_(prefixes)
        scatter_new(requests_there, tokens, longest, self.token_ids, self.num_tokens, self.prompt_len, self.limit)
        append_blocks(blocks, self.block_tables)
        return staged

    def _enter(self, step: Step) -> tuple[Int32, int]:
        """[new, 5] as ``scatter_new`` wants it, and the most tokens of one request."""
        if not step.new:
            return np.empty((0, 5), np.int32), 0
        slots, lengths = self.enter(step.new)
        self._requests[slots] += 1
        offsets = np.cumsum(lengths) - lengths
        columns = (slots, offsets, lengths, self.host_prompt[slots], self.host_limit[slots])
        return np.stack(columns, 1).astype(np.int32), int(lengths.max())

    def _blocks(self, step: Step) -> Int32:
        """[blocks, 3] as ``append_blocks`` wants it; the blocks of a slot come in their order."""
        slots = step.blocks[:, 0]
        if not len(slots):
            return np.empty((0, 3), np.int32)
        order = np.argsort(slots, kind="stable")
        ranked = slots[order]
        first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
        within = np.arange(len(ranked)) - np.repeat(first, np.diff(np.r_[first, len(ranked)]))
        entries = np.stack([ranked, self.block_counts[ranked] + within, step.blocks[order, 1]], 1).astype(np.int32)
        np.add.at(self.block_counts, slots, 1)
        self._host_tables[entries[:, 0], entries[:, 1]] = entries[:, 2]
        return entries

    def _prefixes(self, step: Step) -> Int32:
        """``prefixes``, if the step changes them."""
        if self.shared is None:
            return np.empty(0, np.int32)
        return self.shared.update(step.decode, self._requests, self.host_tokens, self._host_tables)


def forward_rows(step: Step) -> tuple[Int32, Int32]:
    """The rows of a step, prefills first: [rows, 4] slot, start (-1: its newest token), count, first token; and for
    each sample row the token whose logits it wants."""
    counts = np.concatenate([step.prefill[:, 2], np.ones(len(step.decode), np.int32)])
    ends = np.cumsum(counts)
    slots = np.concatenate([step.prefill[:, 0], step.decode])
    starts = np.concatenate([step.prefill[:, 1], np.full(len(step.decode), -1, np.int32)])
    spans = np.stack([slots, starts, counts, ends - counts], 1).astype(np.int32)
    return spans, (ends[step.sample[:, 0]] - 1).astype(np.int32)
