"""Endpoints under load: their addresses, their requests, and the information of the service about itself, if it has any."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bertserve.bench import BenchError, bodies, workloads
from bertserve.bench.bodies import Body
from bertserve.service.tasks import fill_mask, question_answering

OK = 200
# Task -> the workload with suitable inputs. The others read short texts.
_TASK_WORKLOADS = {fill_mask.TASK: "mask", question_answering.TASK: "qa"}


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL; its path has the query, and is at least `/`."""

    url: str
    host: str
    port: int
    path: str
    tls: bool

    def unreachable_message(self, error: OSError) -> str:
        """Returns the message for an address to which a connection fails with this error."""
        if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
            return f"nothing listens at {self.url}; start the service, or give its address with --target."
        return f"{self.url} cannot be reached: {error.strerror or error}."


def parse_url(url: str) -> Address:
    """Parses an address.

    Raises:
        BenchError: It is not `http://HOST[:PORT]/PATH`, or the same with https.
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
    """An endpoint under load, its request bodies, which are sent in turn, and the same bodies as complete HTTP requests."""

    address: Address
    bodies: Sequence[Body]
    requests: Sequence[bytes]


def build_target(address: Address, bodies: Sequence[Body], headers: Mapping[str, str]) -> Target:
    """Returns a target with a request for each body, of which there must be at least one."""
    header_names = {name.lower() for name in headers}
    host = f"[{address.host}]" if ":" in address.host else address.host
    defaults = {"Host": f"{host}:{address.port}", "Content-Type": "application/json"}
    lines = {name: value for name, value in defaults.items() if name.lower() not in header_names} | dict(headers)
    head = f"POST {address.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    requests = [f"{head}Content-Length: {len(body.content)}\r\n\r\n".encode("latin-1") + body.content for body in bodies]
    return Target(address, bodies, requests)


def fetch(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> tuple[int, Any]:
    """Sends one request; returns the status and the JSON value of the response, None if it is not JSON.

    Raises:
        BenchError: The address cannot be reached, or does not use HTTP.
    """
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        with suppress(ValueError):
            return response.status, json.loads(response.read())
        return response.status, None
    except OSError as error:
        raise BenchError(address.unreachable_message(error)) from error
    except http.client.HTTPException as error:
        raise BenchError(f"{address.url} does not speak HTTP: {type(error).__name__}.") from error
    finally:
        connection.close()


def fetch_info(address: Address, path: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the JSON object at a path, or None if there is none; a `BenchError` as for `fetch`."""
    status, value = fetch(address, "GET", path, headers)
    return value if status == OK and isinstance(value, dict) else None


def probe_target(text: str, headers: Mapping[str, str], *, texts: int, seed: int) -> tuple[Target, Mapping[str, Any] | None]:
    """Returns a target that has accepted one request, and its endpoint's information about the model.

    Args:
        text: `URL` or `URL=WORKLOAD`; without a workload, the default workload of the model's task is used.
        headers: Headers of every request.
        texts: Number of texts per request.
        seed: Seed of a built-in workload.

    Raises:
        BenchError: The address, the workload or the file is wrong, or the endpoint refused the first body.
    """
    url, equals, workload = text.rpartition("=")
    if not equals or ("?" in url and workload not in workloads.NAMES and not Path(workload).exists()):
        url, workload = text, ""
    address = parse_url(url)
    model = fetch_info(address, address.path.partition("?")[0].rstrip("/") + "/info", headers)
    workload = workload or _TASK_WORKLOADS.get((model or {}).get("task", ""), "short")
    mask = str((model or {}).get("mask_token") or workloads.MASK)
    target = build_target(address, bodies.build_bodies(workload, path=address.path, texts=texts, seed=seed, mask=mask), headers)
    status, value = fetch(address, "POST", address.path, headers, target.bodies[0].content)
    if status < 200 or (300 <= status < 500 and status != 429):
        raise BenchError(f"{url} answered {status} to a first request: {value.get('error') if isinstance(value, dict) else value}")
    # `endpoint` of a model is that of its own task, and the rest is long
    shown = {key: value for key, value in (model or {}).items() if key not in ("validation", "metrics")}
    return target, shown | {"endpoint": f"{address.path} {workload}"} if model else None
