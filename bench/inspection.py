"""What the service under test says of itself: one trial request, `/info`, and `/metrics` before and after a load.

A service that is not bertserve has none of these but the first; what it lacks is left out of the report.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.errors import BenchError
from bench.load.target import Address, Target

_TIMEOUT_S = 30
_SERIES = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_BUSY = 429
Metrics = Mapping[tuple[str, str, str], float]  # (name, model, `le` or `kind`) -> value


def probe(target: Target, headers: Mapping[str, str]) -> None:
    """Sends the target's first body once.

    Raises:
        BenchError: Nothing that speaks HTTP is there, or it refuses such requests whatever the load.
    """
    status, raw = _request(target.address, "POST", target.address.path, headers, target.bodies[0].content)
    if status < 200 or (300 <= status < 500 and status != _BUSY):
        try:
            message = str(json.loads(raw)["error"])
        except (ValueError, KeyError, TypeError):
            message = "no reason was given"
        raise BenchError(f"{target.address.url} answered {status} to a first request: {message}")


def service_info(address: Address, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns `/info` of the service, or None where it has none."""
    return _json(address, "/info", headers)


def model_info(address: Address, headers: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the endpoint's own `info`, that is its model's, or None where it has none."""
    return _json(address, address.path.partition("?")[0].rstrip("/") + "/info", headers)


def metrics(address: Address, headers: Mapping[str, str]) -> Metrics:
    """Returns the service's metrics of runs, empty where it has none, or where it is gone: what was measured is not lost by that."""
    try:
        status, raw = _request(address, "GET", "/metrics", headers)
    except BenchError:
        return {}
    found: dict[tuple[str, str, str], float] = {}
    for line in raw.decode("utf-8", "replace").splitlines() if status == 200 else ():
        series = _SERIES.match(line)
        if series and series[1].startswith(("bertserve_batch_rows", "bertserve_tokens_total")):
            labels: dict[str, str] = dict(_LABEL.findall(series[2]))
            key = series[1], labels.get("model", ""), labels.get("le", labels.get("kind", ""))
            # a model that answers several tasks has series for each of them
            found[key] = found.get(key, 0.0) + float(series[3])
    return found


@dataclass(frozen=True, slots=True)
class Batches:
    """What a model's runs were like between two readings of the metrics.

    Attributes:
        runs: Of the graph.
        mean_rows: Rows of a run.
        rows: Runs by their rows: upper bound of the metric's bucket -> runs.
        real_tokens: Tokens of texts that were run.
        padding_share: Of all tokens that were run, those that only filled up.
    """

    runs: int
    mean_rows: float
    rows: dict[str, int]
    real_tokens: int
    padding_share: float


def batches(before: Metrics, after: Metrics, model: str) -> Batches | None:
    """Returns what happened between two readings, or None if the model did not run."""

    def grown(name: str, label: str = "") -> float:
        key = (f"bertserve_{name}", model, label)
        return after.get(key, 0.0) - before.get(key, 0.0)

    runs = grown("batch_rows_count")
    if runs <= 0:
        return None
    bounds = sorted({label for name, of, label in after if name == "bertserve_batch_rows_bucket" and of == model}, key=float)
    rows, below = {}, 0.0
    for bound in bounds:
        total = grown("batch_rows_bucket", bound)
        if total > below:
            rows[f"{float(bound):g}"] = int(total - below)
        below = total
    real, padded = grown("tokens_total", "real"), grown("tokens_total", "padded")
    return Batches(int(runs), grown("batch_rows_sum") / runs, rows, int(real), padded / (real + padded) if real else 0.0)


def _json(address: Address, path: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    status, raw = _request(address, "GET", path, headers)
    try:
        value = json.loads(raw) if status == 200 else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _request(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> tuple[int, bytes]:
    context = address.context
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
        raise BenchError(address.unreachable(error)) from error
    except http.client.HTTPException as error:
        raise BenchError(f"{address.url} does not answer in HTTP: {type(error).__name__}.") from error
    finally:
        connection.close()
