"""Which requests may be the cause of a child's crashes.

The parent counts, for each request, the crashes of any life of a child that the request was aboard, also after it
moved away. After two it is a suspect and runs alone (``shared.hop.quarantine``). Only crashes in quarantine convict,
and three of them: one may be bad luck.
"""

from __future__ import annotations

from shared.hop.quarantine import CLEAR_ROWS
from shared.hop.request import Lower, Request, Source, lower_of

STRIKES = 2
"""Crashes that make a suspect."""
CONVICT = 3
"""Crashes in quarantine that convict."""


def was_aboard(lower: Lower, crashed: Source) -> bool:
    """Whether the request was with the life of a child that crashed."""
    return lower.touched.get(crashed.peer) == crashed.boot


def strike(lower: Lower, crashed: Source) -> bool:
    """Count a crash; True: the request is convicted."""
    del lower.touched[crashed.peer]
    lower.strikes += 1
    lower.alone += lower.go == crashed
    lower.suspect = lower.strikes >= STRIKES
    return lower.alone >= CONVICT


def clear_if_proven(request: Request) -> None:
    """A suspect that brought enough rows in quarantine is no longer one."""
    lower = lower_of(request)
    if lower.go is not None and request.size >= lower.base + CLEAR_ROWS:
        lower.go, lower.suspect, lower.strikes, lower.alone = None, False, 0, 0
