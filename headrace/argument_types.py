"""Numbers on a command line: ``type=`` of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def above_zero(text: str) -> float:
    """A number above 0, perhaps infinite."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def at_least(low: int) -> Callable[[str], int]:
    """The type of a flag whose value is a whole number from ``low`` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return parse


count, positive = at_least(0), at_least(1)
