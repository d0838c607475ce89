"""Prefill attention for Hopper: what ``paged_prefill`` computes, at the rate of FlashAttention-3 (Shah et al., 2024).

A program has three parts. One warp loads keys and values by TMA, block by block of the paged cache, into rings of
shared memory. Two groups of four warps each have half of a tile's rows; the scores of the next keys are multiplied
while the softmax of these runs, in the same group and in the other one. Programs stay, and take items in turns: the
keys of the next one are loaded while this one ends.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpu_worker.kernels import prefill_plan
from gpu_worker.kernels.paged_prefill import HOPPER_KEYS, HOPPER_ROWS, LOG2_E, PrefillWorkspace

COLUMNS = gl.constexpr(prefill_plan.COLUMNS)
ROWS, KEYS = gl.constexpr(HOPPER_ROWS), gl.constexpr(HOPPER_KEYS)
"""Of a tile, and of an iteration."""
HALF_ROWS = gl.constexpr(HOPPER_ROWS // 2)
"""Of a group of warps."""
PANEL = gl.constexpr(64)
"""Dimensions in 128 bytes, the width of a swizzled row of shared memory."""
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Of operands in shared memory, as TMA writes them."""
STAGES = {64: 4, 128: 2}
"""Iterations whose keys and values are in shared memory, by head_dim."""
BLOCK_SIZES = (16, 32, 64, 128)
REGISTERS = 168
"""Of a thread, when the program begins: 12 warps take all that there are. Then most go to the groups that compute."""


