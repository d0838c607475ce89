"""Structured logs: one set-up for every process, console or JSON, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup_logging(service: str, level: str = "info", style: str = "console") -> structlog.stdlib.BoundLogger:
    """Configure structlog for this process and return its logger, with ``service`` bound.

    Bind ``request_id``, ``step`` and ``epoch`` where they are known: ``log.info("finished", request_id=rid)``.
    """
    structlog.configure(
        **_configuration(level, style),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    return get_logger()


def own_logger(service: str, level: str = "info", style: str = "console") -> structlog.stdlib.BoundLogger:
    """A logger like that of ``setup_logging`` for a part of somebody else's program, whose set-up is left alone."""
    logger = structlog.wrap_logger(structlog.WriteLogger(sys.stderr), **_configuration(level, style), service=service)
    return cast(structlog.stdlib.BoundLogger, logger)


def get_logger(**bound: Any) -> structlog.stdlib.BoundLogger:
    return cast(structlog.stdlib.BoundLogger, structlog.get_logger(**bound))


def _configuration(level: str, style: str) -> dict[str, Any]:
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if style == "json"
        # Where "rich" is installed structlog would show every local variable: prompts, keys, whole tensors.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            pad_event_to=0,
            pad_level=False,
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if style == "json" else "%H:%M:%S"),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info if style == "json" else _as_it_is,
            renderer,
        ],
        "wrapper_class": structlog.make_filtering_bound_logger(LEVELS[level]),
    }


def _as_it_is(_logger: Any, _method: str, event: Any) -> Any:
    return event
