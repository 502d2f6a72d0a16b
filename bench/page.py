"""Draws a report as one self-contained HTML page: summary, plots, and all of its JSON. Only this module imports matplotlib.

The plots are drawn for the width of a phone, and larger screens scale them up.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bertserve.bench import BenchError
from bertserve.bench.report import BenchReport, summary_lines
from bertserve.service.errors import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES, _HEIGHT_INCHES = 3.7, 2.8  # the width is 355 CSS pixels, of the 390 of a phone


def require_matplotlib() -> None:
    """Raises BenchError if matplotlib, which draws the plots, is not installed."""
    if find_spec("matplotlib") is None:
        raise BenchError(f"the HTML report needs matplotlib: {install_command('bench')}; --json needs nothing.")


def render(report: BenchReport) -> str:
    """Returns the page of a report as HTML, without references to other files."""
    plots = {"Latency against offered rate": _draw_latency, "Latency distribution": _draw_distribution}
    return _PAGE.format(
        title=html.escape(f"{report.command} {report.started}"),
        style="missed" if report.is_missed else "passed",
        result=html.escape(report.result),
        summary=html.escape("\n".join(summary_lines(report))),
        plots="".join(f"<figure><figcaption>{title}</figcaption>{_figure(draw, report)}</figure>" for title, draw in plots.items()),
        report=html.escape(json.dumps(report.document(), indent=1, ensure_ascii=False)),
    )


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
            figure.set_figheight(_HEIGHT_INCHES + 0.18 * len(labels))  # inches per line of the legend
            figure.legend(handles, labels, loc="outside lower left", frameon=False)
        else:
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
    for marker, kind, is_open in (("o", "open loop", True), ("s", "closed loop", False)):
        shown = [(run.offered_rate, latency) for run, latency in points if run.open_loop == is_open]
        for color, name in enumerate(("p50", "p90", "p99") if shown else ()):
            values = [getattr(latency, f"{name}_ms") for _, latency in shown]
            axes.plot([rate for rate, _ in shown], values, marker, color=f"C{color}", label=f"{name}, {kind}", markersize=5)
    for objective in report.objectives if points else ():
        if objective.metric == "p99_ms":
            axes.axhline(objective.bound, color="red", linestyle="--", linewidth=1, label=f"objective: {objective}")
    # latencies are seconds in an overload, and milliseconds below it
    axes.set(xlabel="requests/s offered", ylabel="latency, ms", yscale="log", xlim=(0, None))
    return bool(points)


def _draw_distribution(axes: Axes, report: BenchReport) -> bool:
    """Draws the distributions in the order of the rates: the same order of colors and labels."""
    import matplotlib

    runs = sorted(report.runs, key=lambda run: run.offered_rate)
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
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; }}
.passed, .missed {{ font-weight: 600; color: light-dark(#161, #9e9); }} .missed {{ color: light-dark(#a33, #f99); }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); gap: 1em; }}
figure {{ margin: 1em 0 0; }} figcaption {{ font-weight: 600; }} svg {{ width: 100%; height: auto; max-width: 560px; }}
pre {{ font-size: 11px; white-space: pre-wrap; overflow-wrap: anywhere; }}
</style></head><body>
<h1>bert-bench</h1><p>{title}</p>
<p class="{style}">{result}</p>
<div class="plots">{plots}</div>
<pre>{summary}</pre>
<details><summary>The whole report</summary><pre>{report}</pre></details>
</body></html>
"""
