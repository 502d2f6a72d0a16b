"""What was measured as plots, a file of SVG each. Only this module of export imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # of a bundle's profile nothing is known that needs torch
    from matplotlib.axes import Axes

    from bertserve.export.analyze.profiling import Profile
    from bertserve.export.analyze.sweep import Point, Sweep

MISSING = "no plots, for matplotlib is not installed: pip install 'bertserve[bench]'"
_SIZE_INCHES = (6.4, 4.0)


def can_plot() -> bool:
    """Returns whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_sweep(sweep: Sweep, folder: Path) -> list[Path]:
    """Writes the plots of a sweep, which matplotlib must be there for, and returns their files."""
    written = [_figure(folder / "length.svg", _lengths, _of_axis(sweep, "base"))]
    for axis in dict.fromkeys(point.axis for point in sweep.points if point.axis != "base"):
        lengths = {timing.length for point in _of_axis(sweep, axis) for timing in point.timings}
        points = sorted([*_of_axis(sweep, axis), *_of_axis(sweep, "base")], key=lambda point: int(getattr(point.shape, axis)))
        written.append(_figure(folder / f"{axis}.svg", _shapes, points, axis, max(lengths)))
    return written


def plot_profile(profile: Profile, folder: Path) -> list[Path]:
    """Writes the plots of a profile, which matplotlib must be there for, and returns their files."""
    name = f"{profile.length}-tokens"
    return [
        _figure(folder / f"parts-{name}.svg", _bars, profile.by_part(), profile.attention()),
        _figure(folder / f"operators-{name}.svg", _bars, profile.by_operator(), {}),
    ]


def _figure(path: Path, draw: Any, *what: Any) -> Path:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure.add_subplot(), *what)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _of_axis(sweep: Sweep, axis: str) -> list[Point]:
    return [point for point in sweep.points if point.axis == axis]


def _lengths(axes: Axes, points: Sequence[Point]) -> None:
    for point in points:
        lengths = [timing.length for timing in point.timings]
        axes.plot(lengths, [timing.latency_cpu_ms for timing in point.timings], "o-", label=f"{point.precision}, a text alone")
        in_batches = [timing.cpu_ms for timing in point.timings]
        axes.plot(lengths, in_batches, "s--", label=f"{point.precision}, a text of a batch of {point.timings[0].batch}")
    axes.set(xlabel="tokens", ylabel="CPU ms", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=7)


def _shapes(axes: Axes, points: Sequence[Point], axis: str, length: int) -> None:
    for precision in dict.fromkeys(point.precision for point in points):
        times = [
            (getattr(point.shape, axis), timing.latency_cpu_ms)
            for point in points
            if point.precision == precision
            for timing in point.timings
            if timing.length == length
        ]
        axes.plot([value for value, _ in times], [ms for _, ms in times], "o-", label=precision)
    axes.set(
        xlabel="hidden size" if axis == "hidden" else axis,
        ylabel=f"CPU ms, a text of {length} tokens alone",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend(fontsize=7)


def _bars(axes: Axes, times: dict[str, float], attention: dict[str, float]) -> None:
    axes.barh(range(len(times)), list(times.values()), label="all" if attention else None)
    if attention:
        axes.barh(range(len(times)), [attention.get(name, 0.0) for name in times], label="of it attention")
        axes.legend(fontsize=7)
    axes.set_yticks(range(len(times)), list(times), fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="ms")
