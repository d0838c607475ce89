"""What goes wrong for a caller of ``LLM``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.errors import ErrorCode, HeadraceError, RequestError
from shared.messages import ErrorInfo

if TYPE_CHECKING:
    from headrace.outputs import RequestOutput


class InvalidRequest(RequestError, ValueError):
    """A prompt, a parameter or a keyword that is refused; ``param`` names it."""

    outputs: list[RequestOutput | None] | None = None
    """When found after the others had been started: the outputs of those, in order, None for those that failed."""


class RequestFailed(HeadraceError, RuntimeError):
    """A request that was accepted and could not be served."""

    outputs: list[RequestOutput | None] | None = None

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class EngineDead(RequestFailed):
    """The processes of the engine have ended, or ``close`` was called."""


_CALLERS_FAULT = {ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE}


def error_of(info: ErrorInfo, place: str = "") -> InvalidRequest | RequestFailed:
    """The exception for what a process said; ``place``: which of several prompts it is about."""
    code = ErrorCode(info.code)
    if code is ErrorCode.UNAVAILABLE:
        return EngineDead(info.message, code)
    message = f"{place}: {info.message}" if place else info.message
    return InvalidRequest(message, info.param, code) if code in _CALLERS_FAULT else RequestFailed(message, code)
