"""Traces of ``headrace bench prefix``: requests in an order that tells eviction policies apart."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from headrace.simulate.trace import TraceRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request: all that its session has said and been answered so far, and then ``ids``."""

    session: int
    ids: list[int]
    output_len: int
    shared: tuple[str, int] | None = None
    """What ``ids`` begin with is known to other sessions too: its name, and how many ids it has."""


class Sessions:
    """What each session of a trace has said and been answered so far."""

    def __init__(self) -> None:
        self._histories: dict[int, list[int]] = {}

    def prompt(self, turn: Turn) -> list[int]:
        return self._histories.get(turn.session, []) + turn.ids

    def answered(self, turn: Turn, output: Sequence[int]) -> None:
        self._histories[turn.session] = [*self.prompt(turn), *output]


def chat(draw: random.Random, num_requests: int, vocab_size: int, output_len: int) -> list[Turn]:
    """Conversations of 1 to 12 turns, 24 of them at a time; who comes next is often one who was here just now.

    A message has 16 to 160 ids. An ended conversation never comes back, and a new one takes its place.
    """
    numbers = itertools.count()
    active: list[tuple[int, int]] = []
    turns = []
    for _ in range(num_requests):
        while len(active) < 24:
            active.insert(draw.randrange(len(active) + 1), (next(numbers), draw.randint(1, 12)))
        session, left = active.pop(min(int(draw.expovariate(1 / 8)), len(active) - 1))
        turns.append(Turn(session, _ids(draw, vocab_size, 16, 160), output_len))
        if left > 1:
            active.insert(draw.randrange(8), (session, left - 1))
    return turns


def system(draw: random.Random, num_requests: int, vocab_size: int, output_len: int) -> list[Turn]:
    """System prompts of 128 to 768 ids, 64 of them by Zipf's law, each with a question of its own of 16 to 96."""
    prompts = [_ids(draw, vocab_size, 128, 768) for _ in range(64)]
    return [
        Turn(
            session, prompts[rank] + _ids(draw, vocab_size, 16, 96), output_len, (f"system-{rank}", len(prompts[rank]))
        )
        for session, rank in enumerate(_zipf(draw, len(prompts), num_requests))
    ]


def scan(draw: random.Random, num_requests: int, vocab_size: int, output_len: int) -> list[Turn]:
    """Three of ten requests bring a document of 512 to 1,024 ids that nobody asks about again.

    The others begin with one of 48 prompts of 256 ids, by Zipf's law, and end with a question of 16 to 96.
    """
    prompts = [_ids(draw, vocab_size, 256, 256) for _ in range(48)]
    turns = []
    for session, rank in enumerate(_zipf(draw, len(prompts), num_requests)):
        if draw.random() < 0.3:
            turns.append(Turn(session, _ids(draw, vocab_size, 512, 1024), output_len))
        else:
            ids = prompts[rank] + _ids(draw, vocab_size, 16, 96)
            turns.append(Turn(session, ids, output_len, (f"hot-{rank}", len(prompts[rank]))))
    return turns


TRACES: dict[str, Callable[[random.Random, int, int, int], list[Turn]]] = {"chat": chat, "system": system, "scan": scan}


def as_trace(turns: Sequence[Turn]) -> list[TraceRequest]:
    """The same for ``headrace simulate``: all are there at once, for ``--max-concurrency 1``."""
    totals: dict[int, int] = {}
    requests = []
    for turn in turns:
        prompt = totals.get(turn.session, 0) + len(turn.ids)
        totals[turn.session] = prompt + turn.output_len
        shared = (turn.shared,) if turn.shared else ()
        own = (f"session-{turn.session}", prompt - sum(count for _, count in shared))
        requests.append(TraceRequest(arrival_s=0.0, prompt=prompt, output=turn.output_len, prefix=(*shared, own)))
    return requests


def longest(turns: Sequence[Turn]) -> int:
    """Tokens of the longest request with its output."""
    totals: dict[int, int] = {}
    for turn in turns:
        totals[turn.session] = totals.get(turn.session, 0) + len(turn.ids) + turn.output_len
    return max(totals.values())


def blocks_wanted(turns: Sequence[Turn], block_size: int) -> int:
    """The fewest blocks with which nothing that comes again is computed twice, whoever knew what comes.

    A block is wanted from its first request to its last, and each request wants those that its tokens fill or touch.
    """
    tables = list(_tables(turns, block_size))
    last = {block: number for number, (blocks, _) in enumerate(tables) for block in blocks}
    kept: set[int] = set()
    most = 0
    for number, (blocks, num_blocks) in enumerate(tables):
        most = max(most, len(kept.difference(blocks)) + num_blocks)
        kept.update(block for block in blocks if last[block] > number)
        kept.difference_update(block for block in blocks if last[block] == number)
    return most


def _tables(turns: Sequence[Turn], block_size: int) -> Iterator[tuple[list[int], int]]:
    """For each request its full blocks, as numbers of equal prefixes, and all its blocks counted.

    An answer's ids are unknown before; they are as good as any that only its session knows.
    """
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    sessions = Sessions()
    for turn in turns:
        sessions.answered(turn, [-1 - turn.session] * turn.output_len)
        # The KV of the last token is never written.
        tokens = sessions.prompt(dataclasses.replace(turn, ids=[]))[:-1]
        parent, table = -1, []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = numbers.setdefault((parent, tuple(tokens[start : start + block_size])), len(numbers))
            table.append(parent)
        yield table, -(-len(tokens) // block_size)


def _zipf(draw: random.Random, num_prompts: int, count: int) -> list[int]:
    """``count`` numbers below ``num_prompts``; *k* is drawn with a weight of 1/(*k* + 1)."""
    return draw.choices(range(num_prompts), [1 / rank for rank in range(1, num_prompts + 1)], k=count)


def _ids(draw: random.Random, vocab_size: int, low: int, high: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(draw.randint(low, high))]
