"""Where a load goes: an address with the requests for it, encoded once, before any clock runs."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.errors import BenchError
from bench.workload.bodies import Body


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        url: As it was given.
        host: Name or IP address.
        port: TCP port.
        path: Path and query, `/` at least.
        tls: Whether it is https.
    """

    url: str
    host: str
    port: int
    path: str
    tls: bool

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def unreachable(self, error: OSError) -> str:
        """Returns the sentence for an address that cannot be reached."""
        if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
            return f"nothing listens at {self.url}; start the service, or give its address with --target."
        return f"{self.url} cannot be reached: {error.strerror or error}."

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context, or None without TLS."""
        return ssl.create_default_context() if self.tls else None


def parse(url: str) -> Address:
    """Reads a URL.

    Raises:
        BenchError: It is not `http://HOST[:PORT]/PATH` or its https sister.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or any(c.isspace() for c in url):
        raise BenchError(f"`{url}` is not an address; give one such as http://127.0.0.1:8000/classify.")
    tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(url, host, port or (443 if tls else 80), path, tls)


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
