"""Draws a report as one self-contained HTML page: result, table, plots, and all of its JSON.

It is the only module of the benchmarks that imports matplotlib. The plots are drawn for the width of a phone, and larger screens scale
them up.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bertserve.bench.errors import MissingExtraError
from bertserve.bench.report import BenchReport, format_number
from bertserve.service.errors import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bertserve.bench.measurement import Run

_WIDTH_INCHES = 3.7  # 355 CSS pixels, of the 390 of a phone
_HEIGHT_INCHES = 2.8
_LEGEND_INCHES = 0.18  # per line


def require_matplotlib() -> None:
    """Raises MissingExtraError if matplotlib, which draws the plots, is not installed."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(f"the HTML report needs matplotlib: {install_command('bench')}; --json needs nothing.")


def render(report: BenchReport) -> str:
    """Returns the page of a report."""
    plots = {
        "Latency against offered rate": _draw_latency,
        "Answered against offered rate": _draw_answered,
        "Latency distribution": _draw_distribution,
    }
    warnings = [f"{run.name}: {warning}" for run in report.runs for warning in run.warnings]
    summary = "Warnings of the generator: the metrics of these runs may be its own"
    lines = [*(f"{name}: {format_number(value)}" for name, value in report.figures.items()), *report.verdicts()]
    return _PAGE.format(
        title=html.escape(f"{report.command} {report.started}"),
        result=f'<p class="{"missed" if report.is_missed else "passed"}">{html.escape(report.result)}</p>{_list(lines)}',
        warnings=f'<details class="missed"><summary>{summary}</summary>{_list(warnings)}</details>' if warnings else "",
        runs=_table(report.runs),
        plots="".join(f"<figure><figcaption>{title}</figcaption>{_figure(draw, report)}</figure>" for title, draw in plots.items()),
        report=html.escape(json.dumps(report.document(), indent=1, ensure_ascii=False)),
    )


