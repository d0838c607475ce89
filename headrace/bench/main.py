"""``headrace bench KIND …``: one table of benchmarks, each imported when it is called."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

from shared.lifecycle import EXIT_OK, EXIT_USAGE

PROG = "headrace bench"
KINDS = {
    "serve": "a running server under load: throughput, TTFT, TPOT, inter-token latency, goodput",
    "throughput": "many requests at once in an engine without HTTP",
    "latency": "one batch after another in an engine without HTTP",
    "prefix": "requests that share long prefixes, with and without the prefix cache",
    "mixed": "steady requests while long prompts come: gaps between tokens, time to first token",
    "startup": "time from the start of an engine to its first token",
}


def main(argv: Sequence[str]) -> int:
    """Run ``headrace bench KIND …`` and return its exit code."""
    if not argv:
        print(usage(), file=sys.stderr)
        return EXIT_USAGE
    kind, *rest = argv
    if kind in ("-h", "--help"):
        print(usage())
        return EXIT_OK
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the kinds are {', '.join(KINDS)}"
        print(f"{PROG}: error: unknown kind {kind!r}; {hint}", file=sys.stderr)
        return EXIT_USAGE
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"headrace.bench.{kind}").main
    return run(rest)


def usage() -> str:
    """The help page."""
    width = max(map(len, KINDS))
    lines = [f"  {kind:<{width}}  {summary}" for kind, summary in KINDS.items()]
    return "\n".join(
        [f"usage: {PROG} KIND [arguments]", "", "kinds:", *lines, "", f"{PROG} KIND --help   lists a kind's flags"]
    )
