"""What an operation of the block pool takes, by the number of blocks and the eviction policy.

    python -m benchmarks.block_pool

The pool is full of cached prefixes of 32 blocks that nobody holds. ``fill``: take the blocks of a table, each of which
evicts one, name them and release them. ``hit``: find and hold the blocks of a cached prefix and release them. Rounds of
the pools alternate; the figures are medians of the CPU time for one block.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator

from core_engine.block_pool import BlockPool
from core_engine.eviction import POLICIES

TABLE = 32
TABLES_PER_ROUND = 300
NO_IDS = b""


class FullPool:
    """A pool in which every block caches a part of a prefix, and the operations on it."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        self.pool = BlockPool(num_blocks, policy)
        self._draw = random.Random(0)
        self._cached: list[list[bytes]] = []
        for _ in range((num_blocks - 1) // TABLE):
            self._fill(self._chain())

    def fill(self) -> float:
        """CPU seconds for one block."""
        chains = [self._chain() for _ in range(TABLES_PER_ROUND)]
        began = time.thread_time()
        for chain in chains:
            self._fill(chain)
        return (time.thread_time() - began) / (TABLES_PER_ROUND * TABLE)

    def hit(self) -> float:
        """CPU seconds for one block, of prefixes anywhere in the order of eviction."""
        pool = self.pool
        chains = list(itertools.islice(self._still_cached(), TABLES_PER_ROUND))
        began = time.thread_time()
        for chain in chains:
            table = []
            for parent, digest in itertools.pairwise(chain):
                block = pool.find(digest, parent, NO_IDS)
                assert block is not None
                pool.hold(block)
                table.append(block)
            pool.release(table)
        return (time.thread_time() - began) / (TABLES_PER_ROUND * TABLE)

    def _fill(self, chain: list[bytes]) -> None:
        pool, before, table = self.pool, None, []
        for parent, digest in itertools.pairwise(chain):
            block = pool.take()
            pool.commit(block, digest, parent, NO_IDS, before)
            table.append(block)
            before = block
        pool.release(table)
        self._cached.append(chain)

    def _chain(self) -> list[bytes]:
        """A root and the digests of a table that is not cached."""
        return [b"root", *(self._draw.randbytes(32) for _ in range(TABLE))]

    def _still_cached(self) -> Iterator[list[bytes]]:
        while True:
            chain = self._draw.choice(self._cached)
            if self.pool.has(chain[-1]):
                yield chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print("| policy | blocks | fill, µs | hit, µs |\n|---|---|---|---|")
    for policy in POLICIES:
        pools = [FullPool(num_blocks, policy) for num_blocks in options.num_blocks]
        # As the engine does: what lives long is no work for the collector.
        gc.collect()
        gc.freeze()
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in pools]
        for _ in range(options.rounds):
            for pool, (fills, hits) in zip(pools, times, strict=True):
                fills.append(pool.fill())
                hits.append(pool.hit())
        for num_blocks, (fills, hits) in zip(options.num_blocks, times, strict=True):
            fill, hit = (1e6 * statistics.median(seconds) for seconds in (fills, hits))
            print(f"| {policy} | {num_blocks:,} | {fill:.2f} | {hit:.2f} |", flush=True)
        del pools, pool
        gc.unfreeze()


if __name__ == "__main__":
    main()
