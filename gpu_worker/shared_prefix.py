"""Which decode rows begin with the same blocks of the KV cache, and how one pass over those blocks serves them all.

Requests with one system prompt share its blocks through the prefix cache. A *group* is rows whose tables begin alike;
its common tokens are read once for all its rows, up to ``tile_rows`` at a time (a *task*), instead of once for each.
What follows them is read row by row.

    row 0   |==== common ====|-- own --|
    row 1   |==== common ====|--- own ---|      one group: one or more tasks
    row 2   |==== common ====|- own -|
    row 3   |-------- own --------|

All tasks are laid end to end in tiles of tokens, and each of P programs takes an equal run of them, as in
``kernels.attention_plan``. That happens here, on the host, when the rows of a step change; the lengths of contexts do
not matter. The device finds it in one array of a fixed size, so that a CUDA graph serves all groups.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MAX_GROUPS = 32
"""Of a step: those that save most."""
MAX_SPLITS = 16
"""Programs that share a task, about: each one leaves results of all its rows, which somebody has to read."""
LEAST_TILES = 2
"""Of a program: fewer are read in less time than a program takes to begin and to end."""
MAX_NESTING = 8
"""Depth at which a smaller group within a group is still looked for."""
WORTHWHILE_BYTES = 32 << 20
"""Of a layer, to be read once less: about 8 µs of a GPU's memory, twice what another launch and the merge take."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharingLimits:
    """When a pass over common tokens is worth while."""

    members: int = 4
    """Rows of a group at least: a tensor core's tile is mostly empty with fewer."""
    tokens: int = 512
    """That a group has in common at least: fewer are soon read again."""
    saved: int = 8192
    """Tokens that all groups of a step together save reading, at least: (members - 1) * tokens each."""


