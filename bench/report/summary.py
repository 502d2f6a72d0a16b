"""The summary on stdout: a few lines for each load, and the figures at the end."""

from __future__ import annotations

from collections.abc import Iterator

from bertserve.bench.engine.limit import EngineLimit
from bertserve.bench.report.generator_stats import GeneratorStats
from bertserve.bench.report.measurement import Measurement
from bertserve.bench.report.report import Report, Run
from bertserve.bench.report.slo import Verdict


def summary_lines(report: Report) -> Iterator[str]:
    """Yields the lines of a report's summary."""
    if report.service:
        limits = report.service.get("limits", {})
        yield f"service: {report.service.get('name')} {report.service.get('version')}, {limits.get('lanes', '?')} lanes"
    for model in report.models:
        yield f"  {model['endpoint']}: {model.get('name')} {model.get('version')}, {model.get('provider')}/{model.get('precision')}"
    if report.engine:
        yield f"engine: {report.engine['bundle']} {report.engine['digest']}, {report.engine['graph']}"
    for run in report.runs:
        yield from _run_lines(run)
    for limit in report.limits:
        yield _limit_line(limit)
    for name, value in report.figures.items():
        yield f"{name}: {_format(value)}"
    if report.is_lower_bound:
        yield "every rate that was tried holds, so that higher ones may too; give more --steps, or a higher --max-rate"
    for verdict in report.verdicts:
        yield _verdict_line(verdict)
    if report.inconclusive:
        steps = ", ".join(report.inconclusive)
        yield f"inconclusive: {steps}: the generator was late in both tries, so nothing is known there; run it elsewhere, or with less beside it"
    if report.interrupted:
        yield "interrupted: these are the figures of what there was"


def _run_lines(run: Run) -> Iterator[str]:
    yield f"{run.name}:"
    for target in run.targets:
        yield from (f"  {line}" for line in _target_lines(target))
    yield f"  {_generator_line(run.generator)}"
    if run.limit:
        yield f"  {_limit_line(run.limit)}"
    yield from (f"  warning: {warning}" for warning in run.generator.warnings)


def _target_lines(target: Measurement) -> Iterator[str]:
    tokens = "" if target.tokens_per_s is None else f", {target.tokens_per_s:,.0f} tokens/s"
    yield f"{target.target}: {target.rps:.1f} requests/s, {target.texts_per_s:.1f} texts/s{tokens}"
    counts = [f"{count} x {outcome}" for outcome, count in {**target.statuses, **target.errors}.items()]
    yield f"  {target.requests} requests in {target.seconds:.1f} s: {', '.join(counts) or 'none'}; errors {target.error_rate:.2%}"
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
        yield f"  {target.batches.runs} runs of {target.batches.mean_rows:.2f} rows, padding {target.batches.padding_share:.1%}"


def _generator_line(generator: GeneratorStats) -> str:
    late = "" if generator.late_p99_ms is None else f", sends {generator.late_p99_ms:.2f} ms late at p99"
    return (
        f"generator: {generator.cpu_share:.1%} of a core, {generator.cpu_us_per_request:.0f} us a request, "
        f"{generator.connections} connections, timer {generator.lag_p99_ms:.2f} ms late at p99{late}"
    )


def _limit_line(limit: EngineLimit) -> str:
    return (
        f"engine alone, {limit.threads} threads: {limit.runs_per_s:.1f} runs/s of {limit.run_ms:.2f} ms, {limit.texts_per_s:.1f} texts/s, "
        f"{limit.tokens_per_s:,.0f} tokens/s, {limit.requests_per_s:.1f} requests/s"
    )


def _verdict_line(verdict: Verdict) -> str:
    return f"{'passed' if verdict.passed else 'MISSED'}: {verdict.objective}, measured {_format(verdict.measured)}"


def _format(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