def can_run(head_dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether a GPU of Hopper has this kernel for these shapes."""
    return head_dim in STAGES and block_size in BLOCK_SIZES and dtype.itemsize == 2 and cache_dtype == dtype


def hopper_prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    items: torch.Tensor,
    block_tables: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    programs: int,
    has_pieces: bool,
    workspace: PrefillWorkspace,
) -> None:
    """As ``paged_prefill.prefill`` without a window, for what ``can_run``.

    Args:
        cache: of query's dtype.
        items: of tiles of HOPPER_ROWS rows; the length of pieces is a multiple of HOPPER_KEYS.
        programs: one for each multiprocessor.
        has_pieces: some of ``items`` may be pieces.
    """
    _, heads, head_dim = query.shape
    blocks, _, kv_heads, block_size, _ = cache.shape
    assert cache.is_contiguous()
    assert cache.dtype == query.dtype
    assert query.stride()[1:] == (head_dim, 1)
    assert heads // kv_heads <= HOPPER_ROWS
    if len(items) == 1:
        return
    rows = blocks * 2 * kv_heads * block_size
    panels = TensorDescriptor(cache, [rows, head_dim], [head_dim, 1], [block_size, PANEL.value], LAYOUT.value)
    _hopper_prefill_kernel[(min(programs, (len(items) - 1) * kv_heads),)](
        query, panels, output, items, block_tables, workspace.values, workspace.statistics, workspace.arrivals,
        scale * LOG2_E, query.stride(0), output.stride(0), block_tables.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, STAGES=STAGES[head_dim],
        HAS_PIECES=has_pieces, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


@gluon.jit
def _rounds(units):
    """Turns of this program."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    rounds = units // programs
    place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
    return rounds + gl.where(place < units % programs, 1, 0)


@gluon.jit
def _unit(turn):
    """What this program takes at a turn: an item and a KV head."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _load_tile(panels, blocks, stage, full, rows, offset, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """``blocks``: [stages * panels * blocks of a tile, block_size, PANEL]."""
    PER_TILE: gl.constexpr = KEYS // BLOCK_SIZE
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    mbarrier.expect(full, KEYS * HEAD_DIM * 2)
    for panel in gl.static_range(PANELS):
        for block in gl.static_range(PER_TILE):
            target = blocks.index((stage * PANELS + panel) * PER_TILE + block)
            tma.async_copy_global_to_shared(panels, [rows[block] + offset, panel * PANEL], full, target)


@gluon.jit
def _load_items(
    panels, k_blocks, v_blocks, k_full, k_empty, v_full, v_empty, items_ptr, block_tables_ptr, table_stride,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PER_TILE: gl.constexpr = KEYS // BLOCK_SIZE
    loaded = 0
    for turn in range(_rounds(gl.load(items_ptr) * KV_HEADS)):
        unit = _unit(turn)
        head = unit % KV_HEADS
        item_ptr = items_ptr + COLUMNS * (1 + unit // KV_HEADS)
        table_ptr = block_tables_ptr + gl.load(item_ptr).to(gl.int64) * table_stride
        context = gl.load(item_ptr + 2) + gl.load(item_ptr + 3)
        begin = gl.load(item_ptr + 4)
        tiles = gl.cdiv(gl.load(item_ptr + 5) - begin, KEYS)
        for tile in range(tiles):
            start = begin + (tiles - 1 - tile) * KEYS
            rows = ()
            for block in gl.static_range(PER_TILE):
                token = start + block * BLOCK_SIZE
                index = gl.load(table_ptr + token // BLOCK_SIZE, token < context, other=0)
                # Rows outside of the tensor are zeros.
                row = gl.where(token < context, (index * (2 * KV_HEADS) + head) * BLOCK_SIZE, -(1 << 30))
                rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
            stage, is_odd = loaded % STAGES, loaded // STAGES & 1
            mbarrier.wait(k_empty.index(stage), is_odd ^ 1)
            _load_tile(panels, k_blocks, stage, k_full.index(stage), rows, 0, HEAD_DIM, BLOCK_SIZE)
            mbarrier.wait(v_empty.index(stage), is_odd ^ 1)
            values = KV_HEADS * BLOCK_SIZE
            _load_tile(panels, v_blocks, stage, v_full.index(stage), rows, values, HEAD_DIM, BLOCK_SIZE)
            loaded += 1


# Each group waits at a barrier of the other's, of numbers that the compiler gives to no one.
@gluon.jit
def _take_turn(HALF: gl.constexpr):
    """Wait until the other group has queued its products."""
    wait: gl.constexpr = "bar.sync 14, 256; mov.u32 $0, 0;" if HALF == 0 else "bar.sync 15, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(wait, "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _give_turn(HALF: gl.constexpr):
    """Let the other group queue its products."""
    arrive: gl.constexpr = "bar.arrive 15, 256; mov.u32 $0, 0;" if HALF == 0 else "bar.arrive 14, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(arrive, "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _softmax(scores, start, position, maximum, total, scale, IS_MASKED: gl.constexpr):
    """An iteration of online softmax. Returns probabilities, the new maximum and total, and what sums decay by."""
    if IS_MASKED:
        token = start + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(token[None, :] <= position[:, None], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    # A row that has seen no key yet has a maximum of minus infinity, which must not be subtracted from itself.
    reference = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) if IS_MASKED else new_maximum
    probabilities = gl.exp2(scores * scale - reference[:, None])
    decay = gl.exp2(maximum - reference)
    return probabilities, new_maximum, total * decay + gl.sum(probabilities, 1), decay


@gluon.jit
def _clear_rest(v_blocks, stage, context, start, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Zero the values of the context's last block that nothing was written to."""
    PER_TILE: gl.constexpr = KEYS // BLOCK_SIZE
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    last = (context - 1 - start) // BLOCK_SIZE
    token = start + last * BLOCK_SIZE + gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, layout))
    for panel in gl.static_range(PANELS):
        block = v_blocks.index((stage * PANELS + panel) * PER_TILE + last)
        values = block.load(layout)
        block.store(gl.where((token < context)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _first_scores(query, k_tiles, k_full, k_empty, taken, score_layout: gl.constexpr, STAGES: gl.constexpr):
    """Of an item, of tile ``taken``."""
    stage = taken % STAGES
    mbarrier.wait(k_full.index(stage), taken // STAGES & 1)
    scores = gl.zeros([HALF_ROWS, KEYS], gl.float32, score_layout)
    scores = warpgroup_mma(query, k_tiles.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, (scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return scores


@gluon.jit
def _attend_tile(
    values, probabilities, maximum, total, query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, taken, start,
    position, scale, weight_layout: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
    IS_MASKED: gl.constexpr,
):  # fmt: skip
    """The scores and probabilities of tile ``taken``, and the values of the one before it."""
    score_layout: gl.constexpr = probabilities.type.layout
    stage, is_odd = taken % STAGES, taken // STAGES & 1
    before, was_odd = (taken - 1) % STAGES, (taken - 1) // STAGES & 1
    weights = gl.convert_layout(probabilities.to(k_tiles.dtype), weight_layout)
    mbarrier.wait(k_full.index(stage), is_odd)
    _take_turn(HALF)
    scores = gl.zeros([HALF_ROWS, KEYS], gl.float32, score_layout)
    scores = warpgroup_mma(query, k_tiles.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), was_odd)
    values = warpgroup_mma(weights, v_tiles.index(before), values, is_async=True)
    _give_turn(HALF)
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    probabilities, maximum, total, decay = _softmax(scores, start, position, maximum, total, scale, IS_MASKED)
    # That the wait depends on the probabilities keeps them before it.
    values, probabilities = warpgroup_mma_wait(0, (values, probabilities))
    mbarrier.arrive(v_empty.index(before), count=1)
    values = values * gl.convert_layout(decay, gl.SliceLayout(1, values.type.layout))[:, None]
    return values, probabilities, maximum, total


@gluon.jit
def _leave_piece(
    maximum, total, values, values_ptr, statistics_ptr, arrivals_ptr, item_ptr, head,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """As of ``paged_prefill``, for half of a tile; a context has at least two pieces, thus a count for each half."""
    layout: gl.constexpr = values.type.layout
    row = gl.arange(0, HALF_ROWS, gl.SliceLayout(1, layout)) + HALF * HALF_ROWS
    cell = row[:, None] * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))[None, :]
    pieces = gl.load(item_ptr + 6)
    place = (gl.load(item_ptr + 8) * KV_HEADS + head).to(gl.int64)
    mine = place + gl.load(item_ptr + 7) * KV_HEADS
    gl.store(values_ptr + mine * (ROWS * HEAD_DIM) + cell, values)
    gl.store(statistics_ptr + mine * (2 * ROWS) + row, maximum)
    gl.store(statistics_ptr + mine * (2 * ROWS) + ROWS + row, total)
    tl.debug_barrier()
    count_ptr = arrivals_ptr + place + HALF * KV_HEADS
    is_last = gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == pieces - 1
    tl.debug_barrier()
    maximum = gl.full_like(maximum, float("-inf"))
    total = gl.zeros_like(total)
    values = gl.zeros_like(values)
    if is_last:
        for other in range(pieces):
            there = place + other * KV_HEADS
            other_maximum = gl.load(statistics_ptr + there * (2 * ROWS) + row, cache_modifier=".cg")
            other_total = gl.load(statistics_ptr + there * (2 * ROWS) + ROWS + row, cache_modifier=".cg")
            other_values = gl.load(values_ptr + there * (ROWS * HEAD_DIM) + cell, cache_modifier=".cg")
            new_maximum = gl.maximum(maximum, other_maximum)
            reference = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            decay, weight = gl.exp2(maximum - reference), gl.exp2(other_maximum - reference)
            total = total * decay + other_total * weight
            values = values * decay[:, None] + other_values * weight[:, None]
            maximum = new_maximum
        gl.store(count_ptr, 0)
    return total, values, is_last


@gluon.jit
def _finish(
    maximum, total, values, values_ptr, statistics_ptr, arrivals_ptr, item_ptr, head,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_PIECES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """What an item sums up to, in the layout of ``values``, and whether that is of a whole context."""
    row_layout: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    maximum, total = gl.convert_layout(maximum, row_layout), gl.convert_layout(total, row_layout)
    is_whole = True
    if HAS_PIECES:
        is_whole = gl.load(item_ptr + 6) <= 1
        if gl.load(item_ptr + 6) > 1:
            total, values, is_whole = _leave_piece(
                maximum, total, values, values_ptr, statistics_ptr, arrivals_ptr, item_ptr, head,
                KV_HEADS, HEAD_DIM, HALF,
            )  # fmt: skip
    return total, values, is_whole


@gluon.jit
def _places(head, first_token, tokens, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HALF: gl.constexpr):
    """Where the elements of half a tile are in a token, of which tokens they are, and which of them exist."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    row = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    place = (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    token = (first_token + row // GROUP).to(gl.int64)[:, None]
    return place, token, (row // GROUP < tokens)[:, None] & (dim < HEAD_DIM)[None, :]


@gluon.jit
def _attend_items(
    q_half, k_tiles, v_tiles, v_blocks, k_full, k_empty, v_full, v_empty, query_ptr, output_ptr, items_ptr, values_ptr,
    statistics_ptr, arrivals_ptr, scale, query_stride, output_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, HAS_PIECES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    taken = 0
    if HALF == 1:
        _give_turn(HALF)
    for turn in range(_rounds(gl.load(items_ptr) * KV_HEADS)):
        unit = _unit(turn)
        head = unit % KV_HEADS
        item_ptr = items_ptr + COLUMNS * (1 + unit // KV_HEADS)
        first_token, tokens = gl.load(item_ptr + 1), gl.load(item_ptr + 2)
        first_position = gl.load(item_ptr + 3)
        begin, end = gl.load(item_ptr + 4), gl.load(item_ptr + 5)
        place, token, is_element = _places(head, first_token, tokens, GROUP, HEAD_DIM, HALF)
        query = gl.load(query_ptr + token * query_stride + place, is_element, other=0.0)
        q_half.store(query)
        fence_async_shared()

        context = first_position + tokens
        position = first_position + (HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, row_layout)) // GROUP
        tiles = gl.cdiv(end - begin, KEYS)
        start = begin + (tiles - 1) * KEYS
        masked_from = gl.maximum((first_position + 1) // KEYS * KEYS, begin)
        maximum = gl.full([HALF_ROWS], float("-inf"), gl.float32, row_layout)
        total = gl.zeros([HALF_ROWS], gl.float32, row_layout)
        values = gl.zeros([HALF_ROWS, HEAD_DIM], gl.float32, value_layout)
        scores = _first_scores(q_half, k_tiles, k_full, k_empty, taken, score_layout, STAGES)
        if (end == context) & (context % BLOCK_SIZE != 0):
            mbarrier.wait(v_full.index(taken % STAGES), taken // STAGES & 1)
            _clear_rest(v_blocks, taken % STAGES, context, start, HEAD_DIM, BLOCK_SIZE)
        probabilities, maximum, total, _ = _softmax(scores, start, position, maximum, total, scale, True)
        taken += 1
        masked_tiles = gl.maximum((start - masked_from) // KEYS, 0)
        for _ in range(masked_tiles):
            start -= KEYS
            values, probabilities, maximum, total = _attend_tile(
                values, probabilities, maximum, total, q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                taken, start, position, scale, weight_layout, STAGES, HALF, True,
            )  # fmt: skip
            taken += 1
        for _ in range(tiles - 1 - masked_tiles):
            start -= KEYS
            values, probabilities, maximum, total = _attend_tile(
                values, probabilities, maximum, total, q_half, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                taken, start, position, scale, weight_layout, STAGES, HALF, False,
            )  # fmt: skip
            taken += 1
        stage, is_odd = (taken - 1) % STAGES, (taken - 1) // STAGES & 1
        mbarrier.wait(v_full.index(stage), is_odd)
        weights = gl.convert_layout(probabilities.to(query.dtype), weight_layout)
        values = warpgroup_mma(weights, v_tiles.index(stage), values, is_async=True)
        values = warpgroup_mma_wait(0, (values,))
        mbarrier.arrive(v_empty.index(stage), count=1)

        total, values, is_whole = _finish(
            maximum, total, values, values_ptr, statistics_ptr, arrivals_ptr, item_ptr, head,
            KV_HEADS, HEAD_DIM, HAS_PIECES, HALF,
        )  # fmt: skip
        result = values * (1.0 / gl.where(total > 0.0, total, 1.0))[:, None]
        result = gl.convert_layout(result.to(output_ptr.dtype.element_ty), place.type.layout)
        gl.store(output_ptr + token * output_stride + place, result, is_element & is_whole)
    if HALF == 0:
        _take_turn(HALF)


@gluon.jit(do_not_specialize_on_alignment=["table_stride", "items_ptr"])
def _hopper_prefill_kernel(
    query_ptr,
    panels,
    output_ptr,
    items_ptr,
    block_tables_ptr,
    values_ptr,
    statistics_ptr,
    arrivals_ptr,
    scale,
    query_stride,
    output_stride,
    table_stride,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_PIECES: gl.constexpr,
):
    dtype: gl.constexpr = panels.dtype
    queries = gl.allocate_shared_memory(dtype, [2, HALF_ROWS, HEAD_DIM], LAYOUT)
    BLOCKS: gl.constexpr = STAGES * (KEYS // BLOCK_SIZE) * (HEAD_DIM // PANEL)
    k_blocks = gl.allocate_shared_memory(dtype, [BLOCKS, BLOCK_SIZE, PANEL], LAYOUT)
    v_blocks = gl.allocate_shared_memory(dtype, [BLOCKS, BLOCK_SIZE, PANEL], LAYOUT)
    k_tiles = k_blocks._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], LAYOUT)
    v_tiles = v_blocks._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_attend_items, (
                queries.index(0), k_tiles, v_tiles, v_blocks, k_full, k_empty, v_full, v_empty, query_ptr, output_ptr,
                items_ptr, values_ptr, statistics_ptr, arrivals_ptr, scale, query_stride, output_stride,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, STAGES, HAS_PIECES, 0,
            )),
            (_attend_items, (
                queries.index(1), k_tiles, v_tiles, v_blocks, k_full, k_empty, v_full, v_empty, query_ptr, output_ptr,
                items_ptr, values_ptr, statistics_ptr, arrivals_ptr, scale, query_stride, output_stride,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, STAGES, HAS_PIECES, 1,
            )),
            (_load_items, (
                panels, k_blocks, v_blocks, k_full, k_empty, v_full, v_empty, items_ptr, block_tables_ptr,
                table_stride, KV_HEADS, HEAD_DIM, BLOCK_SIZE, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
