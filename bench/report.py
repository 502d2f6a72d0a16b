"""The report of a command, with its objectives and measurements: as JSON, as a summary on stdout, and as an HTML page with plots.

The JSON keys are the names of the dataclass fields, and the keys of `results`. The plots are drawn for the width of a phone, and
larger screens scale them up. Only their functions import matplotlib.
"""

import html
import io
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from bertserve.bench.measurement import METRICS, SHARES, LoadMetrics
from bertserve.service import __version__
from bertserve.service.errors import StartError
from bertserve.service.messages import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit on a metric in `METRICS`, in the unit at the end of its name."""

    metric: str
    bound: float

    def is_met(self, measured: float | None) -> bool:
        """Returns whether a measured value meets the limit; false for None, a metric that was not measured."""
        if measured is None:
            return False
        return measured <= self.bound if METRICS[self.metric] else measured >= self.bound

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if METRICS[self.metric] else '>='} {self.bound:g}"


def parse_objectives(texts: Sequence[str]) -> list[Objective]:
    """Parses objectives; each text has one, or several separated by commas.

    A limit of 1 % on `error_rate` is added if there is none, because a service that refuses many requests looks fast.

    Raises:
        StartError: A text is not `METRIC=NUMBER`, or names an unknown metric, or the metric of another text.
    """
    objectives: dict[str, Objective] = {}
    for part in (part for text in texts for part in text.split(",")):
        metric, _, number = part.strip().partition("=")
        bound = float(number) if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", number) else None
        if metric not in METRICS or bound is None or not math.isfinite(bound):
            raise StartError(f"`{part}` is not an objective; give METRIC=NUMBER, where METRIC is one of {', '.join(METRICS)}.")
        if metric in objectives:
            raise StartError(f"--slo has several objectives for {metric}; give one.")
        objectives[metric] = Objective(metric, bound)
    objectives.setdefault("error_rate", Objective("error_rate", 0.01))
    return list(objectives.values())


@dataclass(slots=True)
class BenchReport:
    """The results of a command. They are filled while the command runs, and valid at any time.

    Attributes:
        settings: The flags of the command, without keys.
        service: `/info` of the service, if available; `models` are the targets' information about their models, likewise.
        raw_loop: Bundle and graph of the raw loop, if there is one.
        results: The values that `compare` or `sweep` found, None for a rate that was not found; a single load has only metrics.
        metrics: Metrics of the loads that the objectives are checked against.
    """

    command: str
    settings: Mapping[str, Any]
    objectives: Sequence[Objective] = ()
    service: Mapping[str, Any] | None = None
    models: Sequence[Mapping[str, Any]] = ()
    raw_loop: Mapping[str, Any] | None = None
    loads: list[LoadMetrics] = field(default_factory=list)
    results: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    interrupted: bool = False
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @property
    def answered_loads(self) -> list[LoadMetrics]:
        """The loads in which a request had status 200."""
        return [load for load in self.loads if load.latency]

    @property
    def is_missed(self) -> bool:
        """Whether an objective was missed."""
        return not all(verdict["passed"] for verdict in self.verdicts)

    @property
    def limits(self) -> list[Objective]:
        """The objectives that decide whether a rate of `sweep` holds: all but those on rates."""
        return [objective for objective in self.objectives if METRICS[objective.metric]]

    @property
    def conclusion(self) -> str:
        """The conclusion of the command: a sentence without its full stop."""
        if self.command == "compare":
            return _compare_conclusion(self.results)
        if self.command == "sweep":
            return f"{' and '.join(map(str, self.limits))}: {_sweep_conclusion(self.results)}"
        return "misses an objective" if self.is_missed else "meets all objectives"

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """The condition of each objective, the measured value, and whether it passed."""
        values = {objective: {**self.metrics, **self.results}.get(objective.metric) for objective in self.objectives}
        return [{"condition": str(objective), "measured": value, "passed": objective.is_met(value)} for objective, value in values.items()]

    def document(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
        facts = {"version": __version__, "machine": machine, "conclusion": self.conclusion, "verdicts": self.verdicts}
        return json.loads(json.dumps(facts | asdict(self), default=str))


def _compare_conclusion(results: Mapping[str, float | None]) -> str:
    if not results:
        return "no round was completed"
    ratio, lowest, highest = (format_number(results[name]) for name in ("ratio", "ratio_lowest", "ratio_highest"))
    return f"the service has {ratio} times the throughput of the raw loop, {lowest} to {highest} in the rounds"


def _sweep_conclusion(results: Mapping[str, float | None]) -> str:
    parts = []
    if (held := results.get("max_rate")) is not None:
        parts.append(f"held up to {held:.4g} requests/s in two loads")
    if (not_held := results.get("lowest_rate_not_held")) is not None:
        parts.append(f"not held at {not_held:.4g}")
    elif parts:
        parts.append("higher rates may hold too")
    if (unmeasured := results.get("unmeasured_rate")) is not None:
        parts.append(f"not measured at {unmeasured:.4g}, because the generator was late")
    return "; ".join(parts or ["no rate was measured"])


def summary_lines(report: BenchReport) -> Iterator[str]:
    """Yields the lines of a report's summary."""
    if report.service:
        limits = report.service.get("limits", {})
        yield f"service: {report.service.get('name')} {report.service.get('version')}, {limits.get('threads', '?')} threads"
    for model in report.models:
        yield "  {name} {version}, {provider}/{precision}, workload {workload}".format(**model)
    if report.raw_loop:
        yield "raw loop: {bundle} {digest}, {graph}, {threads} threads".format(**report.raw_loop)
    for load in report.loads:
        yield from _load_lines(load)
    yield from (f"{name}: {format_number(value)}" for name, value in report.results.items() if value is not None)
    yield f"conclusion: {report.conclusion}"
    for verdict in report.verdicts:
        measured = "" if verdict["measured"] is None else "measured "
        yield f"{'passed' if verdict['passed'] else 'MISSED'}: {verdict['condition']}, {measured}{format_number(verdict['measured'])}"
    if report.interrupted:
        yield "interrupted: these are the metrics of the requests so far"


