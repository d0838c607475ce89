"""``headrace chat [MESSAGE]``: one answer, or a conversation, on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence

from headrace.client import RequestFailed, stream_chat
from headrace.prompting import (
    EVENT_LIMIT_S,
    Figures,
    api_key_of,
    exit_code_of,
    fields_of,
    make_parser,
    note,
    print_answer,
    server_for,
)
from shared.lifecycle import EXIT_OK

PROG = "headrace chat"
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def main(argv: Sequence[str]) -> int:
    """Answer MESSAGE, or hold a conversation, a line of input a turn. Returns an exit code."""
    parser = make_parser(PROG, f"Ask MESSAGE, or without it hold a conversation: {HELP}.")
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="the question; without it, one per line of input")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    args = parser.parse_args(list(argv))
    return exit_code_of(PROG, lambda: _run(args))


class Conversation:
    """The messages so far, and the server that answers them."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self._args = args
        self._url = url
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Back to the system prompt."""
        system = self._args.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, message: str) -> Figures:
        """Print the answer to ``message`` and keep both.

        What has arrived of an answer that is interrupted is kept as well; a message without any answer is forgotten.
        Raises ``RequestFailed``.
        """
        asked = [*self._messages, {"role": "user", "content": message}]
        body = fields_of(self._args) | {"messages": asked}
        replies = stream_chat(self._url, body, api_key=api_key_of(self._args), timeout_s=EVENT_LIMIT_S)
        pieces: list[str] = []
        try:
            return print_answer(replies, pieces.append)
        finally:
            if answer := "".join(pieces):
                self._messages = [*asked, {"role": "assistant", "content": answer}]


def _run(args: argparse.Namespace) -> int:
    with server_for(args) as url:
        conversation = Conversation(args, url)
        if args.message is not None:
            note(args, str(conversation.ask(args.message)))
        elif sys.stdin.isatty():
            _talk(args, conversation)
        else:
            for line in map(str.strip, sys.stdin):
                if not _obey(args, conversation, line):
                    break
    return EXIT_OK


def _talk(args: argparse.Namespace, conversation: Conversation) -> None:
    """Turns with a person, whom neither Ctrl-C nor a refused request throws out."""
    note(args, HELP)
    read = _reader()
    while True:
        try:
            if not _obey(args, conversation, read().strip()):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except RequestFailed as error:
            print(f"{PROG}: error: {error}", file=sys.stderr)


def _obey(args: argparse.Namespace, conversation: Conversation, line: str) -> bool:
    """Take one line of input; False when it ends the conversation."""
    if line == "/exit":
        return False
    if line == "/reset":
        conversation.reset()
    elif line == "/help":
        note(args, HELP)
    elif line:
        note(args, str(conversation.ask(line)))
    return True


def _reader() -> Callable[[], str]:
    """A function that reads a line from a person, with history and editing where the platform has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    return lambda: input("> " if sys.stdout.isatty() else "")
