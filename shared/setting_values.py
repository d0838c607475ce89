"""Values of settings: the type that a field's annotation stands for, from text and from YAML."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin


def kind_of(hint: Any) -> tuple[type, bool]:
    """The type of one value, and whether there may be several."""
    kinds = [a for a in get_args(hint) if a is not type(None)]
    return (kinds[0] if kinds else hint), get_origin(hint) is list


def file_value(given: Any, hint: Any, choices: Sequence[str] | None) -> Any:
    """A YAML value as a setting's type; numbers take the forms that flags take. Raises ``ValueError`` in words."""
    kind, is_list = kind_of(hint)
    if is_list:
        items = given if isinstance(given, list) else [given]
        return [file_value(item, kind, None) for item in items]
    if kind is bool:
        if not isinstance(given, bool):
            raise ValueError(f"{given!r} is not true or false")
        return given
    if kind is str:
        if not isinstance(given, str):
            raise ValueError(f"{given!r} is not text; put it in quotes")
        if choices and given not in choices:
            raise ValueError(f"{given!r} is not one of {', '.join(choices)}")
        return given
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ValueError(f"{given!r} is not a number")
    return CONVERTERS[kind](str(given))


def _whole(text: str) -> int:
    """An integer; as in vLLM ``16k`` is 16,000 and ``16K`` 16,384, and likewise m/M and g/G."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    number, unit = match.groups()
    base = 1024 if unit.isupper() else 1000
    value = float(number) * base ** " kmg".index(unit.lower() or " ")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def _boolean(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


CONVERTERS: dict[type, Callable[[str], Any]] = {int: _whole, float: float, str: str, bool: _boolean}
