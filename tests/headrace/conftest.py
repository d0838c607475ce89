"""The ``headrace`` command as a user runs it, and one running server for those that talk to one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from headrace.local_server import local_server

SERVER_KEY = "the key of the test server"
COMMAND = (sys.executable, "-P", "-m", "headrace")
OnTerminal = Callable[..., "subprocess.Popen[bytes]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a ``headrace serve demo`` that wants ``SERVER_KEY``."""
    run_dir = tmp_path_factory.mktemp("demo_server")
    with local_server("demo", print, [f"--api-key={SERVER_KEY}", f"--run-dir={run_dir}"]) as url:
        yield url


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Run:
    """Run ``headrace WORDS`` to its end, with ``stdin`` as text and more variables by keyword."""

    def run_command(*words: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)} | variables
        return subprocess.run(
            [*COMMAND, *words], input=stdin, capture_output=True, text=True, env=environ, timeout=120, check=False
        )

    return run_command


@pytest.fixture
def asks(demo_server: str, run: Run) -> Run:
    """``run`` with the address and the key of the running server in the environment."""

    def run_command(*words: str, **options: str) -> subprocess.CompletedProcess[str]:
        return run(*words, **({"HEADRACE_URL": demo_server, "HEADRACE_API_KEY": SERVER_KEY} | options))

    return run_command


@pytest.fixture
def on_terminal(demo_server: str) -> Iterator[OnTerminal]:
    """Start ``headrace WORDS`` on a pseudo terminal: its pipes are the keyboard and the screen."""
    started: list[subprocess.Popen[bytes]] = []
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"

    def start(*words: str) -> subprocess.Popen[bytes]:
        environ = os.environ | {"HEADRACE_URL": demo_server, "HEADRACE_API_KEY": SERVER_KEY, "TERM": "dumb"}
        command = [sys.executable, "-c", spawn, *COMMAND, *words]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environ))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()
