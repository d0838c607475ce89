"""Requests that a client may come back for: ``Last-Event-ID`` makes a request one of them.

With ``0`` it begins, or is found again by a client that got no event; with the id of an event it goes on after that
event. What identifies it is the client's tenant, its ``X-Request-Id`` and what the body says: from these follow the
ids of its requests at the tokenizers, the same at every gateway, and the seeds that the body leaves open.
"""

from __future__ import annotations

import dataclasses
import hashlib

import orjson

from api_gateway.event_ids import CHECK_BYTES, Place, parse_event_id
from api_gateway.exchange import ID_HEADER, Exchange
from api_gateway.schemas import GenerationRequest
from shared.errors import RequestError
from shared.sampling import MAX_SEED

HEADER = "Last-Event-ID"
NO_EVENT = "0"
MAX_CHOICES = 64
"""Choices of a request that can be resumed: every event id names the place in each of them."""
KEY_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Resumption:
    """How one request can be resumed, and where it is."""

    key: bytes
    """Over all that identifies it."""
    place: Place | None
    """What the client has; None: nothing."""

    @property
    def check(self) -> bytes:
        """What event ids carry of the key."""
        return self.key[:CHECK_BYTES]


def resumable(
    request: GenerationRequest, body: bytes, exchange: Exchange, last_event: str
) -> tuple[GenerationRequest, Resumption]:
    """Make a checked request one that its client may come back for.

    Args:
        body: of the request; valid JSON.
        last_event: the header.

    Returns:
        The request as it goes to the tokenizers, and where to begin.

    Raises:
        RequestError: the header names no place in this request.
    """
    choices = len(request.specs) * request.generated
    if choices > MAX_CHOICES:
        raise RequestError(f"{HEADER} is only allowed with at most {MAX_CHOICES} choices, not {choices}", HEADER)
    values = orjson.loads(body)
    key = _key(request.kind, values, exchange)
    place = None
    if last_event != NO_EVENT:
        place = _place(request, choices, key[:CHECK_BYTES], exchange, last_event)
    specs = []
    for number, spec in enumerate(request.specs):
        params = spec.params
        if values.get("seed") is None:
            params = dataclasses.replace(params, seed=_seed(key, number))
        specs.append(dataclasses.replace(spec, params=params, resumable=True))
    return dataclasses.replace(request, specs=specs), Resumption(key, place)


def _place(request: GenerationRequest, choices: int, check: bytes, exchange: Exchange, last_event: str) -> Place:
    if not exchange.named:
        raise RequestError(f"{HEADER} needs the {ID_HEADER} of the answer that the event belongs to", HEADER)
    if not request.stream:
        raise RequestError(f"an answer without stream has no events: {HEADER} must be {NO_EVENT}", HEADER)
    try:
        return parse_event_id(
            last_event, check, choices=choices, prompts=len(request.specs), with_usage=request.include_usage
        )
    except ValueError:
        raise RequestError(f"{HEADER} must be {NO_EVENT} or the id of an event of the answer", HEADER) from None
    except LookupError:
        raise RequestError(
            f"{HEADER} belongs to another request: send the same {ID_HEADER}, body and API key as at first", HEADER
        ) from None


def _key(kind: str, values: dict[str, object], exchange: Exchange) -> bytes:
    said = {name: value for name, value in values.items() if name != "request_id"}
    named = orjson.dumps([kind, exchange.tenant, exchange.request_id, said], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(named, digest_size=KEY_BYTES).digest()


def _seed(key: bytes, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(key + number.to_bytes(4, "little"), digest_size=8).digest()) & MAX_SEED
