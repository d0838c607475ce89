"""Headrace's front door: the command line, the local launcher, and models called from Python (``LLM``).

What it exports is imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.async_llm import AsyncLLM
    from headrace.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from headrace.launcher import Launcher
    from headrace.llm import LLM
    from headrace.offline.errors import EngineDead, InvalidRequest, RequestFailed
    from headrace.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from headrace.sampling_params import RequestOutputKind, SamplingParams
    from headrace.supervisor import Supervisor

    __version__: str

_EXPORTS = {
    "LLM": "headrace.llm",
    "AsyncLLM": "headrace.async_llm",
    "BeamSearchOutput": "headrace.beam_search",
    "BeamSearchParams": "headrace.beam_search",
    "BeamSearchSequence": "headrace.beam_search",
    "CompletionOutput": "headrace.outputs",
    "EngineDead": "headrace.offline.errors",
    "InvalidRequest": "headrace.offline.errors",
    "Launcher": "headrace.launcher",
    "Logprob": "headrace.outputs",
    "RequestFailed": "headrace.offline.errors",
    "RequestMetrics": "headrace.outputs",
    "RequestOutput": "headrace.outputs",
    "RequestOutputKind": "headrace.sampling_params",
    "SamplingParams": "headrace.sampling_params",
    "Supervisor": "headrace.supervisor",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineDead",
    "InvalidRequest",
    "Launcher",
    "Logprob",
    "RequestFailed",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Supervisor",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from headrace.version import installed_version

        return installed_version()
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
