"""The address of an endpoint, parsed from its URL."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from bertserve.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        url: The URL as it was given.
        host: Name or IP address.
        port: TCP port.
        path: Path and query, `/` at least.
        tls: Whether the scheme is https.
    """

    url: str
    host: str
    port: int
    path: str
    tls: bool

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS context with the system's certificates, or None without TLS."""
        return ssl.create_default_context() if self.tls else None

    def unreachable_message(self, error: OSError) -> str:
        """Returns the message for an address that cannot be reached."""
        if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
            return f"nothing listens at {self.url}; start the service, or give its address with --target."
        return f"{self.url} cannot be reached: {error.strerror or error}."


def parse_url(url: str) -> Address:
    """Parses a URL.

    Raises:
        BenchError: It is not `http://HOST[:PORT]/PATH` or the same with https.
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
