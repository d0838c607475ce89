"""``python -m headrace.demo``: serve the built-in model, ask one question over HTTP, print the answer and figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.client import RequestFailed, base_url, stream_chat, wait_until_ready
from headrace.launcher import claim_port
from headrace.supervisor import describe_exit, python_argv
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK, PARENT_VARIABLE

QUESTION = "What is the capital of France?"
MAX_TOKENS = 64
READY_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0


class Figures(NamedTuple):
    """What one streamed answer took, as the client sees it."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    """From sending the request to the first text."""
    total_s: float

    def __str__(self) -> str:
        decoding = self.total_s - self.ttft_s
        rate = (self.completion_tokens - 1) / decoding if self.completion_tokens > 1 and decoding > 0 else 0.0
        return (
            f"{self.prompt_tokens} prompt tokens, {self.completion_tokens} generated tokens, "
            f"first token after {self.ttft_s * 1000:.0f} ms, then {rate:.1f} tokens/s, {self.total_s:.2f} s in all"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; arguments are passed on to ``headrace serve demo``. Returns an exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        port = claim_port("127.0.0.1", 0)
    except StartupError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    url = base_url("127.0.0.1", port)
    print("Starting the four processes of Headrace with the built-in model …", flush=True)
    environ = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    command = python_argv("headrace", "serve", "demo", f"--port={port}", "--log-level=warning", *args)
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, process_group=0) as server:
        try:
            return _demonstrate(server, url)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            _stop(server)


def ask(url: str, question: str = QUESTION, max_tokens: int = MAX_TOKENS) -> Figures:
    """Ask one question, print the answer as it arrives, and return what it took. Raises as ``stream_chat`` does."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    began = time.monotonic()
    first: float | None = None
    text = ""
    usage: dict[str, Any] = {}
    for reply in stream_chat(url, body):
        if reply.text and first is None:
            first = time.monotonic() - began
        print(reply.text, end="", flush=True)
        text += reply.text
        usage = reply.usage or usage
    total = time.monotonic() - began
    print()
    return Figures(text, usage["prompt_tokens"], usage["completion_tokens"], total if first is None else first, total)


def _demonstrate(server: subprocess.Popen[bytes], url: str) -> int:
    began = time.monotonic()
    shown = ""
    for answer in wait_until_ready(url, READY_LIMIT_S):
        if server.poll() is not None:
            print(f"headrace serve {describe_exit(server.returncode)}", file=sys.stderr)
            return server.returncode if server.returncode > 0 else EXIT_FAILURE
        if answer.ready:
            break
        if answer.text and answer.text != shown:
            shown = answer.text
            print(f"  {time.monotonic() - began:4.1f} s  {shown}", flush=True)
    else:
        print(f"not ready after {READY_LIMIT_S:.0f} s: {shown}", file=sys.stderr)
        return EXIT_FAILURE
    print(f"Ready after {time.monotonic() - began:.1f} s at {url}\n\n> {QUESTION}", flush=True)
    try:
        figures = ask(url)
    except (RequestFailed, OSError) as error:
        print(f"the question got no answer: {error}", file=sys.stderr)
        return EXIT_FAILURE
    print(f"\n{figures}")
    return EXIT_OK


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
    print("Stopped.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
