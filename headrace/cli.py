"""The ``headrace`` command: one table of subcommands, each imported when it is called."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shared.lifecycle import EXIT_OK, EXIT_USAGE


class Command(NamedTuple):
    """A subcommand: ``target`` is ``module:function``, which takes the arguments and returns the exit code."""

    target: str
    summary: str


COMMANDS = {
    "serve": Command("headrace.launcher:serve", "start a model's processes and serve the OpenAI API"),
    "complete": Command("headrace.complete:main", "continue a text on the terminal"),
    "chat": Command("headrace.chat:main", "talk with a model on the terminal"),
    "bench": Command("headrace.bench.main:main", "measure a server or an engine"),
    "simulate": Command("headrace.simulate.main:main", "size a server: run a trace against a model of a GPU"),
    "run-batch": Command("headrace.run_batch:main", "answer the requests of an OpenAI batch file"),
    "fetch": Command("headrace.fetch:main", "download a model of the Hugging Face hub into the local cache"),
    "tune": Command("headrace.tune:main", "measure a model's matrix products on the GPU for later starts"),
    "keys": Command("headrace.keys:main", "write the CURVE keys of tcp links into a folder"),
    "collect-env": Command("headrace.collect_env:main", "print versions, hardware and variables for a bug report"),
    "version": Command("headrace.cli:version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``headrace COMMAND …`` and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        print(usage(), file=sys.stderr)
        return EXIT_USAGE
    name, rest = args[0], args[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return EXIT_OK
    if name in ("-V", "--version"):
        name = "version"
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"headrace: error: unknown command {name!r}; {hint}", file=sys.stderr)
        return EXIT_USAGE
    return _load(COMMANDS[name].target)(rest)


def usage() -> str:
    """The help page."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: headrace COMMAND [arguments]",
            "",
            "commands:",
            *lines,
            "",
            "headrace serve demo       serves the small built-in model on http://127.0.0.1:8000",
            "headrace COMMAND --help   lists a command's flags",
        ]
    )


def version(_argv: Sequence[str]) -> int:
    """``headrace version``."""
    from headrace.version import installed_version

    print(f"headrace {installed_version()}")
    return EXIT_OK


def _load(target: str) -> Callable[[Sequence[str]], int]:
    module, _, function = target.partition(":")
    loaded: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return loaded


if __name__ == "__main__":
    sys.exit(main())
