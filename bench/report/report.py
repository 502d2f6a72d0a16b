"""The report of a command, with its measurements and their environment, as JSON and as a summary on stdout.

The JSON keys are the names of the dataclass fields below. `FORMAT_VERSION` is their version: a file of the current version must stay
readable.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.bench.errors import BenchError
from bertserve.bench.report import slo
from bertserve.bench.report.slo import Verdict
from bertserve.service import __version__
from bertserve.service.errors import plural

if TYPE_CHECKING:  # --help and wrong flags do not need onnxruntime and pydantic
    from bertserve.bench.engine import EngineThroughput
    from bertserve.bench.report.measurement import GeneratorStats, Measurement

FORMAT = "bert-bench"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ReportRun:
    """A load.

    Attributes:
        name: Description such as `closed, 16 connections`.
        targets: One measurement per target.
        generator: Metrics of the load generator itself.
        limit: Engine throughput measured after the load, if requested.
    """

    name: str
    targets: Sequence[Measurement]
    generator: GeneratorStats
    limit: EngineThroughput | None = None


@dataclass(slots=True)
class BenchReport:
    """The results of a command. They are filled while the command runs, and valid at any time.

    Attributes:
        command: The subcommand.
        settings: Its flags, without keys.
        service: `/info` of the service, if available.
        models: The endpoints' information about their models: digest of the bundle, precision, labels.
        engine: Bundle and graph of the engine throughput, if measured.
        runs: The loads, in order.
        limits: Engine throughputs that do not belong to a load.
        figures: Results of the command as a whole, such as `ratio`.
        judged: Metrics of the loads, in addition to `figures`, that the objectives are checked against.
        verdicts: Results of the objectives.
        inconclusive: Names of inconclusive steps of a sweep, in which the generator was late in each try.
        is_lower_bound: Whether all rates of a sweep held, so that higher ones may hold too.
        interrupted: Whether Ctrl-C ended the command early.
        started: Start of the command in ISO 8601 with the time zone's offset.
    """

    command: str
    settings: Mapping[str, Any]
    service: Mapping[str, Any] | None = None
    models: list[Mapping[str, Any]] = field(default_factory=list)
    engine: Mapping[str, Any] | None = None
    runs: list[ReportRun] = field(default_factory=list)
    limits: list[EngineThroughput] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)
    judged: dict[str, float | None] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)
    is_lower_bound: bool = False
    interrupted: bool = False
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def document(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        document = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": __version__, "machine": _machine(), **asdict(self)}
        document["verdicts"] = [
            {"condition": str(verdict.objective), "measured": verdict.measured, "passed": verdict.passed} for verdict in self.verdicts
        ]
        value: dict[str, Any] = json.loads(json.dumps(document, default=str))
        return value


def write(text: str, path: Path) -> None:
    """Writes a report to a file.

    Raises:
        BenchError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"the report `{path}` cannot be written: {error.strerror}.") from error


def read(path: Path) -> dict[str, Any]:
    """Reads a report written by `--json`.

    Raises:
        BenchError: The file cannot be read, or is not a report of this version.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"`{path}` is not a report of bert-bench: {getattr(error, 'strerror', None) or 'it is not JSON'}.") from error
    if not isinstance(value, dict) or (value.get("format"), value.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise BenchError(f"`{path}` is not a report of bert-bench, version {FORMAT_VERSION}; give files that --json wrote.")
    return value


def _machine() -> dict[str, Any]:
    return {"cpus": os.cpu_count(), "system": platform.system(), "processor": platform.machine(), "python": platform.python_version()}


def summary_lines(report: BenchReport) -> Iterator[str]:
    """Yields the lines of a report's summary."""
    if report.service:
        limits = report.service.get("limits", {})
        yield f"service: {report.service.get('name')} {report.service.get('version')}, {limits.get('threads', '?')} threads"
    for model in report.models:
        yield f"  {model['endpoint']}: {model.get('name')} {model.get('version')}, {model.get('provider')}/{model.get('precision')}"
    if report.engine:
        yield f"engine: {report.engine['bundle']} {report.engine['digest']}, {report.engine['graph']}"
    for run in report.runs:
        yield from _run_lines(run)
    for limit in report.limits:
        yield _throughput_line(limit)
    for name, value in report.figures.items():
        yield f"{name}: {_format(value)}"
    if report.is_lower_bound:
        yield "all tested rates meet the targets, so higher ones may too; give more --steps, or a higher --max-rate"
    if result := slo.sweep_result(report.document()):
        yield f"result: {result}"
    for verdict in report.verdicts:
        yield f"{'passed' if verdict.passed else 'MISSED'}: {verdict.objective}, measured {_format(verdict.measured)}"
    if report.inconclusive:
        steps = ", ".join(report.inconclusive)
        yield f"inconclusive: {steps}: the generator was late in both tries, so these rates were not measured; run the generator on another machine, or with less load on this one"
    if report.interrupted:
        yield "interrupted: these are the metrics of the requests so far"


def _run_lines(run: ReportRun) -> Iterator[str]:
    yield f"{run.name}:"
    for target in run.targets:
        yield from (f"  {line}" for line in _target_lines(target))
    yield f"  {_generator_line(run.generator)}"
    if run.limit:
        yield f"  {_throughput_line(run.limit)}"
    yield from (f"  warning: {warning}" for warning in run.generator.warnings)


def _target_lines(target: Measurement) -> Iterator[str]:
    tokens = "" if target.tokens_per_s is None else f", {target.tokens_per_s:,.0f} tokens/s"
    yield f"{target.target}: {target.rps:.1f} requests/s, {target.texts_per_s:.1f} texts/s{tokens}"
    counts = [f"{count} x {outcome}" for outcome, count in {**target.statuses, **target.errors}.items()]
    yield f"  {plural(target.requests, 'request')} in {target.seconds:.1f} s: {', '.join(counts) or 'none'}; errors {target.error_rate:.2%}"
    latency = target.latency
    if latency:
        yield (
            f"  latency p50 {latency.p50_ms:.2f}, p90 {latency.p90_ms:.2f}, p99 {latency.p99_ms:.2f}, p99.9 {latency.p999_ms:.2f}, "
            f"max {latency.max_ms:.2f} ms"
        )
    if target.server_p50_ms:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in target.server_p50_ms.items())
        overhead = "" if target.overhead_ms is None else f"; all but inference {target.overhead_ms:.2f} ms"
        yield f"  of the service, p50: {parts} ms{overhead}"
    if target.batches:
        yield f"  {plural(target.batches.runs, 'run')} of {target.batches.mean_rows:.2f} rows, padding {target.batches.padding_share:.1%}"


def _generator_line(generator: GeneratorStats) -> str:
    late = "" if generator.late_p99_ms is None else f", sends {generator.late_p99_ms:.2f} ms late at p99"
    return (
        f"generator: {generator.cpu_share:.1%} of a core, {generator.cpu_us_per_request:.0f} us per request, "
        f"{plural(generator.connections, 'connection')}, timer {generator.lag_p99_ms:.2f} ms late at p99{late}"
    )


def _throughput_line(limit: EngineThroughput) -> str:
    return (
        f"engine alone, {plural(limit.threads, 'thread')}: {limit.runs_per_s:.1f} runs/s of {limit.run_ms:.2f} ms, {limit.texts_per_s:.1f} texts/s, "
        f"{limit.tokens_per_s:,.0f} tokens/s, {limit.requests_per_s:.1f} requests/s"
    )


def _format(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
