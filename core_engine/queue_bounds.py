"""How many requests may wait: more are refused at once, so that those that wait are served in time."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from core_engine.metrics import EngineMetrics
from core_engine.replica import Replica
from core_engine.waiting_queue import WaitingQueue
from shared.errors import ErrorCode, RequestError


class QueueBounds:
    """The bounds of the waiting queue. Who will find a free seat does not wait for one.

    Args:
        most: choices that may wait.
        most_tokens: tokens of their prompts; None: any number.
    """

    def __init__(self, most: int, most_tokens: int | None, metrics: EngineMetrics) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._metrics = metrics
        self._left_over = 0

    def planned(self, waiting: WaitingQueue) -> None:
        """A replica has just taken whom it could."""
        self._left_over = len(waiting)

    def check(
        self,
        waiting: WaitingQueue,
        replicas: SequenceOf[Replica],
        max_num_seqs: int,
        newcomers: int,
        prompt_len: int,
    ) -> None:
        """Whether ``newcomers`` choices with a prompt of so many tokens may wait.

        Who comes to an idle engine, or, as to tokens, waits alone, may be more than all that may wait: else it could
        never run.

        Args:
            max_num_seqs: seats of each replica.

        Raises:
            RequestError: the queue is full.
        """
        count, most, most_tokens = len(waiting), self._most, self._most_tokens
        if count + newcomers > most and (count or any(replica.num_active for replica in replicas)):
            seats = self._free_seats(count, replicas, max_num_seqs)
            if count + newcomers > most + seats:
                choices = f", and this one has {newcomers} choices" if newcomers > 1 else ""
                words = f"{max(count - seats, 0)} requests are waiting and at most {most} may{choices}"
                self._refuse("max_num_queued_reqs", words)
        tokens = waiting.num_prompt_tokens
        if most_tokens is not None and count and tokens + newcomers * prompt_len > most_tokens:
            words = f"requests with {tokens} prompt tokens are waiting and at most {most_tokens} may"
            self._refuse("max_num_queued_tokens", words)

    def _free_seats(self, count: int, replicas: SequenceOf[Replica], max_num_seqs: int) -> int:
        """Seats for those that came since the last plan. There are none where somebody was left over by that: memory,
        or what a step may compute, holds newcomers up as well."""
        if self._left_over and count:
            return 0
        open_ = (replica for replica in replicas if not replica.leaving and replica.reserved_for is None)
        return sum(max(max_num_seqs - replica.num_active, 0) for replica in open_)

    def _refuse(self, bound: str, words: str) -> None:
        self._metrics.queue_full(bound)
        raise RequestError(f"{words}; try again later", code=ErrorCode.OVERLOADED)
