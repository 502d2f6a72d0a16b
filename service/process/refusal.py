"""Responses that the server writes itself, to what does not become a request."""

from __future__ import annotations

import random

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from bertserve.service.errors import BertServeError, UnavailableError
from bertserve.service.http import errors

FULL = "the service has as many connections as it may have; try again later, or raise --max-connections."
STOPPING = "the service is stopping; send the request to another instance, or try again later."
_ids = random.Random()  # noqa: S311 - ids tell requests apart, they guard nothing


def rendered(error: BertServeError | None = None, default_headers: list[tuple[bytes, bytes]] | None = None, path: str = "") -> bytes:
    """Returns the bytes of a whole response that closes the connection; without an error it says that there is no room."""
    request_id = f"{_ids.getrandbits(128):032x}"
    response = errors.response(error or UnavailableError(FULL), request_id, path)
    headers = [*(default_headers or ()), *response.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    head = b"".join(b"%s: %s\r\n" % header for header in headers)
    return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)
