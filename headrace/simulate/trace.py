"""The requests of a simulation: read from a trace file, or drawn; and the token ids of their prompts."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import hashlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeAlias

import numpy as np

from shared.errors import StartupError
from shared.messages import Int32
from shared.sampling import MAX_CHOICES

MOONCAKE_BLOCK = 512
"""Tokens that one of ``hash_ids`` stands for."""
VOCAB_SIZE = 65_536
"""Ids are below it, whatever the model's vocabulary: they only have to differ."""
STOP_ID = 0
"""What ends an output; in no prompt."""

MOST_TOKENS = 10_000_000
"""Of a prompt or an output; more is taken for a mistake in the trace."""

Prefix: TypeAlias = tuple[tuple[str, int], ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class TraceRequest:
    """One request, by its lengths."""

    arrival_s: float
    """Since the start of the trace."""
    prompt: int
    """Tokens."""
    output: int
    """Tokens after which the model ends each choice; at least 1."""
    max_tokens: int | None = None
    """What the client asks for; None: ``output``, as if it knew."""
    prefix: Prefix = ()
    """Groups that the prompt begins with, one after another: name, tokens. What has the same name has the same ids. A
    group that reaches the end of the prompt goes on in the output, so that the next turn of a chat finds it cached."""
    priority: int = 0
    user: str = ""
    n: int = 1

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1 or self.n < 1:
            raise ValueError("prompt, output and n must be at least 1")
        if self.n > MAX_CHOICES:
            raise ValueError(f"n must be at most {MAX_CHOICES}, got {self.n}")
        if max(self.prompt, self.output) > MOST_TOKENS:
            raise ValueError(f"prompt and output must be at most {MOST_TOKENS:,} tokens")
        if not math.isfinite(self.arrival_s):
            raise ValueError("the time of arrival must be a finite number")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if any(count < 1 for _, count in self.prefix):
            raise ValueError("a prefix group must have at least 1 token")
        if sum(count for _, count in self.prefix) > self.prompt:
            raise ValueError(f"the prefix groups have more tokens than the prompt, {self.prompt}")

    @property
    def tail(self) -> tuple[str, int] | None:
        """The group that goes on in the output, and its tokens before that."""
        is_whole = self.prefix and sum(count for _, count in self.prefix) == self.prompt
        return self.prefix[-1] if is_whole else None


def read_trace(path: str, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace in order of arrival; the first arrives at 0.

    The format shows in the file: JSON lines with ``prompt`` and ``output`` (docs/tuning.md), JSON lines with
    ``input_length`` and ``hash_ids`` (Mooncake), or CSV with ``ContextTokens`` (Azure). ``.gz`` is unpacked.

    Args:
        limit: read the first ones only.

    Raises:
        StartupError: it cannot be read; the message names the line.
    """
    requests: list[TraceRequest] = []
    try:
        with _open(path) as file:
            for number, request in _parsed(file):
                if isinstance(request, Exception):
                    raise StartupError(f"{path}, line {number}: {_words(request)}")
                requests.append(request)
                if len(requests) == limit:
                    break
    except (OSError, UnicodeDecodeError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StartupError(f"the trace {path} cannot be read: {reason}") from error
    if not requests:
        raise StartupError(f"the trace {path} holds no request")
    requests.sort(key=lambda request: request.arrival_s)
    first = requests[0].arrival_s
    for request in requests:
        request.arrival_s -= first
    return requests


def write_trace(path: str, requests: Iterable[TraceRequest]) -> None:
    """Write a trace that ``read_trace`` reads."""
    with open(path, "w", encoding="utf-8") as file:
        for request in requests:
            fields: dict[str, Any] = {
                "arrival": round(request.arrival_s, 6),
                "prompt": request.prompt,
                "output": request.output,
                "max_tokens": request.max_tokens,
                "prefix": [list(group) for group in request.prefix],
                "priority": request.priority,
                "user": request.user,
                "n": request.n if request.n > 1 else None,
            }
            file.write(json.dumps({name: value for name, value in fields.items() if value or name == "arrival"}) + "\n")


def _open(path: str) -> TextIO:
    if path.endswith(".gz"):
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig")
    return open(path, encoding="utf-8-sig")


def _parsed(file: TextIO) -> Iterator[tuple[int, TraceRequest | Exception]]:
    """(line number, request or what is wrong with the line)."""
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    number, first = next(lines, (0, ""))
    rows: Iterable[tuple[int, Any]] = itertools.chain([(number, first)], lines)
    parse: Callable[[Any], TraceRequest] = _from_json
    if not first:
        return
    if not first.lstrip().startswith(("{", "[")):
        names = next(csv.reader([first]))
        if "ContextTokens" not in names:
            yield number, ValueError(f"this is no trace: {first.strip()[:40]!r} is neither a JSON object nor {_HEADER}")
            return
        rows, parse = (
            ((number, dict(zip(names, next(csv.reader([line])), strict=False))) for number, line in lines),
            _from_azure,
        )
    for number, row in rows:
        try:
            yield number, parse(row)
        except (ValueError, LookupError) as error:
            yield number, error


_HEADER = "the header TIMESTAMP,ContextTokens,GeneratedTokens"


def _words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error.msg} at column {error.colno}"
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _from_json(line: str) -> TraceRequest:
    fields = json.loads(line.strip())
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if "input_length" in fields:
        return _from_mooncake(fields)
    unknown = set(fields) - {"arrival", "prompt", "output", "max_tokens", "prefix", "priority", "user", "n"}
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}")
    return TraceRequest(
        arrival_s=_number("arrival", fields["arrival"]),
        prompt=_whole("prompt", fields["prompt"]),
        output=_whole("output", fields["output"]),
        max_tokens=None if fields.get("max_tokens") is None else _whole("max_tokens", fields["max_tokens"]),
        prefix=_prefix(fields.get("prefix") or ()),
        priority=_whole("priority", fields.get("priority") or 0),
        user=str(fields.get("user") or ""),
        n=_whole("n", 1 if fields.get("n") is None else fields["n"]),
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _whole(name: str, value: Any) -> int:
    """Also of text, as CSV has it, and of 12.0."""
    try:
        found = int(value)
        if isinstance(value, bool) or (isinstance(value, float) and found != value):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    return found


def _prefix(value: Any) -> Prefix:
    if not isinstance(value, list | tuple) or not all(isinstance(each, list) and len(each) == 2 for each in value):
        raise ValueError(f'prefix must be groups [["name", tokens], ...], got {value!r}')
    return tuple((str(name), _whole("the tokens of a prefix group", count)) for name, count in value)


def _from_mooncake(fields: dict[str, Any]) -> TraceRequest:
    """``hash_ids`` names a block by all that is before it too, so that equal blocks lie in equal prefixes."""
    prompt = max(_whole("input_length", fields["input_length"]), 1)
    hashes = fields.get("hash_ids") or []
    if not isinstance(hashes, list):
        raise ValueError(f"hash_ids must be a list, got {hashes!r}")
    counts = [min(MOONCAKE_BLOCK, prompt - MOONCAKE_BLOCK * index) for index in range(len(hashes))]
    return TraceRequest(
        arrival_s=_number("timestamp", fields["timestamp"]) / 1000,
        prompt=prompt,
        output=max(_whole("output_length", fields["output_length"]), 1),
        prefix=tuple((str(each), count) for each, count in zip(hashes, counts, strict=True) if count > 0),
    )


def _from_azure(row: dict[str, str]) -> TraceRequest:
    arrived = datetime.datetime.fromisoformat(row["TIMESTAMP"])
    if arrived.tzinfo is None:
        arrived = arrived.replace(tzinfo=datetime.UTC)
    return TraceRequest(
        arrival_s=arrived.timestamp(),
        prompt=max(_whole("ContextTokens", row["ContextTokens"]), 1),
        output=max(_whole("GeneratedTokens", row["GeneratedTokens"]), 1),
    )


# -- token ids -------------------------------------------------------------------------------------------------------


def prompt_ids(request: TraceRequest, index: int) -> Int32:
    """[prompt] ids of the ``index``-th request of a trace; what is in no group is its own."""
    parts = [group_ids(name, 0, count) for name, count in request.prefix]
    own = request.prompt - sum(map(len, parts))
    if own:
        parts.append(_stream(index * 0x1_0000_0001 + 1, 0, own))
    ids = np.concatenate(parts) if len(parts) > 1 else parts[0]
    ids.flags.writeable = False
    return ids


def group_ids(name: str, start: int, count: int) -> Int32:
    """[count] ids of a prefix group from ``start`` on."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return _stream(seed, start, count)


def _stream(seed: int, start: int, count: int) -> Int32:
    """Numbers of SplitMix64 (Steele, Lea and Flood, 2014), which may be drawn from any place on."""
    mixed = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(seed % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(VOCAB_SIZE - 1) + np.uint64(1)).astype(np.int32)
