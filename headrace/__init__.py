"""Headrace's front door: the command line and the local launcher. What it exports is imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Launcher": "headrace.launcher",
    "Supervisor": "headrace.supervisor",
}

__all__ = ["Launcher", "Supervisor", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from headrace.version import installed_version

        return installed_version()
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
