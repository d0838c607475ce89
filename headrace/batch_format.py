"""Lines of OpenAI's batch files (https://platform.openai.com/docs/guides/batch): requests in, results out."""

from __future__ import annotations

import codecs
import contextlib
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import orjson

ROUTES = ("/v1/chat/completions", "/v1/completions")
ID_PREFIX = "batch_req_"
RESULT_START = b'{"id":"' + ID_PREFIX.encode()
"""What every line that ``Result.encode`` makes begins with."""


class BatchRequest(NamedTuple):
    """A request of an input file."""

    line: int
    """From 1."""
    custom_id: str
    url: str
    """One of ``ROUTES``."""
    body: dict[str, Any]


class Refusal(NamedTuple):
    """A line of an input file that is no request."""

    line: int
    """From 1."""
    custom_id: str | None
    """The line's own; None where it has none, or another line has the same."""
    code: str
    message: str
    """For people; names the line."""


class HttpAnswer(msgspec.Struct, frozen=True):
    """What a server said, whatever its status."""

    status_code: int
    request_id: str
    body: msgspec.Raw
    """JSON; a string when the server's answer was something else."""


class ResultError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why there is no answer."""

    code: str
    message: str
    line: int | None = None
    """Of the input file, when it could not be read as a request."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Result(msgspec.Struct, frozen=True):
    """A line of an output file: either ``response`` or ``error`` is there."""

    id: str
    custom_id: str | None
    response: HttpAnswer | None
    error: ResultError | None = None

    @property
    def ok(self) -> bool:
        """Whether the request succeeded: a status of 2xx."""
        return self.response is not None and 200 <= self.response.status_code < 300

    @property
    def usage(self) -> Usage:
        """The tokens that the answer counts; none where it counts none."""
        if self.response is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(self.response.body, type=_Body).usage or Usage()
        return Usage()

    def encode(self) -> bytes:
        """The line, with its newline."""
        return msgspec.json.encode(self) + b"\n"


class _Body(msgspec.Struct):
    usage: Usage | None = None


_DECODER = msgspec.json.Decoder(Result)


def decode_result(line: bytes) -> Result:
    """Read a line of an output file. Raises ``ValueError`` (``msgspec.MsgspecError``) if it is none."""
    return _DECODER.decode(line)


def answered(custom_id: str, status: int, request_id: str, body: object) -> Result:
    """The result of a request that a server answered with ``status`` and the JSON value ``body``."""
    answer = HttpAnswer(status, request_id, msgspec.Raw(msgspec.json.encode(body)))
    return Result(_new_id(), custom_id, answer)


def failed(custom_id: str, code: str, message: str) -> Result:
    """The result of a request that got no answer."""
    return Result(_new_id(), custom_id, None, ResultError(code, message))


def refused(refusal: Refusal) -> Result:
    """The result of a line that is no request."""
    return Result(_new_id(), refusal.custom_id, None, ResultError(refusal.code, refusal.message, refusal.line))


def read_requests(lines: Iterable[bytes]) -> Iterator[BatchRequest | Refusal]:
    """Check each line of an input file. Empty ones are passed over; of the lines, only the custom_ids are kept."""
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        stripped = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
        if stripped:
            yield _read(number, stripped, line_of)


def _read(number: int, line: bytes, line_of: dict[str, int]) -> BatchRequest | Refusal:
    def refuse(code: str, problem: str, custom_id: str | None = None) -> Refusal:
        return Refusal(number, custom_id, code, f"line {number}: {problem}")

    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return refuse("invalid_json", f"not JSON: {error.msg} (column {error.colno})")
    if not isinstance(found, dict):
        return refuse("invalid_json", "not a JSON object")
    custom_id = found.get("custom_id")
    if custom_id is None:
        return refuse("missing_custom_id", "custom_id is missing")
    if not isinstance(custom_id, str) or not custom_id:
        return refuse("invalid_custom_id", "custom_id must be a string that is not empty")
    if custom_id in line_of:
        return refuse("duplicate_custom_id", f"custom_id {custom_id!r} is that of line {line_of[custom_id]} already")
    line_of[custom_id] = number
    method, url, body = found.get("method"), found.get("url"), found.get("body")
    if method != "POST":
        return refuse("invalid_method", f"method must be POST, got {_shown(method)}", custom_id)
    if url not in ROUTES:
        return refuse("invalid_url", f"url must be one of {', '.join(ROUTES)}, got {_shown(url)}", custom_id)
    if not isinstance(body, dict):
        return refuse("invalid_body", f"body must be an object, got {_shown(body)}", custom_id)
    if body.get("stream"):
        return refuse("invalid_body", "stream must be left out: a batch is not streamed", custom_id)
    return BatchRequest(number, custom_id, url, body)


def _shown(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 80 else text[:80] + "…"


def _new_id() -> str:
    return ID_PREFIX + uuid.uuid4().hex
