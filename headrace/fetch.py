"""``headrace fetch MODEL``: download a model of the Hugging Face hub into the local cache, and start nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared.config import parse_settings
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_OK
from shared.model_source import resolve_model


def main(argv: Sequence[str]) -> int:
    """Takes the flags of ``headrace serve``, of which ``--model`` and ``--revision`` count. Returns an exit code."""
    settings = parse_settings(
        None,
        argv,
        prog="headrace fetch",
        description="Download MODEL into the local cache of the Hugging Face hub.",
        positional_model=True,
    )
    try:
        source = resolve_model(settings.model, settings.revision)
    except StartupError as error:
        print(f"headrace fetch: {error}", file=sys.stderr)
        return EXIT_CONFIG
    print(f"{source.name} is at {source.path}")
    return EXIT_OK
