"""``headrace run-batch``: the requests of an OpenAI batch file, sent to a server; interrupted runs are continued."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from headrace.batch_client import BatchClient
from headrace.batch_feeder import Feeder
from headrace.batch_format import BatchRequest, Refusal, Result, read_requests, refused
from headrace.batch_journal import STANDARD, BatchFileError, Journal
from headrace.client import RequestFailed, readiness
from headrace.local_server import local_server
from headrace.prompting import URL_VARIABLE, exit_code_of, note, server_url
from shared.config import Settings, parse_with_flags
from shared.lifecycle import EXIT_FAILURE, EXIT_OK, EXIT_USAGE

PROG = "headrace run-batch"
DESCRIPTION = (
    "Send the requests of an OpenAI batch file to a server and write their results as they complete. "
    "The same command again does what the output file lacks. With --model, flags of headrace serve are taken too."
)
MAX_CONCURRENCY = 256
"""As many as a server on a CPU takes into one step by default."""
MAX_RETRIES = 10
"""With their pauses, about two minutes: what a server takes to start again."""
TIMEOUT_S = 3600.0
SYNC_EVERY_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Run the batch. Returns an exit code: 0 only when every line of the input has succeeded, now or before."""
    settings, args = parse_with_flags(
        None, argv, _add_flags, defaults={"model": "", "target_itl_ms": 0.0}, prog=PROG, description=DESCRIPTION
    )
    terminated = _interrupt_on_sigterm()
    try:
        server = _server(args, settings, argv)
        _check_files(args)
        code = exit_code_of(PROG, lambda: _run_batch(args, server))
        return 128 + signal.SIGTERM if terminated.is_set() else code
    except (BatchFileError, UsageError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE


def _interrupt_on_sigterm() -> threading.Event:
    """Let SIGTERM do what Ctrl-C does. The event tells that it came.

    An event loop makes a cancellation of Ctrl-C; an exception of our own would come up in the middle of any callback.
    """
    came = threading.Event()

    def on_sigterm(_signum: int, _frame: object) -> None:
        came.set()
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, on_sigterm)
    return came


class UsageError(Exception):
    """Flags that do not go together; the text says which."""


class Server(NamedTuple):
    """Whom to ask: the server at ``url`` or, where that is "", one of our own."""

    url: str
    model: str
    flags: list[str]
    """Of ``headrace serve``."""
    api_key: str


@dataclasses.dataclass
class Tally:
    """What became of the lines of the input; a line is counted once."""

    earlier: int = 0
    """Succeeded in earlier runs."""
    succeeded: int = 0
    failed: int = 0
    """In this run or, unless they are tried again, in earlier ones."""
    invalid: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def summary(self, seconds: float) -> str:
        """One line for people."""
        parts = [f"{self.earlier + self.succeeded} succeeded"]
        parts[0] += f" ({self.earlier} of them earlier)" if self.earlier else ""
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.invalid} invalid"] if self.invalid else []
        rate = self.completion_tokens / seconds if seconds > 0 else 0.0
        return (
            f"{', '.join(parts)}; {self.prompt_tokens} prompt tokens, {self.completion_tokens} output tokens "
            f"in {seconds:.1f} s ({rate:.1f} output tokens/s)"
        )


class Batch:
    """One run over an input file.

    Args:
        source: the input. One that can be rewound is read twice: to check and count it, then to run it.
    """

    def __init__(self, args: argparse.Namespace, source: BinaryIO, journal: Journal) -> None:
        self.tally = Tally()
        self.left: int | None = None
        """Requests that have no result yet; None while the input's end is not known."""
        self._args = args
        self._source = source
        self._journal = journal
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Since the first request; 0 without one."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def survey(self) -> None:
        """Check the input up front, if it can be read twice: write results of refused lines and count requests."""
        if self._source.seekable():
            self.left = sum(1 for _ in self._checked())
            self._source.seek(0)

    async def run(self, url: str, api_key: str) -> None:
        """Send what has no result yet.

        Raises:
            RequestFailed: the server is not there any more.
            OSError: a file cannot be read or written.
        """
        self._began = time.monotonic()
        args, left = self._args, self.left
        feeder = Feeder(self._checked() if left is None else self._pending())
        shown = sys.stderr.isatty() if args.progress is None else args.progress
        with tqdm(total=left, desc="batch", unit="req", disable=not shown, file=sys.stderr) as bar:
            async with BatchClient(url, api_key, args.max_retries, args.timeout) as client:
                try:
                    async with asyncio.TaskGroup() as group:
                        syncing = group.create_task(self._sync())
                        count = args.max_concurrency if left is None else min(args.max_concurrency, left)
                        workers = [group.create_task(self._work(feeder, client, bar)) for _ in range(count)]
                        await asyncio.wait(workers)
                        syncing.cancel()
                except BaseExceptionGroup as errors:
                    raise errors.exceptions[0] from None
                finally:
                    feeder.close()
        self.left = 0

    async def _work(self, feeder: Feeder[BatchRequest], client: BatchClient, bar: tqdm[Any]) -> None:
        while (request := await feeder.next()) is not None:
            result = await client.ask(request)
            self._journal.add(result)
            self._count(result)
            figures = {"failed": self.tally.failed, "retries": client.retries}
            rate = self.tally.completion_tokens / self.seconds
            bar.set_postfix(figures, tok_s=f"{rate:.1f}", refresh=False)
            bar.update()

    def _count(self, result: Result) -> None:
        tally = self.tally
        if result.ok:
            tally.succeeded += 1
        else:
            tally.failed += 1
        tally.prompt_tokens += result.usage.prompt_tokens
        tally.completion_tokens += result.usage.completion_tokens
        if self.left is not None:
            self.left -= 1

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            await asyncio.to_thread(self._journal.sync)

    def _checked(self) -> Iterator[BatchRequest]:
        """The requests that have no result yet. Counts the other lines, and writes results of refused ones."""
        past, tally = self._journal.past, self.tally
        for item in read_requests(self._source):
            if isinstance(item, Refusal):
                tally.invalid += 1
                if item.line not in past.refused:
                    self._journal.add(refused(item))
            elif item.custom_id in past.succeeded:
                tally.earlier += 1
            elif item.custom_id in past.failed:
                tally.failed += 1
            else:
                yield item

    def _pending(self) -> Iterator[BatchRequest]:
        """What ``survey`` has counted."""
        past = self._journal.past
        for item in read_requests(self._source):
            if isinstance(item, BatchRequest) and not past.has(item.custom_id):
                yield item


