"""Groups of decode rows that begin alike, and how the pass over their common tokens is divided."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.shared_prefix import (
    MAX_GROUPS,
    Group,
    Int32,
    Int64,
    PrefixLayout,
    SharedPrefixes,
    SharingLimits,
    find_groups,
    limits_for,
    pack,
)

BLOCK_SIZE, GRANULE = 16, 32
LIMITS = SharingLimits(members=2, tokens=GRANULE, saved=1)
LAYOUT = PrefixLayout(num_programs=5, num_rows=48, tile_rows=4, tile_tokens=16, granule=GRANULE)


def table_of(paths: list[list[int]], width: int = 12) -> Int32:
    """Tables that begin with these blocks and go on with blocks of their own."""
    tables = 1000 + np.arange(len(paths) * width, dtype=np.int32).reshape(-1, width)
    for row, path in enumerate(paths):
        tables[row, : len(path)] = path
    return tables


def groups_of(
    paths: list[list[int]], lengths: list[int] | None = None, limits: SharingLimits = LIMITS
) -> list[tuple[list[int], int]]:
    usable = np.array(lengths or [12 * BLOCK_SIZE - 1] * len(paths), np.int64)
    slots = np.arange(len(paths), dtype=np.int32)
    found = find_groups(table_of(paths), slots, usable, BLOCK_SIZE, GRANULE, limits)
    return [(group.rows.tolist(), group.tokens) for group in found]


def test_rows_with_the_same_first_blocks_are_a_group() -> None:
    a, b = [1, 2, 3, 4], [5, 6]
    assert groups_of([a, b, [9], a, b, a]) == [([0, 3, 5], 64), ([1, 4], 32)]


def test_common_tokens_are_whole_granules_within_every_context() -> None:
    path = [1, 2, 3, 4, 5]
    assert groups_of([path] * 3) == [([0, 1, 2], 64)]
    assert groups_of([path] * 4, [190, 63, 190, 190]) == [([0, 2, 3], 64)]
    assert groups_of([path] * 3, [63, 63, 190]) == [([0, 1, 2], 32)]


def test_a_smaller_group_within_a_group_wins_when_it_saves_more() -> None:
    system, few_shots = [1, 2], [1, 2, 3, 4, 5, 6, 7, 8]
    others = [1, 2, 13, 14, 15, 16]
    assert groups_of([few_shots, system, few_shots, few_shots]) == [([0, 2, 3], 128)]
    assert groups_of([few_shots, system, system, system, system, few_shots]) == [([0, 1, 2, 3, 4, 5], 32)]
    assert groups_of([few_shots, others, few_shots, others]) == [([0, 2], 128), ([1, 3], 96)]


def test_what_is_not_worth_a_pass_is_left() -> None:
    path = [1, 2, 3, 4]
    assert groups_of([path] * 3, limits=SharingLimits(4, 32, 1)) == []
    assert groups_of([path] * 4, limits=SharingLimits(4, 32, 192)) == [([0, 1, 2, 3], 64)]
    assert groups_of([path] * 4, limits=SharingLimits(4, 32, 193)) == []
    assert groups_of([path] * 4, limits=SharingLimits(4, 128, 1)) == []
    assert groups_of([]) == []
    assert groups_of([[1]] * 4, [1, 0, 15, 16]) == []


def test_limits_follow_from_the_size_of_a_token() -> None:
    assert limits_for(4096).saved == 8192
    assert limits_for(512).saved == 65536


@st.composite
def tables(draw: st.DrawFn) -> tuple[Int32, Int64]:
    """Rows whose tables branch off from each other anywhere, and usable lengths."""
    count, width = draw(st.integers(1, 24)), 8
    rows = [draw(st.lists(st.integers(1, 3), min_size=width, max_size=width)) for _ in range(count)]
    for row in range(1, count):
        common, source = draw(st.integers(0, width)), draw(st.integers(0, row - 1))
        rows[row][:common] = rows[source][:common]
    lengths = draw(st.lists(st.integers(0, width * BLOCK_SIZE), min_size=count, max_size=count))
    return np.array(rows, np.int32), np.array(lengths, np.int64)


def walk(packed: Int32, layout: PrefixLayout, groups: list[Group], slots: Int32) -> None:
    """Do on the host what the kernels do, and check that each group's tiles are read once for each of its rows."""
    ends = np.cumsum(layout.sizes)
    programs, rows, tasks = np.split(packed, ends[:-1])
    programs, rows, tasks = programs.reshape(-1, 4), rows.reshape(-1, 4), tasks.reshape(layout.num_tasks, -1)
    parts: dict[int, tuple[int, range]] = {}
    shares = []
    for program, (first_task, first_tile, last_tile, visits) in enumerate(programs.tolist()):
        runs = []
        for visit in range(visits):
            task = first_task + visit
            run = range(first_tile if visit == 0 else 0, last_tile if visit == visits - 1 else int(tasks[task, 1]))
            assert 0 < len(run) <= int(tasks[task, 1])
            assert program + task not in parts
            assert program + task < layout.num_partials
            parts[program + task] = task, run
            runs.append(len(run))
        shares += [sum(runs)] * bool(runs)
    assert max(shares) - min(shares) <= 1
    tokens = np.zeros(layout.num_rows, np.int64)
    for group in groups:
        tokens[group.rows] = group.tokens
    assert rows[:, 0].tolist() == tokens.tolist()
    for row in np.flatnonzero(tokens).tolist():
        group = next(group for group in groups if row in group.rows)
        _, first, count, place = rows[row].tolist()
        seen = []
        for number in range(first, first + count):
            task, tiles_of_part = parts[number]
            assert tasks[task, 2 + place] == row
            assert tasks[task, 0] in slots[group.rows]
            seen += list(tiles_of_part)
        assert seen == list(range(group.tokens // layout.tile_tokens))


@settings(max_examples=200, deadline=None)
@given(tables(), st.integers(1, 9), st.sampled_from([1, 3, 4, 16]), st.sampled_from([2, 3]))
def test_groups_are_rows_with_equal_blocks_and_tasks_cover_each_once(
    drawn: tuple[Int32, Int64], num_programs: int, tile_rows: int, members: int
) -> None:
    table, lengths = drawn
    slots = np.random.default_rng(0).permutation(len(table)).astype(np.int32)
    limits = SharingLimits(members, GRANULE, 1)
    groups = find_groups(table, slots, lengths, BLOCK_SIZE, GRANULE, limits)
    ranked = [group.saved for group in groups]
    assert ranked == sorted(ranked, reverse=True)
    taken = np.concatenate([group.rows for group in groups]) if groups else np.empty(0, np.int64)
    assert len(np.unique(taken)) == len(taken)
    for group in groups:
        assert len(group.rows) >= members
        assert group.tokens % GRANULE == 0
        assert GRANULE <= group.tokens <= lengths[group.rows].min()
        blocks = table[slots[group.rows], : -(-group.tokens // BLOCK_SIZE)]
        assert (blocks == blocks[0]).all()
    alike = table[slots][lengths >= GRANULE]
    heads, counts = np.unique(alike[:, : GRANULE // BLOCK_SIZE], axis=0, return_counts=True)
    assert bool(groups) == bool(len(heads) and counts.max() >= members)
    if groups:
        layout = PrefixLayout(num_programs, len(table), tile_rows, 16, GRANULE)
        packed = pack(groups, slots, layout)
        assert packed.shape == (sum(layout.sizes),)
        walk(packed, layout, groups, slots)


def test_more_groups_than_are_allowed() -> None:
    count = MAX_GROUPS + 5
    found = groups_of([[10 + index, 1, 2, 3] for index in range(count) for _ in range(2)])
    assert len(found) == MAX_GROUPS


class Slots:
    """What the slots hold, as the runner's state has it."""

    def __init__(self) -> None:
        self.requests, self.lengths = np.zeros(8, np.int64), np.full(8, 100, np.int64)
        self.tables = table_of([[1, 2, 3, 4]] * 8)
        self.shared = SharedPrefixes(LAYOUT, BLOCK_SIZE, LIMITS)

    def update(self, *slots: int) -> Int32:
        return self.shared.update(np.array(slots, np.int32), self.requests, self.lengths, self.tables)


def test_groups_are_looked_for_only_when_rows_change() -> None:
    slots = Slots()
    first = slots.update(3, 1, 5)
    assert len(first) == sum(LAYOUT.sizes)
    assert [group.rows.tolist() for group in slots.shared.groups] == [[0, 1, 2]]
    slots.lengths += 1
    assert not len(slots.update(3, 1, 5))
    assert slots.shared.groups
    assert len(slots.update(3, 5))
    assert len(slots.update(3, 5, 2, 7))
    slots.requests[5] += 1
    slots.tables[5, 0] = 77
    assert len(slots.update(3, 5, 2, 7))
    assert [group.rows.tolist() for group in slots.shared.groups] == [[0, 2, 3]]


def test_a_group_that_loses_its_rows_is_none() -> None:
    slots = Slots()
    assert len(slots.update(0, 1))
    for rest in ([1], []):
        assert not len(slots.update(*rest))
        assert not slots.shared.groups
    assert len(slots.update(0, 1))
    slots.shared.reset()
    assert not slots.shared.groups
    assert len(slots.update(0, 1))


def test_more_rows_than_the_tables_have_room_for() -> None:
    small = SharedPrefixes(PrefixLayout(5, 2, 4, 16, GRANULE), BLOCK_SIZE, LIMITS)
    slots = Slots()
    arguments = slots.requests, slots.lengths, slots.tables
    assert not len(small.update(np.arange(3, dtype=np.int32), *arguments))
    assert not small.groups
    assert len(small.update(np.arange(2, dtype=np.int32), *arguments))


@pytest.mark.parametrize(("tiles", "used"), [(1, 1), (2, 1), (3, 2), (64, 5)])
def test_programs_have_some_tiles_each(tiles: int, used: int) -> None:
    group = Group(np.arange(3), tiles * 16)
    packed = pack([group], np.arange(3, dtype=np.int32), LAYOUT)
    assert int((packed[: LAYOUT.sizes[0]].reshape(-1, 4)[:, 2] > 0).sum()) == used
