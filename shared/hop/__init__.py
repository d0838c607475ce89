"""The recovery protocol of one hop, as pure bookkeeping: no sockets, no event loop, no time but an injected clock.

- an engine has a ``Child``,
- a tokenizer has a ``Relay``: a ``Child`` and a ``Parent`` for the same requests,
- a gateway has a ``Parent``.

``docs/protocol.md`` states the rules.
"""

from shared.hop.child import ENGINE, TOKENIZER, Child, ChildEvents, ChildRole
from shared.hop.engine_child import EngineChild
from shared.hop.intake import Growth
from shared.hop.log import Log, digest
from shared.hop.parent import Parent, ParentEvents
from shared.hop.relay import Relay, RelayEvents
from shared.hop.request import NOTHING_KNOWN, Request, Source
from shared.hop.timers import RunningClock, Timers

__all__ = [
    "ENGINE",
    "NOTHING_KNOWN",
    "TOKENIZER",
    "Child",
    "ChildEvents",
    "ChildRole",
    "EngineChild",
    "Growth",
    "Log",
    "Parent",
    "ParentEvents",
    "Relay",
    "RelayEvents",
    "Request",
    "RunningClock",
    "Source",
    "Timers",
    "digest",
]
