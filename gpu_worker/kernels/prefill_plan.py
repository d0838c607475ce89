"""How prefill attention is shared out among the programs of its kernel; made on the host, once a step.

Query tokens are cut into tiles, and a tile's work is its context. Items begin with the longest: program p of P that run
at a time takes the p-th of the first P items and the p-th last of the P items after those, in turns. Where that would
leave some programs idle for long, contexts are cut in pieces, whose results are joined.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

COLUMNS = 9
LEAST_PIECE = 512
"""Keys of a piece at least."""
PIECE_COST = 192
"""Keys that a program attends to in the time that it takes to leave a piece's result and have it joined."""
PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of the longest context that is cut: what is tried."""
ENOUGH = 1.05
"""Nothing is cut where the busiest program has at most this many times the average."""


class TileCut(NamedTuple):
    """What spans are cut by."""

    tile_tokens: int
    """Query tokens of a tile at most."""
    kv_heads: int
    """Each of them is an item of its own."""
    programs: int
    """That run at the same time, for all KV heads together."""
    keys: int
    """A piece is a multiple of this long."""
    max_pieces: int
    """Of all contexts that are cut; 0: none is."""


def max_items(num_tokens: int, num_spans: int, cut: TileCut) -> int:
    """Items that ``prefill_items`` makes at most."""
    return num_tokens // cut.tile_tokens + num_spans + cut.max_pieces


def prefill_items(spans: Int32, cut: TileCut) -> Int32:
    """Cut prefill spans in tiles of query tokens, and contexts in pieces where that pays.

    Args:
        spans: [p, 4] int32: slot, first query token in the step, query tokens, context with the last of them included.

    Returns:
        [1 + items, COLUMNS] int32, the longest first: slot, first query token in the step, query tokens, position of
        the first one, the first key and the end of the keys to attend to, pieces of that context, which of them this
        is, and the number of the first of them among all pieces. The first row has the number of items alone.
    """
    slots, starts, counts, contexts = spans.reshape(-1, 4).T.astype(np.int64)
    tiles = -(-counts // cut.tile_tokens)
    span = np.repeat(np.arange(len(counts)), tiles)
    offset = _numbered(tiles) * cut.tile_tokens
    length = np.minimum(counts[span] - offset, cut.tile_tokens)
    position = contexts[span] - counts[span] + offset
    table = np.stack([slots[span], starts[span] + offset, length, position], 1)
    table = table[np.argsort(-(position + length), kind="stable")]
    ends = table[:, 2] + table[:, 3]
    piece, pieces = _pieces(ends, cut)
    if pieces.max(initial=1) == 1:
        return _with_header(np.column_stack([table, np.zeros_like(ends), ends, np.ones_like(ends), *[0 * ends] * 2]))
    tile, index = np.repeat(np.arange(len(table)), pieces), _numbered(pieces)
    is_cut = pieces > 1
    first = np.cumsum(pieces * is_cut) - pieces * is_cut
    begin = index * piece[tile]
    end = np.minimum(begin + piece[tile], ends[tile])
    items = np.column_stack([table[tile], begin, end, pieces[tile], index, (first * is_cut)[tile]])
    return _with_header(items[np.argsort(begin - end, kind="stable")])


def has_pieces(table: Int32) -> bool:
    """Whether contexts are cut in ``prefill_items``."""
    return bool((table[1:, 6] > 1).any())


def _with_header(items: Int64) -> Int32:
    table = np.zeros((1 + len(items), COLUMNS), np.int32)
    table[0, 0], table[1:] = len(items), items
    return table


def _numbered(counts: Int64) -> Int64:
    """0, 1, … for each of ``counts``."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _pieces(contexts: Int64, cut: TileCut) -> tuple[Int64, Int64]:
    """Keys of a piece, and the number of pieces, of each context; ``contexts`` fall.

    Either all long contexts are cut, or those that are left when each program has had the same number of tiles.
    """
    whole = contexts, np.ones_like(contexts)
    if not cut.max_pieces or not len(contexts) or contexts[0] < 2 * LEAST_PIECE:
        return whole
    share = contexts.sum() * cut.kv_heads / cut.programs
    least = _busiest(contexts, cut)
    if least <= ENOUGH * share:
        return whole
    best = whole
    rounds = len(contexts) * cut.kv_heads // cut.programs
    for kept in {0, rounds * cut.programs // cut.kv_heads}:
        rest = contexts[kept:]
        for parts in PARTS:
            length = max(rest.max(initial=0) / parts, LEAST_PIECE)
            piece = contexts.copy()
            piece[kept:] = cut.keys * np.ceil(rest / np.ceil(rest / length) / cut.keys)
            pieces = -(-contexts // piece)
            is_cut = pieces > 1
            if pieces[is_cut].sum() > cut.max_pieces:
                break
            keys = np.repeat(np.minimum(piece, contexts) + PIECE_COST * is_cut, pieces)
            keys[::-1].sort()
            if (most := _busiest(keys, cut)) * ENOUGH < least:
                least, best = most, (piece, pieces)
    return best


def _busiest(keys: Int64, cut: TileCut) -> float:
    """Keys that the busiest program attends to, for items of so many ``keys``, which fall."""
    items = np.repeat(keys, cut.kv_heads)
    rounds = -(-len(items) // cut.programs)
    taken = np.zeros((rounds, cut.programs), np.int64)
    taken.reshape(-1)[: len(items)] = items
    taken[1::2] = taken[1::2, ::-1]
    return float(taken.sum(0).max())