def _run_batch(args: argparse.Namespace, server: Server) -> int:
    with (
        _input(args.input_file) as source,
        Journal(args.output_file, args.error_file, args.retry_failed) as journal,
    ):
        batch = Batch(args, source, journal)
        batch.survey()
        if done := batch.tally.earlier + batch.tally.failed:
            note(args, f"{args.output_file} has the results of {done} requests; {batch.left} are left.")
        try:
            if batch.left != 0:
                with _running(args, server) as url:
                    asyncio.run(batch.run(url, server.api_key))
        finally:
            _say_end(args, batch)
    tally = batch.tally
    return EXIT_FAILURE if tally.failed or tally.invalid else EXIT_OK


def _say_end(args: argparse.Namespace, batch: Batch) -> None:
    note(args, batch.tally.summary(batch.seconds))
    if batch.left != 0:
        note(args, "Not finished: the same command does the rest.")
    elif batch.tally.failed or batch.tally.invalid:
        note(args, "The same command with --retry-failed tries those again that did not succeed.")


@contextlib.contextmanager
def _running(args: argparse.Namespace, server: Server) -> Iterator[str]:
    """The URL of the server to ask. Raises ``RequestFailed`` if it is not there, or as ``local_server`` does."""
    if not server.url:
        with local_server(server.model, functools.partial(note, args), server.flags, progress=not args.quiet) as url:
            yield url
        return
    if not readiness(server.url).answered:
        raise RequestFailed(f"nothing answers at {server.url}")
    yield server.url


@contextlib.contextmanager
def _input(name: str) -> Iterator[BinaryIO]:
    try:
        # Not sys.stdin.buffer, which the interpreter could not close at its end while a thread waits for it.
        source = open(0, "rb", closefd=False) if name == STANDARD else open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise BatchFileError(f"cannot read {name}: {error.strerror}") from error
    ended = False
    try:
        yield source
        ended = True
    finally:
        # A thread may still wait for a pipe, and closing would wait with it.
        if ended or source.seekable():
            source.close()


def _check_files(args: argparse.Namespace) -> None:
    paths: dict[pathlib.Path, str] = {}
    for flag in ("input_file", "output_file", "error_file"):
        name = getattr(args, flag)
        if name is None or name == STANDARD:
            continue
        path = pathlib.Path(name).resolve()
        if path in paths:
            raise UsageError(f"--{paths[path]} and --{flag} are the same file".replace("_", "-"))
        paths[path] = flag


def _server(args: argparse.Namespace, settings: Settings, argv: Sequence[str]) -> Server:
    """Whom the flags mean: ``--url``, else the model, else the server that the environment names."""
    api_key = settings.api_key[0] if settings.api_key else ""
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    _add_flags(own)
    flags = own.parse_known_args(list(argv))[1]
    names = {flag.partition("=")[0] for flag in flags if flag.startswith("--")}
    if args.url is not None:
        if useless := sorted(names - {"--api-key"}):
            raise UsageError(f"{', '.join(useless)}: for a server that is started, not for the one at --url")
        return Server(args.url, "", [], api_key)
    if useless := sorted(names & {"--host", "--port"}):
        raise UsageError(f"{', '.join(useless)}: the server that is started gets a free port of the loopback address")
    if settings.model:
        # Nobody reads the outputs while they grow; whole steps are faster.
        return Server("", settings.model, [*flags, f"--target-itl-ms={settings.target_itl_ms}"], api_key)
    if url := os.environ.get(URL_VARIABLE):
        return Server(server_url(url), "", [], api_key)
    raise UsageError("give --model MODEL to serve meanwhile, or --url URL of a server that runs")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument(
        "-i", "--input-file", metavar="FILE", required=True, help="requests, one JSON a line; - is stdin"
    )
    files.add_argument("-o", "--output-file", metavar="FILE", required=True, help="results, added to; - is stdout")
    files.add_argument("-e", "--error-file", metavar="FILE", help="results that are no success (default: output file)")
    files.add_argument("--retry-failed", action="store_true", help="forget earlier results that are no success")
    sending = parser.add_argument_group("sending")
    sending.add_argument(
        "--url", type=server_url, help=f"ask this server and start none (default: {URL_VARIABLE}, without --model)"
    )
    sending.add_argument(
        "--max-concurrency",
        type=_at_least(int, 1),
        default=MAX_CONCURRENCY,
        metavar="N",
        help=f"requests that are under way at the same time (default: {MAX_CONCURRENCY})",
    )
    sending.add_argument(
        "--max-retries",
        type=_at_least(int, 0),
        default=MAX_RETRIES,
        metavar="N",
        help=f"for each request: after 429, 503, a lost connection (default: {MAX_RETRIES})",
    )
    sending.add_argument(
        "--timeout",
        type=_at_least(float, 0.001),
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds that one try may take, waiting in the server included (default: {TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="a bar on stderr (default: if it is a terminal)"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing on stderr but errors")


def _at_least(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    convert.__name__ = "number"
    return convert
