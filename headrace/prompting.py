"""What ``headrace complete`` and ``headrace chat`` have in common: flags, which server, printing an answer."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headrace.client import Reply, RequestFailed, readiness
from headrace.launcher import API_KEY_VARIABLE
from headrace.local_server import ServerFailed, local_server
from shared.config import ENV_PREFIX
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = ENV_PREFIX + "URL"
EVENT_LIMIT_S = 600.0
"""How long an answer may stand still: a long prompt on a CPU takes minutes before its first token."""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


class Figures(NamedTuple):
    """What one streamed answer took, as the client sees it."""

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    """From sending the request to the first text."""
    total_s: float

    def __str__(self) -> str:
        decoding = self.total_s - self.ttft_s
        rate = (self.completion_tokens - 1) / decoding if self.completion_tokens > 1 and decoding > 0 else 0.0
        return (
            f"{self.prompt_tokens} prompt tokens, {self.completion_tokens} output tokens, "
            f"first token after {self.ttft_s * 1000:.0f} ms, then {rate:.1f} tokens/s, {self.total_s:.2f} s in all"
        )


def print_answer(replies: Iterator[Reply], on_text: Callable[[str], None] | None = None) -> Figures:
    """Print an answer as it arrives, ended by a newline, and return what it took. Raises as ``replies`` does.

    ``on_text`` gets each piece of text once it is printed, so that the caller has it if the rest never comes.
    """
    began = time.monotonic()
    first: float | None = None
    last = "\n"
    usage: dict[str, Any] = {}
    try:
        for reply in replies:
            if reply.text and first is None:
                first = time.monotonic() - began
            print(reply.text, end="", flush=True)
            last = reply.text or last
            if on_text is not None:
                on_text(reply.text)
            usage = reply.usage or usage
        total = time.monotonic() - began
    finally:
        if not last.endswith("\n"):
            print(flush=True)
    counts = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
    return Figures(*counts, total if first is None else first, total)


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flags of both commands; the caller adds its own."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        type=server_url,
        default=os.environ.get(URL_VARIABLE) or DEFAULT_URL,
        help=f"where the server is (default: {URL_VARIABLE}, else {DEFAULT_URL})",
    )
    server.add_argument(
        "--model", help="ask for this model; if no server answers at URL, serve it meanwhile (demo, a folder, …)"
    )
    server.add_argument("--api-key", metavar="KEY", help=f"key that the server wants (default: {API_KEY_VARIABLE})")
    sampling = parser.add_argument_group("sampling (default: the server's)")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    sampling.add_argument("--top-p", type=float, metavar="X", help="sample from the likeliest tokens of this total")
    sampling.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    sampling.add_argument("--min-p", type=float, metavar="X", help="least probability, as a share of the likeliest's")
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--quiet", action="store_true", help="print the answer and errors, nothing else")
    return parser


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The request fields that the flags give; what no flag gives is left to the server."""
    given = {name: getattr(args, name) for name in ("model", *SAMPLING)}
    return {name: value for name, value in given.items() if value is not None}


def api_key_of(args: argparse.Namespace) -> str:
    """The key to send. The variable may hold several, since a server takes several; the first one counts."""
    key: str | None = args.api_key
    return os.environ.get(API_KEY_VARIABLE, "").partition(",")[0].strip() if key is None else key


def note(args: argparse.Namespace, text: str) -> None:
    """One line for the user that is not part of the answer."""
    if not args.quiet:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def server_for(args: argparse.Namespace) -> Iterator[str]:
    """The URL of the server to ask: ``--url``, or one that serves ``--model`` meanwhile if nobody answers there.

    Raises ``ServerFailed`` and ``StartupError`` as ``local_server`` does.
    """
    url: str = args.url
    if args.model is None or readiness(url).answered:
        yield url
        return
    note(args, f"Nothing answers at {url}; serving {args.model} meanwhile …")
    # The name is given as well, because the environment may say another one.
    flags = [f"--served-model-name={args.model}"]
    with local_server(args.model, functools.partial(note, args), flags, progress=not args.quiet) as own:
        yield own


def exit_code_of(prog: str, run: Callable[[], int]) -> int:
    """Call ``run`` and turn what ends it early into words on standard error and an exit code."""
    try:
        return run()
    except RequestFailed as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except ServerFailed as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return error.code
    except StartupError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except UnicodeDecodeError as error:
        print(f"{prog}: error: the input is not {error.encoding}: {error.reason}", file=sys.stderr)
        return EXIT_FAILURE
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter would complain when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def server_url(text: str) -> str:
    """``host:port`` and the form with ``/v1`` that OpenAI clients take mean the server's root as well."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.path.rstrip("/") not in ("", "/v1"):
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a server, such as {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}"
