"""The service's own metrics, read before and after a load: how many rows shared a run of the graph, and how much was padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from bertserve.bench.errors import BenchError
from bertserve.bench.target.address import Address
from bertserve.bench.target.fetch import fetch

_PREFIXES = ("bertserve_batch_rows", "bertserve_tokens_total")
Metrics = Mapping[tuple[str, str, str], float]  # (name, model, `le` or `kind`) -> value


def read_metrics(address: Address, headers: Mapping[str, str]) -> Metrics:
    """Returns the service's metrics of runs and tokens.

    The result is empty if the service has none, or has gone: a load that was measured must not be lost for its metrics.
    """
    try:
        status, raw = fetch(address, "GET", "/metrics", headers)
    except BenchError:
        return {}
    if status != 200:
        return {}
    try:
        return parse_metrics(raw.decode("utf-8", "replace"))
    except ValueError:  # it is not a page of Prometheus
        return {}


def parse_metrics(text: str) -> Metrics:
    """Returns the metrics of runs and tokens in Prometheus' text format, summed over all labels but the model and `le` or `kind`.

    Raises:
        ValueError: The text has another format.
    """
    found: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIXES):
                key = sample.name, sample.labels.get("model", ""), sample.labels.get("le", sample.labels.get("kind", ""))
                # a model that answers several tasks has series for each of them
                found[key] = found.get(key, 0.0) + sample.value
    return found


@dataclass(frozen=True, slots=True)
class BatchStats:
    """The runs of one model between two readings of the metrics.

    Attributes:
        runs: Runs of the graph.
        mean_rows: Mean number of rows of a run.
        rows: Histogram of the rows of a run: upper bound of the metric's bucket -> number of runs.
        real_tokens: Tokens of texts that were run.
        padding_share: Share of padding in all tokens that were run, 0 to 1.
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
