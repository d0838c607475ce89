"""``python -m tests.chaos.deadly_process KIND [flags]``: a service that is killed by any request whose ids hold a run.

It is the service's own ``__main__``; only the method that is given new requests looks at their ids first.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from shared.config import ENGINE, TOKENIZER, WORKER

RUN = (217, 223, 242)
"""Ids that no other prompt has one after the other."""
_BYTES = np.array(RUN, np.int32).tobytes()


def deadly(method: Callable[[Any, Any], None], ids_of: Callable[[Any], bytes]) -> Callable[[Any, Any], None]:
    """``method``, but its process ends when the ids of its argument, raw int32, hold ``RUN``."""

    def checked(self: Any, asked: Any) -> None:
        if _BYTES in ids_of(asked):
            os.kill(os.getpid(), signal.SIGKILL)
        method(self, asked)

    return checked


def arm(kind: str) -> None:
    """Let this process, a service of ``kind``, be killed."""
    if kind == WORKER:
        from gpu_worker.worker import Worker

        Worker._on_step = deadly(Worker._on_step, lambda step: step.new_tokens.tobytes())  # type: ignore[method-assign]
    elif kind == ENGINE:
        from core_engine.frontend_link import FrontendLink

        FrontendLink.begin = deadly(FrontendLink.begin, lambda asked: asked.spec.prompt)  # type: ignore[method-assign]
    elif kind == TOKENIZER:
        from tokenizer_service.requests import Requests

        Requests.begin = deadly(Requests.begin, lambda asked: asked.spec.ids or b"")  # type: ignore[method-assign]
    else:
        raise SystemExit(f"no request can be made to kill a {kind}")


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    arm(kind)
    runpy.run_module(kind, run_name="__main__", alter_sys=True)