def limits_for(token_bytes: int) -> SharingLimits:
    """The limits for a model whose layers have so many bytes of keys and values for each token."""
    return SharingLimits(saved=-(-WORTHWHILE_BYTES // token_bytes))


class Group(NamedTuple):
    """Rows that begin alike."""

    rows: Int64
    """Ascending."""
    tokens: int
    """In common; each row has at least one more."""

    @property
    def saved(self) -> int:
        """Tokens that need not be read again."""
        return (len(self.rows) - 1) * self.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixLayout:
    """Sizes of the array that ``pack`` makes, and of the pass.

    It holds, in this order, int32 all:

    - programs [num_programs, 4]: first task, first tile within it, end of the tiles within the last task, tasks;
    - rows [num_rows, 4]: tokens of the row that the pass reads (0: none), number of the first partial result, partial
      results, place of the row in its task;
    - tasks [num_tasks, 2 + tile_rows]: slot whose block table is read, tiles, rows of the step (-1: nobody).

    Program p leaves its partial result of task t as number p + t: each step from one pair to the next raises one of the
    two, so the numbers are distinct, and those of a task follow one another.
    """

    num_programs: int
    """P, for each KV head."""
    num_rows: int
    """Decode rows of a step at most."""
    tile_rows: int
    """Rows of a task."""
    tile_tokens: int
    """Common tokens of a tile."""
    granule: int
    """What the number of common tokens is a multiple of: ``tile_tokens`` and the tiles of the pass over the rest."""

    @property
    def num_tasks(self) -> int:
        return -(-self.num_rows // self.tile_rows) + MAX_GROUPS

    @property
    def num_partials(self) -> int:
        return self.num_programs + self.num_tasks

    @property
    def sizes(self) -> tuple[int, int, int]:
        """int32 values of the three parts."""
        return 4 * self.num_programs, 4 * self.num_rows, self.num_tasks * (2 + self.tile_rows)


class SharedPrefixes:
    """Finds the groups among a step's decode rows, again only when the rows are others than last time."""

    def __init__(self, layout: PrefixLayout, block_size: int, limits: SharingLimits) -> None:
        self.layout, self.block_size, self.limits = layout, block_size, limits
        self.reset()

    def reset(self) -> None:
        """Forget the rows of the last step."""
        self.groups: list[Group] = []
        """Of the rows last seen; none: they are not worth a pass."""
        self._seen: tuple[Int32, Int64] | None = None

    def update(self, slots: Int32, requests: Int64, lengths: Int64, tables: Int32) -> Int32:
        """Look at the decode rows of a step.

        Args:
            slots: [rows], of the decode rows.
            requests: [slots] a number that differs between the requests that a slot holds one after another.
            lengths: [slots] tokens that a slot's row sees, itself included.
            tables: [slots, max_blocks], blocks of each slot; append-only while it holds a request.

        Returns:
            [size] ``pack`` for the device, or an empty array if what is there still holds or there is no group.
        """
        nothing = np.empty(0, np.int32)
        if self._seen is not None:
            known, held = self._seen
            if np.array_equal(slots, known) and np.array_equal(requests[slots], held):
                return nothing
        self._seen = slots.copy(), requests[slots]
        self.groups = []
        if self.limits.members <= len(slots) <= self.layout.num_rows:
            self.groups = find_groups(
                tables, slots, lengths[slots] - 1, self.block_size, self.layout.granule, self.limits
            )
        return pack(self.groups, slots, self.layout) if self.groups else nothing


def find_groups(
    tables: Int32, slots: Int32, lengths: Int64, block_size: int, granule: int, limits: SharingLimits
) -> list[Group]:
    """Disjoint groups among rows, those that save most first; none if all together save too little.

    Rows with the same first block are one group, or several with more in common each, whatever saves more.

    Args:
        tables: [slots, max_blocks].
        slots: [rows] of ``tables``.
        lengths: [rows] tokens that may be in common with others.
        granule: what the number of common tokens is a multiple of.
    """
    usable = lengths // granule * granule
    long = np.flatnonzero(usable >= limits.tokens)
    _, first, counts = np.unique(tables[slots[long], 0], return_inverse=True, return_counts=True)
    groups = []
    for index in np.flatnonzero(counts >= limits.members):
        rows = long[first == index]
        blocks = -(-usable[rows] // block_size)
        column = np.arange(blocks.max())
        # A row whose context ends has nothing in common with those that go on.
        is_beyond = column >= blocks[:, None]
        order, common = _sorted_prefixes(np.where(is_beyond, -1 - rows[:, None], tables[slots[rows], : len(column)]))
        rows = rows[order]
        tokens = np.minimum(common * block_size, np.minimum(usable[rows[1:]], usable[rows[:-1]]))
        groups += _best_split(rows, tokens // granule * granule, limits, MAX_NESTING)
    groups.sort(key=lambda group: -group.saved)
    groups = groups[:MAX_GROUPS]
    return groups if sum(group.saved for group in groups) >= limits.saved else []


def _sorted_prefixes(tables: Int64) -> tuple[Int64, Int64]:
    """An order in which rows with a common prefix are neighbours, and the entries that each shares with the next."""
    as_bytes = np.ascontiguousarray(tables).view(np.dtype((np.void, tables.itemsize * tables.shape[1]))).reshape(-1)
    order = np.argsort(as_bytes, kind="stable")
    ranked = tables[order]
    differs = ranked[1:] != ranked[:-1]
    return order, np.where(differs.any(1), differs.argmax(1), tables.shape[1])


def _best_split(rows: Int64, tokens: Int64, limits: SharingLimits, nesting: int) -> list[Group]:
    """The groups among sorted rows that save most: all of them, or the best ones of each part that has more in common.

    Args:
        tokens: [rows - 1] that each row has in common with the next.
    """
    if len(rows) < max(limits.members, 2):
        return []
    least = int(tokens.min())
    whole = Group(np.sort(rows), least)
    parts: list[Group] = []
    if nesting and least < int(tokens.max()):
        ends = np.flatnonzero(tokens == least) + 1
        for begin, end in zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True):
            parts += _best_split(rows[begin:end], tokens[begin : end - 1], limits, nesting - 1)
    is_worth = least >= max(limits.tokens, 1) and whole.saved >= sum(part.saved for part in parts)
    return [whole] if is_worth else parts


def pack(groups: list[Group], slots: Int32, layout: PrefixLayout) -> Int32:
    """The array that the device reads.

    Args:
        groups: at least one; disjoint.
        slots: [rows] of the step.
    """
    tile_rows = layout.tile_rows
    tasks = np.full((layout.num_tasks, 2 + tile_rows), -1, np.int32)
    rows = np.zeros((layout.num_rows, 4), np.int32)
    owner = np.zeros(layout.num_rows, np.int64)
    count = 0
    for group in groups:
        index = np.arange(len(group.rows))
        task, place = count + index // tile_rows, index % tile_rows
        count = int(task[-1]) + 1
        tasks[task, 0], tasks[task, 1] = slots[group.rows[0]], group.tokens // layout.tile_tokens
        tasks[task, 2 + place] = group.rows
        rows[group.rows, 0], rows[group.rows, 3], owner[group.rows] = group.tokens, place, task
    programs, first, parts = _divide(tasks[:count, 1].astype(np.int64), layout.num_programs)
    members = np.concatenate([group.rows for group in groups])
    rows[members, 1], rows[members, 2] = first[owner[members]], parts[owner[members]]
    return np.concatenate([programs.reshape(-1), rows.reshape(-1), tasks.reshape(-1)])


def _divide(tiles: Int64, num_programs: int) -> tuple[Int32, Int64, Int64]:
    """Give each program an equal run of all tasks' tiles.

    Args:
        tiles: [tasks].

    Returns:
        The programs of ``PrefixLayout``; and for each task the number of its first partial result, and how many it has.
    """
    ends = np.cumsum(tiles)
    starts = ends - tiles
    total = int(ends[-1])
    busy = min(num_programs, MAX_SPLITS * len(tiles), -(-total // LEAST_TILES))
    bounds = np.arange(busy + 1) * total // busy
    begins, stops = bounds[:-1], bounds[1:]
    task = np.searchsorted(ends, begins, "right")
    last = np.searchsorted(ends, stops, "left")
    programs = np.zeros((num_programs, 4), np.int32)
    programs[:busy] = np.stack([task, begins - starts[task], stops - starts[last], last - task + 1], 1)
    first_program = np.searchsorted(stops, starts, "right")
    last_program = np.searchsorted(begins, ends, "left") - 1
    return programs, first_program + np.arange(len(tiles)), last_program - first_program + 1