def _table(runs: Sequence[Run]) -> str:
    latencies = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")
    head = ("run", "requests", "errors", "answered/s", "texts/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms", "p99 interval")
    rows = []
    for run in runs:
        interval = " to ".join(map(format_number, (run.latency and run.latency.p99_interval_ms) or (None,)))
        values = map(format_number, (run.rps, run.texts_per_s, *(getattr(run.latency, latency, None) for latency in latencies)))
        cells = (run.name + (" (discarded)" if run.discarded else ""), str(run.requests), f"{run.error_rate:.2%}", *values, interval)
        # on narrow screens, each cell has its name instead of a head
        columns = "".join(f'<td data-name="{name}">{html.escape(cell)}</td>' for name, cell in zip(head, cells, strict=True))
        rows.append(f"<tr{' class=discarded' if run.discarded else ''}>{columns}</tr>")
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _figure(draw: Callable[[Axes, BenchReport], bool], report: BenchReport) -> str:
    """Returns a plot as SVG; `draw` returns whether there was data."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": draw.__name__, "font.size": 9}):  # text stays text
        figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
        axes = figure.add_subplot()
        if draw(axes, report):
            axes.grid(visible=True, which="major", alpha=0.3)
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_scale() == "log":  # 100 is larger than a power of 10 on a phone
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
            handles, labels = axes.get_legend_handles_labels()
            figure.set_figheight(_HEIGHT_INCHES + _LEGEND_INCHES * len(labels))
            figure.legend(handles, labels, loc="outside lower left", frameon=False)
        else:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib numbers its groups from 1 in each figure, so these ids clash; only referenced ids, which are hashes, are kept
    return re.sub(r' id="([^"]+)"', lambda match: match[0] if f"#{match[1]}" in text else "", text)


def _draw_latency(axes: Axes, report: BenchReport) -> bool:
    """Draws the latencies of each run over its offered rate, because the answered rate falls in an overload.

    Each point is a run: no values are averaged or joined.
    """
    points = [(run, run.latency) for run in report.runs if run.latency]
    for marker, kind in (("o", "open loop"), ("s", "closed loop"), ("x", "discarded run")):
        shown = [(run.offered_rate, latency) for run, latency in points if _kind(run) == kind]
        for color, name in enumerate(("p50", "p90", "p99")):
            if shown and (marker != "x" or name == "p99"):
                values = [getattr(latency, f"{name}_ms") for _, latency in shown]
                color_name = "gray" if marker == "x" else f"C{color}"
                axes.plot([rate for rate, _ in shown], values, marker, color=color_name, label=f"{name}, {kind}", markersize=5)
    intervals = [(run.offered_rate, *latency.p99_interval_ms) for run, latency in points if latency.p99_interval_ms and not run.discarded]
    if intervals:
        axes.vlines(*zip(*intervals, strict=True), color="C2", linewidth=1.5, label="95 % interval of the p99")
    for objective in report.objectives if points else ():
        if objective.metric == "p99_ms":
            axes.axhline(objective.bound, color="red", linestyle="--", linewidth=1, label=f"objective: {objective}")
    # latencies are seconds in an overload, and milliseconds below it
    axes.set(xlabel="requests/s offered", ylabel="latency, ms", yscale="log", xlim=(0, None))
    return bool(points)


def _kind(run: Run) -> str:
    return "discarded run" if run.discarded else "open loop" if run.open_loop else "closed loop"


def _draw_answered(axes: Axes, report: BenchReport) -> bool:
    """Draws answered over offered requests; the difference to the diagonal was refused, failed or late."""
    highest = max((run.offered_rate for run in report.runs), default=0.0)
    for marker, kind in (("o", "open loop"), ("s", "closed loop"), ("x", "discarded run")):
        points = [(run.offered_rate, run.rps) for run in report.runs if _kind(run) == kind]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color="gray" if marker == "x" else "C0", label=kind, markersize=5)
    axes.plot([0, highest], [0, highest], "--", color="gray", linewidth=1, label="all answered")
    axes.set(xlabel="requests/s offered", ylabel="requests/s answered", xlim=(0, None), ylim=(0, None))
    return highest > 0


def _draw_distribution(axes: Axes, report: BenchReport) -> bool:
    """Draws the distributions of runs that were not discarded, in the order of their rates: the same order of colors and labels."""
    import matplotlib

    runs = sorted((run for run in report.runs if not run.discarded), key=lambda run: run.offered_rate)
    curves = [(run.name, run.latency.curve) for run in runs if run.latency]
    colors = matplotlib.colormaps["viridis"]
    for i, (label, curve) in enumerate(curves):
        # 1 - share on a logarithmic axis shows the slowest requests
        shares = [max(1 - share, 1e-6) for share, _ in curve]
        color, style = colors(0.9 * i / max(len(curves) - 1, 1)), "-" if i % 2 else "--"
        axes.plot([ms for _, ms in curve], shares, style, drawstyle="steps-post", color=color, label=label)
    if curves:
        axes.set(xlabel="latency, ms", ylabel="share that took longer", xscale="log", yscale="log")
        axes.set_ylim(max(min(1 - curve[-2][0] for _, curve in curves) / 2, 1e-6), 1)
    return bool(curves)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>bert-bench: {title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; overflow-wrap: anywhere; }}
.passed, .missed {{ font-weight: 600; color: light-dark(#161, #9e9); }}
.missed {{ color: light-dark(#a33, #f99); }} .discarded {{ opacity: .6; }}
table {{ border-collapse: collapse; font-size: 12px; width: 100%; overflow-wrap: break-word; }}
td, th {{ padding: .2em .3em; border-bottom: 1px solid #8886; text-align: right; vertical-align: bottom; }}
td:first-child, th:first-child {{ text-align: left; }}
@media (max-width: 900px) {{
  thead {{ display: none; }} tr, td {{ display: block; }} tr {{ margin: 0 0 1em; }}
  td, td:first-child {{ display: flex; justify-content: space-between; gap: 1em; text-align: right; }}
  td:first-child {{ font-weight: 600; }} td::before {{ content: attr(data-name); font-weight: 400; opacity: .8; }}
}}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); gap: 1em; }}
figure {{ margin: 1em 0 0; }} figcaption {{ font-weight: 600; }} svg {{ width: 100%; height: auto; max-width: 560px; }}
summary {{ cursor: pointer; }} pre {{ font-size: 11px; overflow: auto; }}
</style></head><body>
<h1>bert-bench</h1><p>{title}</p>
{result}
{warnings}
<div class="plots">{plots}</div>
{runs}
<details><summary>The whole report</summary><pre>{report}</pre></details>
</body></html>
"""
