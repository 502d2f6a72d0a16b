"""What a service says of itself and of its models. A service that is not bertserve may have none of it; reports then leave it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertserve.bench.target.address import Address
from bertserve.bench.target.fetch import fetch_json


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
