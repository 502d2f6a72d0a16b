"""Converts reports to one self-contained HTML page: results, plots, settings. It reads the JSON form, including older files.

It is the only module of the benchmarks that imports matplotlib.
"""

from __future__ import annotations

import html
import io
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bertserve.bench.errors import MissingExtraError
from bertserve.bench.report import slo
from bertserve.service.errors import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (6.4, 4.0)
_SAME_RATE = 1.03  # with Poisson arrivals, two runs at the same rate differ by a few requests
Runs = Sequence[Mapping[str, Any]]


def render_page(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the page of one or several reports in their JSON form.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    runs = sorted((run for document in documents for run in document["runs"]), key=_place)
    plots = draw_plots(runs, [verdict["condition"] for document in documents for verdict in document["verdicts"]])
    figures = "".join(f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in plots.items())
    return _PAGE.format(
        title=html.escape(", ".join(f"{document['command']} {document['started']}" for document in documents)),
        verdicts="".join(map(_results_list, documents)),
        runs=_runs_table(runs),
        plots=figures,
        warnings=_warnings(runs),
        settings="".join(map(_settings_block, documents)),
    )


def _place(run: Mapping[str, Any]) -> float:
    """Returns the sort key of a run: closed loops first, in order, then open loops by their rates."""
    return sum(map(offered_rate, run["targets"])) if is_open(run) else -1.0


def _warnings(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns all warnings, folded under one line."""
    lines = [f"{run['name']}: {warning}" for run in runs for warning in run["generator"]["warnings"]]
    count = sum(bool(run["generator"]["warnings"]) for run in runs)
    summary = f"The generator warns of {count} of {len(runs)} runs, whose metrics may be its own"
    return f'<details class="warnings"><summary>{summary}</summary>{_list(lines)}</details>' if lines else ""


def _results_list(document: Mapping[str, Any]) -> str:
    missed = any(not verdict["passed"] for verdict in document["verdicts"])
    result = slo.sweep_result(document) or ("misses a target" if missed else "keeps all targets" if document["verdicts"] else "")
    lines = [f"{name}: {_format(value)}" for name, value in document["figures"].items()]
    lines += [
        f"{'passed' if verdict['passed'] else 'MISSED'}: {verdict['condition']}, measured {_format(verdict['measured'])}"
        for verdict in document["verdicts"]
    ]
    text = f'<p class="{"missed" if missed else "passed"}">{html.escape(document["command"])}: {html.escape(result)}</p>' if result else ""
    return text + _list(lines)


def _runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["run", "target", "requests", "errors", "offered/s", "answered/s", "texts/s", "tokens/s"]
    head += ["p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms", "batch size", "padding", "engine texts/s", "generator CPU"]
    rows = []
    for run in runs:
        for target in run["targets"]:
            latency, batches, limit = target["latency"] or {}, target["batches"] or {}, run["limit"] or {}
            cells = [run["name"], target["target"], target["requests"], f"{target['error_rate']:.2%}"]
            cells += [_format(offered_rate(target)), *(_format(target[name]) for name in ("rps", "texts_per_s", "tokens_per_s"))]
            cells += [_format(latency.get(name)) for name in ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")]
            cells += [_format(batches.get("mean_rows")), f"{batches['padding_share']:.1%}" if batches else "–"]
            cells += [_format(limit.get("texts_per_s")), f"{run['generator']['cpu_share']:.0%}"]
            # on narrow screens, each cell has its name instead of a head
            rows.append("".join(f'<td data-name="{name}">{html.escape(str(cell))}</td>' for name, cell in zip(head, cells, strict=True)))
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _settings_block(document: Mapping[str, Any]) -> str:
    shown = {name: document[name] for name in ("command", "started", "version", "machine", "settings", "engine", "service", "models")}
    shown["errors"] = [target["statuses"] | target["errors"] for run in document["runs"] for target in run["targets"]]
    text = html.escape(json.dumps(shown, indent=1, ensure_ascii=False))
    names = html.escape(", ".join(run["name"] for run in document["runs"]))
    return f"<details><summary>Settings, service and models: {names}</summary><pre>{text}</pre></details>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>bert-bench: {title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; overflow-wrap: anywhere; }}
.passed, .missed {{ font-size: 1.2em; font-weight: 600; color: light-dark(#161, #9e9); }}
.missed, .warnings {{ color: light-dark(#a33, #f99); }}
table {{ border-collapse: collapse; font-size: 12px; width: 100%; overflow-wrap: break-word; }}
td, th {{ padding: .2em .3em; border-bottom: 1px solid #8886; text-align: right; vertical-align: bottom; }}
td:nth-child(-n+2), th:nth-child(-n+2) {{ text-align: left; }}
@media (max-width: 900px) {{
  thead {{ display: none; }} tr, td {{ display: block; }} tr {{ margin: 0 0 1em; }}
  td, td:nth-child(-n+2) {{ display: flex; justify-content: space-between; gap: 1em; text-align: right; }}
  td:first-child {{ font-weight: 600; }} td::before {{ content: attr(data-name); font-weight: 400; opacity: .8; }}
}}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1em; }}
figure {{ margin: 1em 0 0; }} figcaption {{ font-weight: 600; }} svg {{ width: 100%; height: auto; }}
summary {{ cursor: pointer; }} pre {{ font-size: 11px; overflow: auto; }} .warnings {{ margin: 1em 0; }}
</style></head><body>
<h1>bert-bench</h1><p>{title}</p>
{verdicts}
{warnings}
{runs}
<div class="plots">{plots}</div>
{settings}
</body></html>
"""


def require_matplotlib() -> None:
    """Raises an error if plots cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError(f"the HTML report needs matplotlib: {install_command('bench')}; --json needs nothing.")


def draw_plots(runs: Runs, conditions: Sequence[str] = ()) -> dict[str, str]:
    """Returns the plots as SVG, by title.

    Args:
        runs: The `runs` of a report in its JSON form.
        conditions: The objectives, in the form of a report's verdicts; an objective on a latency is a line in the plot.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    return {
        "Latency against offered rate": _figure(_latency, runs, conditions),
        "Answered against offered rate": _figure(_answered, runs),
        "Latency distribution": _figure(_distribution, runs),
        "Batch size": _figure(_batch_size, runs),
        "Padding share": _figure(_padding, runs),
    }


def _figure(plot: Any, runs: Runs, *more: Any) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text; ids have a salt per plot, because all plots share one page
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.__name__, "font.size": 9}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        if not plot(axes, runs, *more):
            axes.set_axis_off()
            axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib numbers its groups from 1 in each figure, so these ids clash; only referenced ids, which are hashes, are kept
    return re.sub(r' id="([^"]+)"', lambda match: match[0] if f"#{match[1]}" in text else "", text)


