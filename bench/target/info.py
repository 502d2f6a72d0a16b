"""What the service under test says of itself: one trial request and `/info`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench.errors import BenchError
from bench.target.address import Address
from bench.target.fetch import fetch, fetch_json
from bench.target.target import Target

_BUSY = 429


def probe(target: Target, headers: Mapping[str, str]) -> None:
    """Sends the target's first body once.

    Raises:
        BenchError: Nothing that speaks HTTP is there, or it refuses such requests whatever the load.
    """
    status, raw = fetch(target.address, "POST", target.address.path, headers, target.bodies[0].content)
    if status < 200 or (300 <= status < 500 and status != _BUSY):
        try:
            message = str(json.loads(raw)["error"])
        except (ValueError, KeyError, TypeError):
            message = "no reason was given"
        raise BenchError(f"{target.address.url} answered {status} to a first request: {message}")


def service_info(address: Address, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns `/info` of the service, or None where it has none."""
    return fetch_json(address, "/info", headers)


def model_info(address: Address, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the endpoint's own `info`, that is its model's, or None where it has none."""
    return fetch_json(address, address.path.partition("?")[0].rstrip("/") + "/info", headers)
