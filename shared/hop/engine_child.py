"""A child that produces one row for each of hundreds of logs in every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.hop.child import Child
from shared.hop.log import Log
from shared.hop.outbox import Outbox
from shared.messages import Int32, PromptInfo, TokenDelta


class EngineChild(Child):
    """An engine's ``Child``: it keeps handles and offsets in arrays, so that the usual step costs array operations."""

    def append_rows(
        self, logs: Sequence[Log], rows: Int32, tokens: Int32, records: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        """Add one token row to each of these logs (all of a step).

        They go out at once where nothing else is due, else with the next ``flush``, in merged ranges. What goes with
        a first row (``Log.prompt``) is set before.

        Args:
            logs: [k], live.
            rows: [k, 4] as in ``TokenDelta``: handle, choice, how many rows the log has, 1.
            tokens: [k] their ids.
            records: (index into ``logs``, log-probability record), for each log whose request asked for them.
        """
        outbox = self._clear_outbox()
        values = tokens.tolist()
        for index, record in records:
            logs[index].records.append(record)
        if outbox is None:
            for log, token in zip(logs, values, strict=True):
                log.ids.append(token)
                self.mark(log)
            return
        for log, token, sent in zip(logs, values, (rows[:, 2] + 1).tolist(), strict=True):
            log.ids.append(token)
            log.sent = sent
        delta = TokenDelta(rows, tokens, [], [(index, [record]) for index, record in records], _prompts(logs, rows))
        if logs and not self._send(outbox.peer, delta):
            outbox.blocked_until = self._clock() + self._timers.retry_s
            for log in logs:
                log.sent -= 1
                self.mark(log)

    def _clear_outbox(self) -> Outbox | None:
        """The outbox of the only parent, if everything for it was sent: then each log of its has been sent whole."""
        if len(self._outboxes) != 1:
            return None
        outbox = next(iter(self._outboxes.values()))
        return None if outbox.dirty or outbox.held or outbox.blocked_until > self._clock() else outbox


def _prompts(logs: Sequence[Log], rows: Int32) -> list[tuple[int, PromptInfo]]:
    """What goes with the first rows of logs."""
    firsts = ((index, logs[index].prompt) for index in np.flatnonzero(rows[:, 2] == 0).tolist())
    return [(index, prompt) for index, prompt in firsts if prompt is not None]
