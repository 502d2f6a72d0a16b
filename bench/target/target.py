"""Where a load goes: an address with the requests for it, encoded once, before any clock runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.target.address import Address
from bench.workload.bodies import Body


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint under load.

    Attributes:
        address: Where it is.
        mix: The name of its mix, or its file of bodies.
        bodies: What is sent to it, in turn.
        requests: The same as whole HTTP requests.
    """

    address: Address
    mix: str
    bodies: Sequence[Body]
    requests: Sequence[bytes]

    @property
    def label(self) -> str:
        """How reports name it."""
        return f"{self.address.path} {self.mix}"


def make(address: Address, mix: str, bodies: Sequence[Body], headers: Mapping[str, str]) -> Target:
    """Returns a target with its requests.

    Args:
        address: Where it is.
        mix: What the bodies are called.
        bodies: At least one.
        headers: Sent with every request.
    """
    given = {name.lower() for name in headers}
    own = {"Host": address.authority, "Content-Type": "application/json"}
    lines = {name: value for name, value in own.items() if name.lower() not in given} | dict(headers)
    head = f"POST {address.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    requests = [f"{head}Content-Length: {len(body.content)}\r\n\r\n".encode("latin-1") + body.content for body in bodies]
    return Target(address, mix, bodies, requests)
