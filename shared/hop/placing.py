"""What a parent says about a request: Submit, and its entry in an Ack."""

from __future__ import annotations

import numpy as np

from shared.hop.request import Request, lower_of
from shared.messages import FINISHED, AckEntry, Submit


def submit_of(request: Request) -> Submit:
    """The Submit of its present attempt, with all rows that are here."""
    lower, logs = lower_of(request), request.logs
    return Submit(
        rid=request.rid,
        attempt=lower.attempt,
        handle=lower.handle,
        spec=lower.spec,
        counts=np.array([len(log.ids) for log in logs], np.int32),
        tokens=np.concatenate([np.frombuffer(log.ids, np.int32) for log in logs]),
        ends=[log.end for log in logs],
        known=[
            log.known() if len(log.ids) >= known.count else known
            for log, known in zip(logs, request.known, strict=True)
        ],
        suspect=lower.suspect,
    )


def ack_entry(request: Request, *, resync: bool, beat: bool = False) -> AckEntry:
    """What is held of each choice; one that has ended is finished."""
    lower = lower_of(request)
    have = [log.rows if log.end is None else FINISHED for log in request.logs]
    return AckEntry(request.rid, lower.attempt, lower.handle, have, resync, beat)
