"""The limit of open files: raised as far as it goes, and what it then has room for."""

from __future__ import annotations

import resource

from shared.logging import get_logger

SPARE_FILES = 512
"""Open files beside the connections that are being served: idle connections, sockets to tokenizers, logs."""
LEAST_SPARE_FILES = 64
"""So many are kept where the limit is low, that probes are answered and tokenizers reached when all are served."""

log = get_logger()


def connections_for(wanted: int) -> int:
    """Raise the limit of open files for ``wanted`` connections; how many of them it allows.

    Where that is fewer, the log says so: more are refused in words instead of by a socket that cannot be opened.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    connections = max(min(wanted, allowed - LEAST_SPARE_FILES), 1)
    if connections < wanted:
        log.warning(
            "the limit of open files is low: fewer requests are served at the same time; raise it with ulimit -n",
            limit=allowed,
            served=connections,
            max_connections=wanted,
        )
    return connections
