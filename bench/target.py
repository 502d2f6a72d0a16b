"""Endpoints under load: their addresses, their requests, and the information of the service about itself.

Other services than bertserve may have no such information and no metrics; reports then omit them.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from bertserve.bench import bodies, workloads
from bertserve.bench.bodies import Body
from bertserve.bench.errors import BenchError

_TIMEOUT_S = 30

_PREFIXES = ("bertserve_batch_rows", "bertserve_tokens_total")
Metrics = Mapping[tuple[str, str, str], float]  # (name, model, `le` or `kind`) -> value

_TOO_MANY_REQUESTS = 429


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        url: The URL as given.
        host: Name or IP address.
        port: TCP port.
        path: Path and query; at least `/`.
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
    """An endpoint under load.

    Attributes:
        address: Address of the endpoint.
        workload: Name of its workload, or path of its file of bodies.
        bodies: Request bodies, sent in turn.
        requests: The same bodies as complete HTTP requests.
    """

    address: Address
    workload: str
    bodies: Sequence[Body]
    requests: Sequence[bytes]

    @property
    def label(self) -> str:
        """Name of the target in reports."""
        return f"{self.address.path} {self.workload}"


def build_target(address: Address, workload: str, bodies: Sequence[Body], headers: Mapping[str, str]) -> Target:
    """Returns a target with a request for each body, of which there must be at least one."""
    header_names = {name.lower() for name in headers}
    defaults = {"Host": address.authority, "Content-Type": "application/json"}
    lines = {name: value for name, value in defaults.items() if name.lower() not in header_names} | dict(headers)
    head = f"POST {address.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    requests = [f"{head}Content-Length: {len(body.content)}\r\n\r\n".encode("latin-1") + body.content for body in bodies]
    return Target(address, workload, bodies, requests)


def fetch(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> tuple[int, bytes]:
    """Sends one request; returns the status and the body of the response.

    Raises:
        BenchError: The address cannot be reached, or does not use HTTP.
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
        raise BenchError(f"{address.url} does not speak HTTP: {type(error).__name__}.") from error
    finally:
        connection.close()


def fetch_json(address: Address, path: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the JSON object at a path, or None if there is none.

    Raises:
        BenchError: The address cannot be reached, or does not use HTTP.
    """
    status, raw = fetch(address, "GET", path, headers)
    try:
        value = json.loads(raw) if status == 200 else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_metrics(address: Address, headers: Mapping[str, str]) -> Metrics:
    """Returns the service's metrics of runs and tokens.

    The result is empty if the service has no metrics or has ended, because missing metrics must not invalidate a load.
    """
    try:
        status, raw = fetch(address, "GET", "/metrics", headers)
    except BenchError:
        return {}
    if status != 200:
        return {}
    try:
        return parse_metrics(raw.decode("utf-8", "replace"))
    except ValueError:  # not a page of Prometheus
        return {}


def parse_metrics(text: str) -> Metrics:
    """Returns the metrics of runs and tokens from Prometheus' text format, summed over all labels except the model and `le` or `kind`.

    Raises:
        ValueError: The text has another format.
    """
    metrics: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIXES):
                key = sample.name, sample.labels.get("model", ""), sample.labels.get("le", sample.labels.get("kind", ""))
                # a model with several tasks has a series per task
                metrics[key] = metrics.get(key, 0.0) + sample.value
    return metrics


@dataclass(frozen=True, slots=True)
class BatchStats:
    """The runs of one model between two readings of the metrics.

    Attributes:
        runs: Number of runs of the graph.
        mean_rows: Mean number of rows of a run.
        rows: Histogram of rows per run: upper bound of the metric's bucket -> number of runs.
        real_tokens: Tokens of texts.
        padding_share: Share of padding in all tokens of the runs, 0 to 1.
    """

    runs: int
    mean_rows: float
    rows: dict[str, int]
    real_tokens: int
    padding_share: float


def batch_stats(before: Metrics, after: Metrics, model: str) -> BatchStats | None:
    """Returns the runs of a model between two readings, or None if it did not run."""

    def increase(name: str, label: str = "") -> float:
        key = (f"bertserve_{name}", model, label)
        return after.get(key, 0.0) - before.get(key, 0.0)

    runs = increase("batch_rows_count")
    if runs <= 0:
        return None
    bounds = sorted({label for name, of, label in after if name == "bertserve_batch_rows_bucket" and of == model}, key=float)
    rows, below = {}, 0.0
    for bound in bounds:
        total = increase("batch_rows_bucket", bound)
        if total > below:
            rows[f"{float(bound):g}"] = int(total - below)
        below = total
    real, padded = increase("tokens_total", "real"), increase("tokens_total", "padded")
    return BatchStats(int(runs), increase("batch_rows_sum") / runs, rows, int(real), padded / (real + padded) if real else 0.0)


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
    model = fetch_json(address, address.path.partition("?")[0].rstrip("/") + "/info", headers)
    workload = workload or bodies.default_workload((model or {}).get("task", ""))
    mask = str((model or {}).get("mask_token") or workloads.MASK)
    target = build_target(address, workload, bodies.build_bodies(workload, path=address.path, texts=texts, seed=seed, mask=mask), headers)
    _send_first_request(target, headers)
    # `endpoint` of a model is that of its own task, which may differ from the endpoint under load
    shown = {k: v for k, v in (model or {}).items() if k not in ("endpoint", "evidence", "figures")}
    return target, {"endpoint": address.path, **shown} if model else None


def _send_first_request(target: Target, headers: Mapping[str, str]) -> None:
    """Sends the target's first body once.

    Raises:
        BenchError: There is no HTTP server, or it refuses such requests for a reason other than load.
    """
    status, raw = fetch(target.address, "POST", target.address.path, headers, target.bodies[0].content)
    if status < 200 or (300 <= status < 500 and status != _TOO_MANY_REQUESTS):
        try:
            message = str(json.loads(raw)["error"])
        except (ValueError, KeyError, TypeError):
            message = "no reason was given"
        raise BenchError(f"{target.address.url} answered {status} to a first request: {message}")
