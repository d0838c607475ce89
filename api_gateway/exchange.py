"""What is known of one HTTP request beside its body: its id, who sent it, what its answer must name."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from urllib.parse import quote

from aiohttp import web

from api_gateway.fields import request_id
from shared.errors import RequestError

ID_HEADER = "X-Request-Id"
IGNORED_HEADER = "x-ignored-fields"
MAX_NAMED = 20
MAX_NAME = 64


@dataclasses.dataclass(slots=True)
class Exchange:
    """One request and its answer."""

    request_id: str
    """The client's, or one of ours."""
    named: bool
    """The client gave the id."""
    tenant: str = ""
    """Made from the API key; "" without keys."""
    ignored: Sequence[str] = ()
    """Fields of the body that mean nothing here."""

    @classmethod
    def of(cls, request: web.Request) -> Exchange:
        """Raises ``RequestError`` for an id that cannot be echoed."""
        given = request.headers.get(ID_HEADER)
        if given is None:
            return cls(secrets.token_hex(16), named=False)
        try:
            return cls(request_id(ID_HEADER, given), named=True)
        except RequestError as error:
            raise RequestError(error.message, ID_HEADER) from None

    def headers(self) -> dict[str, str]:
        """Headers of every answer."""
        headers = {ID_HEADER: self.request_id}
        if self.ignored:
            headers[IGNORED_HEADER] = ", ".join(quote(name[:MAX_NAME], safe="$@") for name in self.ignored[:MAX_NAMED])
        return headers


EXCHANGE = web.RequestKey("exchange", Exchange)
