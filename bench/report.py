"""The report of a command, with its measurements and their environment, as JSON and as a summary on stdout.

The JSON keys are the names of the dataclass fields.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bertserve.bench.objectives import METRICS, Objective
from bertserve.service import __version__
from bertserve.service.errors import plural

if TYPE_CHECKING:  # --help and wrong flags do not need onnxruntime and pydantic
    from bertserve.bench.measurement import Run


@dataclass(slots=True)
class BenchReport:
    """The results of a command. They are filled while the command runs, and valid at any time.

    Attributes:
        settings: The flags of the command, without keys.
        service: `/info` of the service, if available; `model` is the endpoint's information about its model, likewise.
        raw_loop: Bundle and graph of the raw loop, if there is one.
        results: Results of the command as a whole, such as `ratio`.
        metrics: Metrics of the loads that the objectives are checked against.
    """

    command: str
    settings: Mapping[str, Any]
    objectives: Sequence[Objective] = ()
    service: Mapping[str, Any] | None = None
    model: Mapping[str, Any] | None = None
    raw_loop: Mapping[str, Any] | None = None
    runs: list[Run] = field(default_factory=list)
    results: dict[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    interrupted: bool = False
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @property
    def has_results(self) -> bool:
        """Whether a request had status 200, and a sweep found a rate."""
        return any(run.latency for run in self.runs) and (self.command != "sweep" or self.results.get("max_rate") is not None)

    @property
    def is_missed(self) -> bool:
        """Whether an objective was missed."""
        return not all(objective.is_met(self._measured(objective)) for objective in self.objectives)

    @property
    def result(self) -> str:
        """What the command found, as a sentence without its full stop."""
        if self.command == "compare":
            ratio, lowest, highest = (format_number(self.results.get(name)) for name in ("ratio", "ratio_lowest", "ratio_highest"))
            return f"the service has {ratio} times the throughput of the raw loop, {lowest} to {highest} in the rounds"
        if self.command != "sweep":
            return "misses an objective" if self.is_missed else "meets all objectives"
        limits = " and ".join(str(objective) for objective in self.objectives if METRICS[objective.metric])
        rate, above = self.results.get("max_rate"), self.results.get("lowest_rate_not_held")
        if rate is None:
            return f"does not hold {limits} at any rate that was tried" if above else "no rate was measured"
        limit = "; higher rates may hold too" if above is None else f", but not at {above:.4g}"
        return f"holds {limits} up to {rate:.4g} requests/s in two runs{limit}"

    def verdicts(self) -> Iterator[str]:
        """Yields a line for each objective."""
        for objective in self.objectives:
            measured = self._measured(objective)
            yield f"{'passed' if objective.is_met(measured) else 'MISSED'}: {objective}, measured {format_number(measured)}"

    def document(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
        facts = {"version": __version__, "machine": machine, "result": self.result, "verdicts": list(self.verdicts())}
        value: dict[str, Any] = json.loads(json.dumps(facts | asdict(self), default=str))
        return value

    def _measured(self, objective: Objective) -> float | None:
        return {**self.metrics, **self.results}.get(objective.metric)


def summary_lines(report: BenchReport) -> Iterator[str]:
    """Yields the lines of a report's summary."""
    if report.service:
        limits = report.service.get("limits", {})
        yield f"service: {report.service.get('name')} {report.service.get('version')}, {limits.get('threads', '?')} threads"
    if report.model:
        yield "  {endpoint}: {name} {version}, {provider}/{precision}".format(**report.model)
    if report.raw_loop:
        yield "raw loop: {bundle} {digest}, {graph}, {threads} threads".format(**report.raw_loop)
    for run in report.runs:
        yield from _run_lines(run)
    for name, value in report.results.items():
        yield f"{name}: {format_number(value)}"
    yield f"result: {report.result}"
    yield from report.verdicts()
    if report.interrupted:
        yield "interrupted: these are the metrics of the requests so far"


def _run_lines(run: Run) -> Iterator[str]:
    yield f"{run.name}:"
    yield f"  {run.rps:.1f} requests/s, {run.texts_per_s:.1f} texts/s"
    counts = ", ".join(f"{count} x {outcome}" for outcome, count in run.outcomes.items())
    yield f"  {plural(run.requests, 'request')} in {run.seconds:.1f} s: {counts or 'none'}; errors {run.error_rate:.2%}"
    if latency := run.latency:
        yield (
            f"  latency p50 {latency.p50_ms:.2f}, p90 {latency.p90_ms:.2f}, p99 {latency.p99_ms:.2f}, "
            f"p99.9 {latency.p999_ms:.2f}, max {latency.max_ms:.2f} ms"
        )
    if run.server_p50_ms:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in run.server_p50_ms.items())
        yield f"  of the service, p50: {parts} ms" + ("" if run.overhead_ms is None else f"; all but inference {run.overhead_ms:.2f} ms")
    yield from (f"  warning: {warning}" for warning in run.warnings)


def format_number(value: float | None) -> str:
    """Returns a number with four digits, or with all digits of its integer part from 10,000 on; `nothing` for None."""
    return "nothing" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
