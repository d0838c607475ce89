"""The state of requests on the device, against plain loops."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from gpu_worker.kernels import state_kernels

SLOTS, MAX_LEN = 70, 2100
PADDING = SLOTS


class State:
    """The arrays, and the same as lists."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.device, self.block_size = device, block_size
        self.token_ids = self.array([[-7] * MAX_LEN] * (SLOTS + 1))
        self.num_tokens, self.prompt_len, self.limit = (self.array([0] * (SLOTS + 1)) for _ in range(3))
        self.block_tables = self.array([[0] * -(-MAX_LEN // block_size)] * (SLOTS + 1))
        self.ids: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def array(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def add(self, requests: dict[int, list[int]], limit: int = MAX_LEN, room: int = 4) -> None:
        """New requests by slot, with blocks for ``room`` more tokens each; other ids are staged before theirs."""
        staged, rows, entries = [5, 5, 5], [], []
        for slot, ids in requests.items():
            rows.append([slot, len(staged), len(ids), len(ids) - 1, limit])
            staged += ids
            blocks = -(-(len(ids) + room) // self.block_size)
            self.ids[slot], self.prompts[slot] = list(ids), len(ids) - 1
            self.tables[slot] = random.Random(slot).sample(range(1, 100_000), blocks)
            entries += [[slot, index, block] for index, block in enumerate(self.tables[slot])]
        random.Random(0).shuffle(entries)
        longest = max(len(ids) for ids in requests.values())
        state_kernels.scatter_new(
            self.array(rows), self.array(staged), longest, self.token_ids, self.num_tokens, self.prompt_len, self.limit
        )
        state_kernels.append_blocks(self.array(entries), self.block_tables)

    def place(self, slot: int, position: int) -> int:
        return self.tables[slot][position // self.block_size] * self.block_size + position % self.block_size

    def decode_inputs(self, slots: Sequence[int]) -> list[list[int]]:
        inputs = state_kernels.gather_decode_inputs(
            self.array(slots), self.token_ids, self.num_tokens, self.block_tables, self.block_size
        )
        return [values.tolist() for values in inputs]

    def write_back(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        state_kernels.write_back(self.array(slots), tokens, self.token_ids, self.num_tokens, self.limit)

    def span_inputs(self, spans: list[tuple[int, int, int]]) -> list[list[int]]:
        rows, total = [], 0
        for slot, start, count in spans:
            rows.append([slot, start, count, total])
            total += count
        inputs = state_kernels.gather_span_inputs(
            self.array(rows),
            total,
            max(count for _, _, count in spans),
            self.token_ids,
            self.num_tokens,
            self.prompt_len,
            self.block_tables,
            self.block_size,
        )
        return [values.tolist() for values in inputs]

    def expected(self, tokens: list[tuple[int, int]]) -> list[list[int]]:
        """Of tokens (slot, position): ids, positions, lengths, slot mapping."""
        rows = [
            (self.ids[slot][position], position, max(position + 1, self.prompts[slot]), self.place(slot, position))
            for slot, position in tokens
        ]
        return [list(column) for column in zip(*rows, strict=True)]


def ids_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 100_000), k=length)


@pytest.fixture(params=[16, 32, 64])
def state(request: pytest.FixtureRequest, device: torch.device) -> State:
    return State(request.param, device)


def test_a_new_request_changes_its_own_slot_only(state: State) -> None:
    lengths = {3: 1, 0: 1023, 69: 1024, 5: 2050}
    state.add({slot: ids_of(length, slot) for slot, length in lengths.items()}, limit=2060)
    for slot in range(SLOTS + 1):
        ids = state.ids.get(slot, [])
        assert state.token_ids[slot].tolist() == ids + [-7] * (MAX_LEN - len(ids))
        assert state.num_tokens[slot] == len(ids)
        assert state.prompt_len[slot] == state.prompts.get(slot, 0)
        assert state.limit[slot] == (2060 if ids else 0)
        table = state.tables.get(slot, [])
        assert state.block_tables[slot].tolist() == table + [0] * (state.block_tables.shape[1] - len(table))


def test_decode_inputs(state: State) -> None:
    state.add({slot: ids_of(1 + 29 * slot, slot) for slot in range(67)})
    slots = [*range(66, 0, -1), PADDING, 0, 69, PADDING]
    live = [slot for slot in slots if slot in state.ids]
    wanted = state.expected([(slot, len(state.ids[slot]) - 1) for slot in live])
    padded = [[0, 0, 0, -1] if slot not in state.ids else [column.pop(0) for column in wanted] for slot in slots]
    assert state.decode_inputs(slots) == [list(column) for column in zip(*padded, strict=True)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sampled_tokens_are_appended_up_to_the_limit(state: State, dtype: torch.dtype) -> None:
    state.add({slot: ids_of(10 + slot, slot) for slot in range(65)}, limit=40)
    slots = [PADDING, *range(65), PADDING]
    for step in range(3):
        tokens = [step * 100 + slot for slot in slots]
        state.write_back(slots, torch.tensor(tokens, dtype=dtype, device=state.device))
        for slot, token in zip(slots, tokens, strict=True):
            if slot != PADDING and len(state.ids[slot]) < 40:
                state.ids[slot].append(token)
    for slot in range(SLOTS + 1):
        ids = state.ids.get(slot, [])
        assert state.num_tokens[slot] == len(ids)
        assert state.token_ids[slot].tolist() == ids + [-7] * (MAX_LEN - len(ids))


def test_inputs_of_spans(state: State) -> None:
    state.add({0: ids_of(2060, 0), 1: ids_of(50, 1), 2: ids_of(33, 2), 3: ids_of(1100, 3)})
    spans = [(0, 0, 1025), (3, 64, 1024), (1, 17, 30), (2, -1, 1), (1, -1, 1)]
    tokens = []
    for slot, start, count in spans:
        first = len(state.ids[slot]) - 1 if start < 0 else start
        tokens += [(slot, first + index) for index in range(count)]
    assert state.span_inputs(spans) == state.expected(tokens)


def test_tokens_of_the_padding_slot_fill_a_step(state: State) -> None:
    state.add({4: ids_of(20, 4)})
    ids, positions, lengths, mapping = state.span_inputs([(4, 3, 5), (PADDING, 0, 3)])
    wanted = state.expected([(4, position) for position in range(3, 8)])
    assert [ids, positions, lengths, mapping] == [
        column + [filler] * 3 for column, filler in zip(wanted, (0, 0, 1, -1), strict=True)
    ]


def test_nothing_to_do(state: State) -> None:
    none = state.array([])
    assert all(not values for values in state.decode_inputs([]))
    state.write_back([], none)
    state_kernels.append_blocks(none.view(0, 3), state.block_tables)
    assert not state.num_tokens.any()
