"""JSON pages of a service, such as what it says of itself. A service that is not bertserve may have none; reports then leave it out."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from bertserve.bench.errors import BenchError
from bertserve.bench.target.address import Address

_TIMEOUT_S = 30


def fetch(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> tuple[int, bytes]:
    """Sends one request; returns the status and the body of the response.

    Raises:
        BenchError: The address cannot be reached, or does not answer in HTTP.
    """
    context = address.ssl_context
    connection = (
        http.client.HTTPConnection(address.host, address.port, timeout=_TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(address.host, address.port, timeout=_TIMEOUT_S, context=context)
    )
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    except OSError as error:
        raise BenchError(address.unreachable_message(error)) from error
    except http.client.HTTPException as error:
        raise BenchError(f"{address.url} does not answer in HTTP: {type(error).__name__}.") from error
    finally:
        connection.close()


def fetch_json(address: Address, path: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the JSON object at a path, or None if the path has none.

    Raises:
        BenchError: The address cannot be reached, or does not answer in HTTP.
    """
    status, raw = fetch(address, "GET", path, headers)
    try:
        value = json.loads(raw) if status == 200 else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def service_info(address: Address, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns `/info` of the service, or None if it has none.

    Raises:
        BenchError: The address cannot be reached, or does not answer in HTTP.
    """
    return fetch_json(address, "/info", headers)


def model_info(address: Address, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns `info` below the endpoint, which describes its model, or None if it has none.

    Raises:
        BenchError: The address cannot be reached, or does not answer in HTTP.
    """
    return fetch_json(address, address.path.partition("?")[0].rstrip("/") + "/info", headers)
