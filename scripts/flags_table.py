#!/usr/bin/env python3
"""Writes the table of settings in docs/operations.md from ``shared.config.Settings``; ``--check`` only compares."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any, get_args, get_origin, get_type_hints

from shared.config import SERVICES, Settings

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"
SHORT = dict(zip(SERVICES, ("gateway", "tokenizer", "engine", "worker"), strict=True))


def table() -> str:
    """The table, one row per setting, in the order of ``Settings``."""
    hints = get_type_hints(Settings)
    rows = ["| flag | default | taken by | meaning |", "|---|---|---|---|"]
    rows += [_row(field, hints[field.name]) for field in dataclasses.fields(Settings)]
    return "\n".join(rows)


def updated(page: str) -> str:
    """The page with a fresh table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _row(field: dataclasses.Field[Any], hint: Any) -> str:
    flag = "--" + field.name.replace("_", "-")
    several = get_origin(hint) is list
    default = [] if several else field.default
    if hint is bool:
        flag = flag.replace("--", "--[no-]", 1)
        shown = "on" if default else "off"
    else:
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        kind = kinds[0] if kinds else hint
        choices = field.metadata["choices"]
        value = "\\|".join(choices) if choices else {int: "N", float: "X"}.get(kind, "TEXT")
        flag += f" {value}{' …' if several else ''}"
        shown = "" if default in (None, []) else str(default)
    services = field.metadata["services"]
    taken = "all" if len(services) == len(SERVICES) else ", ".join(SHORT[s] for s in services) or "launcher"
    return f"| `{flag}` | {shown} | {taken} | {field.metadata['help'].replace('|', chr(92) + '|')} |"


def main() -> int:
    page = PAGE.read_text()
    fresh = updated(page)
    if "--check" in sys.argv[1:]:
        if page != fresh:
            print(f"{PAGE} is behind shared/config.py: run scripts/flags_table.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