def _load_lines(load: LoadMetrics) -> Iterator[str]:
    yield f"{load.name}:"
    tokens = "" if load.tokens_per_s is None else f", {load.tokens_per_s:,.0f} tokens/s"
    yield f"  {load.rps:.1f} requests/s, {load.texts_per_s:.1f} texts/s{tokens}"
    if load.batches:
        yield "  {runs:.0f} batches of {mean_rows:.2f} rows, padding {padding_share:.1%}".format(**load.batches)
    counts = ", ".join(f"{count} x {outcome}" for outcome, count in load.outcomes.items())
    yield f"  {plural(load.requests, 'request')} in {load.seconds:.1f} s: {counts or 'none'}; errors {load.error_rate:.2%}"
    if load.latency:
        line = "  latency p50 {p50_ms:.2f}, p90 {p90_ms:.2f}, p99 {p99_ms:.2f}, p99.9 {p999_ms:.2f}, max {max_ms:.2f} ms"
        yield line.format(**load.latency)
    if load.server_p50_ms:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in load.server_p50_ms.items())
        yield f"  of the service, p50: {parts} ms" + ("" if load.overhead_ms is None else f"; all but inference {load.overhead_ms:.2f} ms")
    yield from (f"  warning: {warning}" for warning in load.warnings)


