"""How a process begins and ends: exit codes, signals, the watch on the launcher, the watchdog on its own loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from shared.config import Settings, parse_settings
from shared.errors import StartupError
from shared.heartbeat import Watchdog
from shared.logging import setup_logging

EXIT_OK = 0
"""Stopped because it was asked to."""
EXIT_FAILURE = 1
"""An error that nobody foresaw; the log has the traceback. Starting again may help."""
EXIT_USAGE = 2
"""A flag or an environment variable that cannot be read."""
EXIT_GAVE_UP = 69
"""The launcher restarted a process too often (``EX_UNAVAILABLE``)."""
EXIT_CONFIG = 78
"""``StartupError``: it cannot work as configured, and starting again would not help (``EX_CONFIG``)."""

PARENT_VARIABLE = "HEADRACE_PARENT_PID"
FAILURE_VARIABLE = "HEADRACE_FAILURE_FILE"
"""Names a file that gets the words of a ``StartupError``, for a launcher that shows them elsewhere than in the log."""

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0


def run_service(service: str, main: Callable[[Settings], int | None], description: str = "") -> NoReturn:
    """The whole ``__main__`` of a service: read its settings, set up its log, run ``main``, exit with what happened.

    ``main`` returns its exit code (None: ``EXIT_OK``). A ``StartupError`` is logged as its words and becomes
    ``EXIT_CONFIG``; any other exception is logged with its traceback and becomes ``EXIT_FAILURE``. A SIGTERM or SIGINT
    that comes before ``main`` has called ``install_signal_handlers`` ends the process with ``EXIT_OK``. A loop that
    stands still (``shared.heartbeat``) ends it with ``EXIT_STUCK``.
    """
    settings = parse_settings(service, sys.argv[1:], description=description)
    log = setup_logging(service, settings.log_level, settings.log_format)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _leave)
    watch_parent()
    Watchdog(settings.stuck_timeout).start()
    try:
        code = main(settings)
    except StartupError as error:
        log.error(str(error))
        _note_failure(str(error))
        code = EXIT_CONFIG
    except Exception:
        log.exception("ended by an error")
        code = EXIT_FAILURE
    sys.exit(EXIT_OK if code is None else code)


def install_signal_handlers(stop: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Call ``stop`` at the first SIGTERM or SIGINT; at the second one exit at once with 128 + the signal's number.

    With ``loop`` the call is made from the loop, without it from the main thread between two bytecodes, so that
    ``stop`` should set a flag and no more. Call it in the main thread.
    """
    asked = False

    def on_signal(signum: int, _frame: object = None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + signum)
        asked = True
        stop()

    for signum in (signal.SIGTERM, signal.SIGINT):
        if loop is not None:
            loop.add_signal_handler(signum, on_signal, signum)
        else:
            signal.signal(signum, on_signal)


def watch_parent() -> None:
    """End this process when the launcher that started it is gone, however it went. Without a launcher: nothing.

    The launcher names itself in ``HEADRACE_PARENT_PID``. The kernel sends SIGKILL where it can (Linux); elsewhere a
    thread looks once a second. SIGKILL, because a process without its launcher has no one left to stop it.
    """
    named = os.environ.get(PARENT_VARIABLE)
    if not named:
        return
    parent = int(named)
    watched = _kill_me_with_parent()
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(EXIT_FAILURE)
    if not watched:
        threading.Thread(target=_poll_parent, args=(parent,), name="watch-parent", daemon=True).start()


def _note_failure(words: str) -> None:
    path = os.environ.get(FAILURE_VARIABLE)
    if path:
        with contextlib.suppress(OSError):
            pathlib.Path(path).write_text(words, encoding="utf-8")


def _leave(signum: int, _frame: object) -> NoReturn:
    # Not an exception: it would come up in the middle of anything, also where it is lost (a finalizer, a callback of an
    # extension module), and a thread that still imports a large package would crash in an interpreter that ends.
    os._exit(EXIT_OK)


def _kill_me_with_parent() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0)


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(EXIT_FAILURE)
