"""``headrace tune MODEL``: measure a model's matrix products on the GPU; later starts choose their kernels by it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shared.config import parse_with_flags
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_OK
from shared.model_config import load_model_config
from shared.model_source import resolve_model

SECONDS = 900.0


def main(argv: Sequence[str]) -> int:
    """Takes the flags of ``headrace serve``, of which those of the model count. Returns an exit code."""
    settings, options = parse_with_flags(
        None,
        argv,
        _add_flags,
        prog="headrace tune",
        description="Measure which kernel computes each matrix product of MODEL fastest on this machine's GPU, and "
        "keep that in ~/.cache/headrace/gemm for later starts. What is known is not measured again.",
        positional_model=True,
    )
    try:
        config = load_model_config(resolve_model(settings.model, settings.revision))
        measured = 0
        from gpu_worker.tuning import tune_model

        for measured in tune_model(config, settings.dtype, options.seconds):
            print(f"{measured} products measured", file=sys.stderr)
    except StartupError as error:
        print(f"headrace tune: {error}", file=sys.stderr)
        return EXIT_CONFIG
    print(f"{measured} products were measured; the next start uses what was found")
    return EXIT_OK


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"time after which to stop (default: {SECONDS:g})"
    )