def format_number(value: float | None) -> str:
    """Returns a number with four digits, or all digits of its integer part if it is at least 10,000; `not measured` for None."""
    return "not measured" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def html_page(report: BenchReport) -> str:
    """Returns a report as an HTML page, without references to other files."""
    plots = {"Latency against offered rate": _draw_latency, "Latency distribution": _draw_distribution} if report.answered_loads else {}
    if report.command == "sweep" and plots:
        plots["Answered against offered rate"] = _draw_answered
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(f"{report.command} {report.started}"),
        style="missed" if report.is_missed else "passed",
        conclusion=html.escape(report.conclusion),
        summary=html.escape("\n".join(summary_lines(report))),
        plots="".join(f"<figure><figcaption>{title}</figcaption>{_figure(draw, report)}</figure>" for title, draw in plots.items()),
        report=html.escape(json.dumps(report.document(), indent=1, ensure_ascii=False)),
    )


def _figure(draw: Callable[["Axes", BenchReport], None], report: BenchReport) -> str:
    """Returns a plot as SVG."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": draw.__name__, "font.size": 9}):  # text stays text
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        draw(axes, report)
        axes.grid(visible=True, which="major", alpha=0.3)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":  # 100 is larger than a power of 10 on a phone
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        handles, labels = axes.get_legend_handles_labels()
        figure.set_size_inches(3.7, 2.8 + 0.18 * len(labels))  # 355 of the 390 CSS pixels of a phone; 0.18 per line of the legend
        figure.legend(handles, labels, loc="outside lower left", frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib numbers its groups from 1 in each figure, so these ids clash; only referenced ids, which are hashes, are kept
    return re.sub(r' id="([^"]+)"', lambda match: match[0] if f"#{match[1]}" in text else "", text)


def _draw_latency(axes: "Axes", report: BenchReport) -> None:
    """Draws the latencies of each load over its offered rate, because the answered rate falls in an overload.

    Each point is a load: no values are averaged or joined.
    """
    for marker, kind, is_open in (("o", "open loop", True), ("s", "closed loop", False)):
        loads = [load for load in report.answered_loads if load.open_loop == is_open]
        for color, name in enumerate(("p50", "p90", "p99") if loads else ()):
            rates, values = [load.offered_rate for load in loads], [load.latency[f"{name}_ms"] for load in loads]
            axes.plot(rates, values, marker, color=f"C{color}", label=f"{name}, {kind}", markersize=5)
    for objective in report.objectives:
        if objective.metric in (*SHARES, "mean_ms"):
            axes.axhline(objective.bound, color="red", linestyle="--", linewidth=1, label=f"objective: {objective}")
    # latencies are seconds in an overload, and milliseconds below it
    axes.set(xlabel="requests/s offered", ylabel="latency, ms", yscale="log", xlim=(0, None))


def _draw_answered(axes: "Axes", report: BenchReport) -> None:
    """Draws the answered over the offered rate of each open loop. The rest, up to the diagonal, was refused, failed or late."""
    loads = [load for load in report.answered_loads if load.open_loop]
    axes.plot([load.offered_rate for load in loads], [load.rps for load in loads], "o", label="open loop", markersize=5)
    axes.axline((0, 0), slope=1, color="gray", linestyle="--", linewidth=1, label="all answered")
    axes.set(xlabel="requests/s offered", ylabel="requests/s answered with 200", xlim=(0, None), ylim=(0, None))


def _draw_distribution(axes: "Axes", report: BenchReport) -> None:
    """Draws the percentiles of each load, in the order of the rates: the same order of colors and labels."""
    import matplotlib

    loads = sorted(report.answered_loads, key=lambda load: load.offered_rate)
    for i, load in enumerate(loads):
        # 1 - share on a logarithmic axis shows the slowest requests
        points = [(load.latency[name], 1 - share) for name, share in SHARES.items() if share < 1]
        color, style = matplotlib.colormaps["viridis"](0.9 * i / max(len(loads) - 1, 1)), "o-" if i % 2 else "o--"
        axes.plot(*zip(*points, strict=True), style, color=color, label=load.name, markersize=3)
    axes.set(xlabel="latency, ms", ylabel="share that took longer", xscale="log", yscale="log")
