"""The version of the installed distribution."""

from __future__ import annotations

import importlib.metadata


def installed_version() -> str:
    """As ``pip show headrace`` says; ``0+unknown`` when it runs from a source tree that was never installed."""
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
