"""The state of requests on the device: what the host tells it, what a step reads from it, what sampling adds to it.

Arrays have one row for each slot and a last one for the padding slot, all int32:

    token_ids [slots + 1, max_model_len]     num_tokens [slots + 1]     prompt_len [slots + 1]
    block_tables [slots + 1, max_blocks]     limit [slots + 1]: no token is written at or beyond it

The padding slot has no tokens and the limit 0: its tokens are read as id 0 at position 0, their keys and values go
nowhere, and nothing is appended to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gpu_worker.kernels.programmatic_launch import pdl_options, start_after_previous

ROWS = 64
"""Rows of a program where each row is one value."""
BLOCK = 1024
"""Elements of a program where a row has many."""


class DecodeInputs(NamedTuple):
    """One token for each row; all [rows] int32."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    context_lens: torch.Tensor
    """Tokens that the token sees, itself included: also the length that its rotary embedding is for."""
    slot_mapping: torch.Tensor
    """``block * block_size + offset``, or -1."""


class SpanInputs(NamedTuple):
    """The tokens of all spans, one span after another; all [tokens] int32."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    """Length of the sequence when the token is first computed: of its prompt, or up to itself."""
    slot_mapping: torch.Tensor
    """``block * block_size + offset``, or -1."""


def gather_decode_inputs(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """The newest token of each slot, at position ``num_tokens - 1``.

    Args:
        slots: [rows] int32.
    """
    rows = len(slots)
    inputs = torch.empty((4, rows), dtype=torch.int32, device=slots.device)
    if rows:
        _gather_decode_kernel[(triton.cdiv(rows, ROWS),)](
            slots,
            token_ids,
            num_tokens,
            block_tables,
            inputs,
            rows,
            token_ids.stride(0),
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            ROWS=ROWS,
            num_warps=2,
            **pdl_options(slots.device),
        )
    return DecodeInputs(*inputs.unbind())


def gather_span_inputs(
    spans: torch.Tensor,
    tokens: int,
    longest: int,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> SpanInputs:
    """The tokens ``start`` to ``start + count`` of each span's slot.

    Args:
        spans: [spans, 4] int32, contiguous: slot, start, count, index of its first token among the step's; a start of
            -1 means the newest token of the slot.
        tokens: of all spans together, which leave no gap. Tokens of the padding slot fill a step up to a size.
        longest: count of the longest span.
    """
    inputs = torch.empty((4, tokens), dtype=torch.int32, device=spans.device)
    if len(spans):
        _gather_spans_kernel[(len(spans), triton.cdiv(longest, BLOCK))](
            spans,
            token_ids,
            num_tokens,
            prompt_len,
            block_tables,
            inputs,
            tokens,
            token_ids.stride(0),
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
            **pdl_options(spans.device),
        )
    return SpanInputs(*inputs.unbind())


def write_back(
    slots: torch.Tensor,
    tokens: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    limit: torch.Tensor,
) -> None:
    """Append one sampled token to each slot that has not reached its limit.

    Args:
        slots: [rows] int32, distinct but for the padding slot.
        tokens: [rows] int32 or int64.
    """
    rows = len(slots)
    if rows:
        _write_back_kernel[(triton.cdiv(rows, ROWS),)](
            slots,
            tokens,
            token_ids,
            num_tokens,
            limit,
            rows,
            token_ids.stride(0),
            ROWS=ROWS,
            num_warps=2,
            **pdl_options(slots.device),
        )


def scatter_new(
    requests: torch.Tensor,
    staged: torch.Tensor,
    longest: int,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    limit: torch.Tensor,
) -> None:
    """Requests take their slots.

    Args:
        requests: [requests, 5] int32, contiguous: slot, offset of its first token id in ``staged``, number of known
            tokens, prompt_len, limit.
        staged: [total] int32, the known ids.
        longest: most known tokens of a request.
    """
    if len(requests):
        _scatter_new_kernel[(len(requests), max(1, triton.cdiv(longest, BLOCK)))](
            requests, staged, token_ids, num_tokens, prompt_len, limit, token_ids.stride(0), BLOCK=BLOCK
        )


def append_blocks(entries: torch.Tensor, block_tables: torch.Tensor) -> None:
    """Enter blocks in the tables of slots.

    Args:
        entries: [blocks, 3] int32, contiguous: slot, index in its table, block.
    """
    rows = len(entries)
    if rows:
        _append_blocks_kernel[(triton.cdiv(rows, ROWS),)](
            entries, block_tables, rows, block_tables.stride(0), ROWS=ROWS, num_warps=2
        )


@triton.jit
def _mapping(block_tables_ptr, table_stride, slot, position, live, BLOCK_SIZE: tl.constexpr):
    block = tl.load(block_tables_ptr + slot * table_stride + position // BLOCK_SIZE, live, other=0)
    return tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _gather_decode_kernel(
    slots_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    block_tables_ptr,
    inputs_ptr,
    rows,
    tokens_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    slot = tl.load(slots_ptr + row, mask, other=0).to(tl.int64)
    length = tl.load(num_tokens_ptr + slot, mask, other=0)
    live = length > 0
    position = tl.maximum(length - 1, 0)
    token = tl.load(token_ids_ptr + slot * tokens_stride + position, live, other=0)
    tl.store(inputs_ptr + row, token, mask)
    tl.store(inputs_ptr + rows + row, position, mask)
    tl.store(inputs_ptr + 2 * rows + row, length, mask)
    mapping = _mapping(block_tables_ptr, table_stride, slot, position, live, BLOCK_SIZE)
    tl.store(inputs_ptr + 3 * rows + row, mapping, mask)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["spans_ptr"])
def _gather_spans_kernel(
    spans_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    prompt_len_ptr,
    block_tables_ptr,
    inputs_ptr,
    tokens,
    tokens_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    span_ptr = spans_ptr + 4 * tl.program_id(0)
    slot = tl.load(span_ptr).to(tl.int64)
    start, count, first = tl.load(span_ptr + 1), tl.load(span_ptr + 2), tl.load(span_ptr + 3)
    known = tl.load(num_tokens_ptr + slot)
    start = tl.where(start < 0, known - 1, start)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    live = mask & (known > 0)
    position = tl.where(known > 0, start + index, 0)
    token = tl.load(token_ids_ptr + slot * tokens_stride + position, live, other=0)
    length = tl.maximum(tl.load(prompt_len_ptr + slot), position + 1)
    mapping = _mapping(block_tables_ptr, table_stride, slot, position, live, BLOCK_SIZE)
    to = inputs_ptr + first + index
    tl.store(to, token, mask)
    tl.store(to + tokens, position, mask)
    tl.store(to + 2 * tokens, length, mask)
    tl.store(to + 3 * tokens, mapping, mask)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "tokens_ptr"])
def _write_back_kernel(
    slots_ptr,
    tokens_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    limit_ptr,
    rows,
    tokens_stride,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    slot = tl.load(slots_ptr + row, mask, other=0).to(tl.int64)
    length = tl.load(num_tokens_ptr + slot, mask, other=0)
    room = mask & (length < tl.load(limit_ptr + slot, mask, other=0))
    token = tl.load(tokens_ptr + row, mask, other=0).to(tl.int32)
    tl.store(token_ids_ptr + slot * tokens_stride + length, token, room)
    tl.store(num_tokens_ptr + slot, length + 1, room)


@triton.jit(do_not_specialize_on_alignment=["requests_ptr", "staged_ptr"])
def _scatter_new_kernel(
    requests_ptr,
    staged_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    prompt_len_ptr,
    limit_ptr,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    request_ptr = requests_ptr + 5 * tl.program_id(0)
    slot = tl.load(request_ptr).to(tl.int64)
    offset, length = tl.load(request_ptr + 1), tl.load(request_ptr + 2)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < length
    tl.store(token_ids_ptr + slot * tokens_stride + index, tl.load(staged_ptr + offset + index, mask, other=0), mask)
    if tl.program_id(1) == 0:
        tl.store(num_tokens_ptr + slot, length)
        tl.store(prompt_len_ptr + slot, tl.load(request_ptr + 3))
        tl.store(limit_ptr + slot, tl.load(request_ptr + 4))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["entries_ptr"])
def _append_blocks_kernel(entries_ptr, block_tables_ptr, rows, table_stride, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    slot = tl.load(entries_ptr + 3 * row, mask, other=0).to(tl.int64)
    index = tl.load(entries_ptr + 3 * row + 1, mask, other=0)
    block = tl.load(entries_ptr + 3 * row + 2, mask, other=0)
    tl.store(block_tables_ptr + slot * table_stride + index, block, mask)
