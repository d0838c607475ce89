"""``python -m shared.healthcheck``: exit 0 when this container's service is alive, 1 and a line of words when not.

Two kinds of proof. ``--http URL``: the URL answers with a 2xx status within the time limit. Otherwise: the heartbeat
file that the service's loop renews (``shared.heartbeat``) is no older than ``--max-age`` seconds.

``--kill-after S`` makes it a watchdog as well, for containers, which are started again when they end and not when they
are unhealthy: a service whose heartbeat file is older than S seconds gets SIGKILL. A service that is merely wedged ends
itself sooner; this is for one that cannot, because it is stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from shared.heartbeat import HEARTBEAT_VARIABLE

LOOKS, LOOK_EVERY_S = 25, 0.1
"""How often a heartbeat that is too old is looked at again before its process is ended. Looks count and not time, since
this process may stand still as well."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status; the words go to standard error."""
    parser = argparse.ArgumentParser(prog="python -m shared.healthcheck", description=__doc__)
    parser.add_argument("--http", metavar="URL", help="ask this URL instead of reading the heartbeat file")
    parser.add_argument("--file", default=os.environ.get(HEARTBEAT_VARIABLE), help="heartbeat file")
    parser.add_argument("--max-age", type=float, default=15.0, help="oldest heartbeat that counts, in seconds")
    parser.add_argument("--timeout", type=float, default=3.0, help="time limit of --http, in seconds")
    parser.add_argument(
        "--kill-after", type=float, default=math.inf, metavar="S", help="end a service whose heartbeat is older"
    )
    options = parser.parse_args(argv)
    problem = _ask(options.http, options.timeout) if options.http else _read(options.file, options.max_age)
    if problem and options.file and _kill_stopped(options.file, options.kill_after):
        problem += "; it was killed, to be started again"
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def _ask(url: str, timeout_s: float) -> str | None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_s):
            return None
    except (OSError, urllib.error.HTTPError) as error:
        return f"{url}: {error}"


def _kill_stopped(path: str, limit_s: float) -> bool:
    """SIGKILL to the process whose id is in a heartbeat file that is too old and stays so; whether it was sent."""
    try:
        before = os.stat(path).st_mtime
        if time.time() - before <= limit_s:
            return False
        # A machine that was suspended, or whose clock was set: its processes beat again within a second.
        for _ in range(LOOKS):
            time.sleep(LOOK_EVERY_S)
            if os.stat(path).st_mtime != before:
                return False
        os.kill(int(pathlib.Path(path).read_text(encoding="ascii")), signal.SIGKILL)
    except (OSError, ValueError):
        return False
    return True


def _read(path: str | None, max_age_s: float) -> str | None:
    if not path:
        return f"{HEARTBEAT_VARIABLE} is not set: no heartbeat file to read"
    try:
        age = time.time() - os.stat(path).st_mtime
    except OSError as error:
        return f"no heartbeat yet: {error}"
    return None if age <= max_age_s else f"the last heartbeat is {age:.0f} s old (limit {max_age_s:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
