"""A server of one's own: ``headrace serve MODEL`` as a child, on a free port of the loopback address."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.client import base_url, wait_until_ready
from headrace.launcher import claim_port
from headrace.supervisor import describe_exit, python_argv
from shared.lifecycle import EXIT_FAILURE, PARENT_VARIABLE

LOOPBACK = "127.0.0.1"
READY_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0


class ServerFailed(Exception):
    """The server ended, or did not become ready in ``READY_LIMIT_S``; its log on standard error says why."""

    def __init__(self, message: str, code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.code = code
        """The exit code to pass on."""


@contextlib.contextmanager
def local_server(
    model: str, say: Callable[[str], None], flags: Sequence[str] = (), *, progress: bool = True
) -> Iterator[str]:
    """Run ``headrace serve MODEL`` for as long as the context lasts and give its URL once it is ready.

    Args:
        say: gets each state on the way to ready, one line of words, and the end.
        flags: more flags of ``headrace serve``.
        progress: let it draw progress bars on standard error, where its warnings go.

    Raises:
        ServerFailed: it did not become ready.
        StartupError: there is no free port.
    """
    port = claim_port(LOOPBACK, 0)
    url = base_url(LOOPBACK, port)
    environ = os.environ | {PARENT_VARIABLE: str(os.getpid())} | ({} if progress else {"TQDM_DISABLE": "1"})
    command = python_argv(
        "headrace", "serve", model, f"--host={LOOPBACK}", f"--port={port}", "--log-level=warning", *flags
    )
    # A process group of its own, so that Ctrl-C in a terminal does not reach it: we stop it in order.
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, process_group=0) as server:
        try:
            _wait(server, url, say)
            yield url
        finally:
            _stop(server)
            say("Stopped.")


def _wait(server: subprocess.Popen[bytes], url: str, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    shown = ""
    for answer in wait_until_ready(url, READY_LIMIT_S):
        if server.poll() is not None:
            code = server.returncode if server.returncode > 0 else EXIT_FAILURE
            raise ServerFailed(f"headrace serve {describe_exit(server.returncode)}", code)
        if answer.ready:
            say(f"Ready after {time.monotonic() - began:.1f} s at {url}")
            return
        if answer.text and answer.text != shown:
            shown = answer.text
            say(f"  {time.monotonic() - began:4.1f} s  {shown}")
    raise ServerFailed(f"not ready after {READY_LIMIT_S:.0f} s: {shown}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_LIMIT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            server.kill()