def _targets(runs: Runs) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the measurements of all runs, each with its label."""
    return [
        (f"{run['name']} {target['target']}" if len(run["targets"]) > 1 else str(run["name"]), target)
        for run in runs
        for target in run["targets"]
    ]


def is_open(run: Mapping[str, Any]) -> bool:
    """Returns whether a run, in its JSON form, is an open loop, whose requests are due independently of the service."""
    return run["generator"]["late_p99_ms"] is not None


def offered_rate(target: Mapping[str, Any]) -> float:
    """Returns the requests per second that were due in the measured time; in a closed loop, the service's speed decides them."""
    return float(target["requests"] / target["seconds"])


def _latency(axes: Axes, runs: Runs, conditions: Sequence[str]) -> bool:
    """Draws open loops as a curve over their rates, and closed loops as points. Returns whether there was data.

    The x-axis is the offered rate, because a curve over the answered rate would turn back in an overload. Several runs at a rate are one
    point with their median, so that the curve has no vertical lines.
    """
    has_data = False
    for open_loop, style in ((True, "o-"), (False, "s")):
        loop_runs = [run for run in runs if is_open(run) == open_loop]
        measurements = [(offered_rate(target), target["latency"]) for _, target in _targets(loop_runs) if target["latency"]]
        points = _merged(measurements) if open_loop else [(rate, [latency]) for rate, latency in measurements]
        for color, name in enumerate(("p50_ms", "p90_ms", "p99_ms") if points else ()):
            label = f"{name.removesuffix('_ms')}, {'open' if open_loop else 'closed'} loop"
            medians = [statistics.median(latency[name] for latency in latencies) for _, latencies in points]
            axes.plot([rate for rate, _ in points], medians, style, color=f"C{color}", label=label)
        has_data = has_data or bool(points)
    if has_data:
        for condition in sorted({condition for condition in conditions if "_ms <= " in condition}):
            bound = float(condition.partition(" <= ")[2])
            axes.axhline(bound, color="red", linestyle="--", linewidth=1, label=f"target: {slo.in_words(condition)}")
        # latencies are seconds in an overload, and milliseconds below it
        axes.set(xlabel="requests/s offered", ylabel="latency, ms", yscale="log", xlim=(0, None))
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=7)
    return has_data


