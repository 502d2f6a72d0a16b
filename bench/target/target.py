"""An endpoint under load: its address and the requests for it, encoded before the load begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bertserve.bench.target.address import Address
from bertserve.bench.workload.bodies import Body


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint under load.

    Attributes:
        address: Address of the endpoint.
        mix: Name of its mix, or path of its file of bodies.
        bodies: Request bodies, which are sent in turn.
        requests: The same bodies as whole HTTP requests.
    """

    address: Address
    mix: str
    bodies: Sequence[Body]
    requests: Sequence[bytes]

    @property
    def label(self) -> str:
        """Name of the target in reports."""
        return f"{self.address.path} {self.mix}"


def build_target(address: Address, mix: str, bodies: Sequence[Body], headers: Mapping[str, str]) -> Target:
    """Returns a target with its requests.

    Args:
        address: Address of the endpoint.
        mix: Name of the bodies in reports.
        bodies: At least one.
        headers: Headers of every request.
    """
    given = {name.lower() for name in headers}
    defaults = {"Host": address.authority, "Content-Type": "application/json"}
    lines = {name: value for name, value in defaults.items() if name.lower() not in given} | dict(headers)
    head = f"POST {address.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    requests = [f"{head}Content-Length: {len(body.content)}\r\n\r\n".encode("latin-1") + body.content for body in bodies]
    return Target(address, mix, bodies, requests)
