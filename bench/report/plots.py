"""The five plots of a report as SVG elements of the HTML page. Only this module imports matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bertserve.bench.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (6.4, 4.0)
Runs = Sequence[Mapping[str, Any]]


def require_matplotlib() -> None:
    """Raises an error if plots cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("the HTML report needs matplotlib: pip install 'bertserve[bench]'; --json needs nothing.")


def draw_plots(runs: Runs) -> dict[str, str]:
    """Returns the plots as SVG, by title.

    Args:
        runs: The `runs` of a report in its JSON form.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    return {
        "Latency against offered rate": _figure(_latency, runs),
        "Answered against offered rate": _figure(_answered, runs),
        "Latency distribution": _figure(_distribution, runs),
        "Batch size": _figure(_batch_size, runs),
        "Padding share": _figure(_padding, runs),
    }


def _figure(plot: Any, runs: Runs) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text; the ids of each plot have a salt of their own, since all plots share one page
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.__name__, "font.size": 9}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        if not plot(axes, runs):
            axes.set_axis_off()
            axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib numbers its groups from 1 in each figure, so these ids clash; only ids that something refers to are kept, and those are hashes
    return re.sub(r' id="([^"]+)"', lambda match: match[0] if f"#{match[1]}" in text else "", text)


def _targets(runs: Runs) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the measurements of all runs, each with its label."""
    return [
        (f"{run['name']} {target['target']}" if len(run["targets"]) > 1 else str(run["name"]), target)
        for run in runs
        for target in run["targets"]
    ]


def is_open(run: Mapping[str, Any]) -> bool:
    """Returns whether a run, in its JSON form, was an open loop, whose requests were due whatever the service did."""
    return run["generator"]["late_p99_ms"] is not None


def offered_rate(target: Mapping[str, Any]) -> float:
    """Returns the requests a second that were due in the measured time; in a closed loop the service's own pace decides them."""
    return float(target["requests"] / target["seconds"])


def _latency(axes: Axes, runs: Runs) -> bool:
    """Draws open loops as a curve over their rates, and closed loops as points. Returns whether there was anything to draw.

    Over the rate that was answered the curve of an overload would turn back upon itself.
    """
    drawn = False
    for open_loop, style in ((True, "o-"), (False, "s")):
        chosen = [run for run in runs if is_open(run) == open_loop]
        points = [(offered_rate(target), target["latency"]) for _, target in _targets(chosen) if target["latency"]]
        points.sort(key=lambda point: point[0])
        for color, name in enumerate(("p50_ms", "p90_ms", "p99_ms") if points else ()):
            label = f"{name.removesuffix('_ms')}, {'open' if open_loop else 'closed'} loop"
            axes.plot([rate for rate, _ in points], [latency[name] for _, latency in points], style, color=f"C{color}", label=label)
        drawn = drawn or bool(points)
    if drawn:
        # an overload takes seconds where the rates below it take milliseconds
        axes.set(xlabel="requests/s offered", ylabel="latency, ms", yscale="log", xlim=(0, None))
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=7)
    return drawn


def _answered(axes: Axes, runs: Runs) -> bool:
    """Draws what was answered over what was offered; what lies below the diagonal was refused, failed or was not done in time."""
    drawn = [(run, target) for run in runs for target in run["targets"] if target["requests"]]
    for open_loop, style in ((True, "o"), (False, "s")):
        points = [(offered_rate(target), target["rps"]) for run, target in drawn if is_open(run) == open_loop]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{'open' if open_loop else 'closed'} loop")
    if drawn:
        most = max(offered_rate(target) for _, target in drawn)
        axes.plot([0, most], [0, most], "--", color="gray", linewidth=1, label="all answered")
        axes.set(xlabel="requests/s offered", ylabel="requests/s answered with 200", xlim=(0, None), ylim=(0, None))
        axes.legend(fontsize=7)
    return bool(drawn)


def _distribution(axes: Axes, runs: Runs) -> bool:
    drawn = [(label, target["latency"]["curve"]) for label, target in _targets(runs) if target["latency"]]
    for label, curve in drawn:
        # 1 - share on a logarithmic axis shows the tail
        axes.plot([ms for _, ms in curve], [max(1 - share, 1e-6) for share, _ in curve], drawstyle="steps-post", label=label)
    if drawn:
        axes.set(xlabel="latency, ms", ylabel="share of requests that took longer", yscale="log", xlim=(0, None))
        axes.set_ylim(max(min(1 - curve[-2][0] for _, curve in drawn) / 2, 1e-6), 1)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=7)
    return bool(drawn)


def _batch_size(axes: Axes, runs: Runs) -> bool:
    drawn = [(label, target["batches"]) for label, target in _targets(runs) if target["batches"]]
    sizes = sorted({size for _, batches in drawn for size in batches["rows"]}, key=float)
    for i, (label, batches) in enumerate(drawn):
        shares = [batches["rows"].get(size, 0) / batches["runs"] for size in sizes]
        width = 0.8 / len(drawn)
        axes.bar([at + (i - (len(drawn) - 1) / 2) * width for at in range(len(sizes))], shares, width, label=label)
    axes.set_xticks(range(len(sizes)), [size if size in ("1", "2") else f"up to {size}" for size in sizes])
    axes.set(xlabel="rows of a run", ylabel="share of runs", ylim=(0, 1))
    if drawn:
        axes.legend(fontsize=7)
    return bool(drawn)


def _padding(axes: Axes, runs: Runs) -> bool:
    drawn = [(label, target["batches"]["padding_share"]) for label, target in _targets(runs) if target["batches"]]
    axes.barh(range(len(drawn)), [share * 100 for _, share in drawn])
    axes.set_yticks(range(len(drawn)), [label for label, _ in drawn], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="padding, % of the tokens run", xlim=(0, max([share * 100 for _, share in drawn] + [10]) * 1.1))
    return bool(drawn)