def _merged(points: Sequence[tuple[float, Any]]) -> list[tuple[float, list[Any]]]:
    """Returns points in the order of their rates; points with nearly the same rate are merged to one with several values."""
    merged: list[tuple[float, list[Any]]] = []
    for rate, value in sorted(points, key=lambda point: point[0]):
        if merged and rate <= merged[-1][0] * _SAME_RATE:
            merged[-1][1].append(value)
        else:
            merged.append((rate, [value]))
    return merged


def _answered(axes: Axes, runs: Runs) -> bool:
    """Draws answered over offered requests; the difference to the diagonal was refused, failed or late."""
    targets = [(run, target) for run in runs for target in run["targets"] if target["requests"]]
    for open_loop, style in ((True, "o"), (False, "s")):
        points = [(offered_rate(target), target["rps"]) for run, target in targets if is_open(run) == open_loop]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{'open' if open_loop else 'closed'} loop")
    if targets:
        max_rate = max(offered_rate(target) for _, target in targets)
        axes.plot([0, max_rate], [0, max_rate], "--", color="gray", linewidth=1, label="all answered")
        axes.set(xlabel="requests/s offered", ylabel="requests/s answered with 200", xlim=(0, None), ylim=(0, None))
        axes.legend(fontsize=7)
    return bool(targets)


def _distribution(axes: Axes, runs: Runs) -> bool:
    curves = [(label, target["latency"]["curve"]) for label, target in _targets(runs) if target["latency"]]
    for label, curve in curves:
        # 1 - share on a logarithmic axis shows the slowest requests
        axes.plot([ms for _, ms in curve], [max(1 - share, 1e-6) for share, _ in curve], drawstyle="steps-post", label=label)
    if curves:
        axes.set(xlabel="latency, ms", ylabel="share of requests that took longer", yscale="log", xlim=(0, None))
        axes.set_ylim(max(min(1 - curve[-2][0] for _, curve in curves) / 2, 1e-6), 1)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=7)
    return bool(curves)


def _batch_size(axes: Axes, runs: Runs) -> bool:
    labeled_batches = [(label, target["batches"]) for label, target in _targets(runs) if target["batches"]]
    sizes = sorted({size for _, batches in labeled_batches for size in batches["rows"]}, key=float)
    for i, (label, batches) in enumerate(labeled_batches):
        shares = [batches["rows"].get(size, 0) / batches["runs"] for size in sizes]
        width = 0.8 / len(labeled_batches)
        axes.bar([at + (i - (len(labeled_batches) - 1) / 2) * width for at in range(len(sizes))], shares, width, label=label)
    axes.set_xticks(range(len(sizes)), [size if size in ("1", "2") else f"up to {size}" for size in sizes])
    axes.set(xlabel="batch size", ylabel="share of runs", ylim=(0, 1))
    if labeled_batches:
        axes.legend(fontsize=7)
    return bool(labeled_batches)


def _padding(axes: Axes, runs: Runs) -> bool:
    shares = [(label, target["batches"]["padding_share"]) for label, target in _targets(runs) if target["batches"]]
    axes.barh(range(len(shares)), [share * 100 for _, share in shares])
    axes.set_yticks(range(len(shares)), [label for label, _ in shares], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="padding, % of the tokens run", xlim=(0, max([share * 100 for _, share in shares] + [10]) * 1.1))
    return bool(shares)
