"""The service's metrics before and after a load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bench.errors import BenchError
from bench.target.address import Address
from bench.target.fetch import fetch

_SERIES = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Metrics = Mapping[tuple[str, str, str], float]  # (name, model, `le` or `kind`) -> value


def metrics(address: Address, headers: Mapping[str, str]) -> Metrics:
    """Returns the service's metrics of runs, empty where it has none, or where it is gone: what was measured is not lost by that."""
    try:
        status, raw = fetch(address, "GET", "/metrics", headers)
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
