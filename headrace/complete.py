"""``headrace complete [PROMPT]``: continue a text, on the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headrace.client import stream_completion
from headrace.prompting import (
    EVENT_LIMIT_S,
    api_key_of,
    exit_code_of,
    fields_of,
    make_parser,
    note,
    print_answer,
    server_for,
)
from shared.lifecycle import EXIT_OK

PROG = "headrace complete"
MAX_TOKENS = 256
"""Instead of the API's 16, which end most texts in their first line."""


def main(argv: Sequence[str]) -> int:
    """Print the continuation as it is generated. Returns an exit code."""
    parser = make_parser(
        PROG,
        f"Continue PROMPT without a chat template, by at most {MAX_TOKENS} tokens unless --max-tokens says otherwise.",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text; without it, standard input but for a last newline"
    )
    parser.set_defaults(max_tokens=MAX_TOKENS)
    args = parser.parse_args(list(argv))
    return exit_code_of(PROG, lambda: _complete(args))


def _complete(args: argparse.Namespace) -> int:
    prompt = _standard_input(args) if args.prompt is None else args.prompt
    with server_for(args) as url:
        body = fields_of(args) | {"prompt": prompt}
        replies = stream_completion(url, body, api_key=api_key_of(args), timeout_s=EVENT_LIMIT_S)
        note(args, str(print_answer(replies)))
    return EXIT_OK


def _standard_input(args: argparse.Namespace) -> str:
    if sys.stdin.isatty():
        note(args, "The prompt, please; Ctrl-D on a line of its own ends it.")
    return sys.stdin.read().removesuffix("\n")
