"""Errors that reach a client, and the HTTP status and OpenAI type of each kind."""

from __future__ import annotations

import enum


class ErrorCode(enum.IntEnum):
    """Kinds of error. The value is what travels on the wire."""

    INVALID_REQUEST = 1
    NOT_FOUND = 2
    UNAUTHORIZED = 3
    TOO_LARGE = 4
    OVERLOADED = 5
    UNAVAILABLE = 6
    INTERNAL = 7
    LOST = 8
    POISON = 9
    TIMEOUT = 10
    METHOD_NOT_ALLOWED = 11
    UNSUPPORTED_MEDIA_TYPE = 12

    @property
    def status(self) -> int:
        """HTTP status."""
        return _STATUS[self][0]

    @property
    def type(self) -> str:
        """The ``type`` of OpenAI's error object."""
        return _STATUS[self][1]


_STATUS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_REQUEST: (400, "invalid_request_error"),
    ErrorCode.NOT_FOUND: (404, "not_found_error"),
    ErrorCode.UNAUTHORIZED: (401, "authentication_error"),
    ErrorCode.TOO_LARGE: (413, "invalid_request_error"),
    ErrorCode.OVERLOADED: (429, "rate_limit_error"),
    ErrorCode.UNAVAILABLE: (503, "service_unavailable_error"),
    ErrorCode.INTERNAL: (500, "server_error"),
    ErrorCode.LOST: (500, "server_error"),
    ErrorCode.POISON: (500, "server_error"),
    ErrorCode.TIMEOUT: (408, "timeout_error"),
    ErrorCode.METHOD_NOT_ALLOWED: (405, "invalid_request_error"),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: (415, "invalid_request_error"),
}


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose."""


class RequestError(HeadraceError):
    """A request that is refused. ``message`` and ``param`` are shown to the client as they are."""

    def __init__(self, message: str, param: str | None = None, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class StartupError(HeadraceError):
    """A process that cannot start; the text is for the operator and says what to do."""


class ProtocolError(HeadraceError):
    """A frame from a peer that cannot be read."""
