"""Shows results as tables of plain text, and as plots in SVG files. It is the only module of export that imports matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.service.errors import install_command, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bertserve.export.analyze.profiling import Profile
    from bertserve.export.analyze.sweep import Point, Sweep
    from bertserve.export.analyze.timing import AnalysisTiming

_HEAD = ("precision", "tokens", "parameters", "GFLOP", "ms", "CPU ms", "GFLOP/s", "texts/s", "CPU ms per text", "MiB")
_BUSY = 1.2  # ratio of wall time to CPU time above which the report has a warning

MISSING = f"no plots, because matplotlib is not installed: {install_command('bench')}"
_SIZE_INCHES = (6.4, 4.0)


def sweep_tables(sweep: Sweep) -> Iterator[str]:
    """Yields the lines of a sweep: the base by length and precision, then one table per changed property."""
    yield f"{sweep.model}: {sweep.base}"
    base = {(point.precision, timing.length): timing for point, timing in _timed(sweep, "base")}
    for axis in dict.fromkeys(point.axis for point in sweep.points):
        axis_items = list(_timed(sweep, axis))
        # each table includes the base, at the length of its other rows
        lengths = {timing.length for _, timing in axis_items}
        base_items = [] if axis == "base" else [item for item in _timed(sweep, "base") if item[1].length in lengths]
        rows = sorted([*axis_items, *base_items], key=lambda item: (item[0].precision, _place(item[0], axis), item[1].length))
        title = "hidden size" if axis == "hidden" else axis
        table: list[tuple[str, ...]] = [(*_HEAD, "of fp32") if axis == "base" else (title, *_HEAD, "of base")]
        for point, timing in rows:
            base_timing = base.get(("fp32" if axis == "base" else point.precision, timing.length))
            ratio = "" if base_timing is None else f"{timing.latency_cpu_ms / base_timing.latency_cpu_ms:.2f}"
            cells = (*_cells(point, timing), ratio)
            table.append(cells if axis == "base" else (str(_place(point, axis)), *cells))
        yield f"\nby {'length and precision' if axis == 'base' else title}"
        yield from align(table)
    batch = next(timing.batch for point in sweep.points for timing in point.timings)
    yield f"\nms, CPU ms, GFLOP/s: for one text; texts/s, CPU ms per text: in batches of {batch}; ratios are of CPU ms"
    shares = [timing.latency_ms / timing.latency_cpu_ms for point in sweep.points for timing in point.timings]
    if (share := statistics.median(shares)) > _BUSY:
        yield f"the machine was busy: runs took {share:.1f} times their CPU time, which makes ms and texts/s worse, but hardly CPU ms"
    yield from (f"left out: {reason}" for reason in sweep.omitted)


def profile_tables(profile: Profile) -> Iterator[str]:
    """Yields the lines of a profile: parts of the model with attention and heads, then operators."""
    total = profile.kernels_ms
    yield (
        f"{profile.length} tokens: {total:.2f} ms in {plural(len(profile.nodes), 'kernel')}, {profile.run_ms:.2f} ms "
        f"per run with the profiler, {plural(profile.runs, 'run')}"
    )
    attention, parts = profile.attention(), [("part", "ms", "share", "attention ms", "heads", "ms a head")]
    for part, ms in profile.by_part().items():
        heads = profile.heads.get(part)
        of_heads = (str(heads), f"{attention[part] / heads:.3f}") if heads and part in attention else ("", "")
        parts.append((part, f"{ms:.3f}", f"{ms / total:.1%}", f"{attention[part]:.3f}" if part in attention else "", *of_heads))
    yield from align(parts)
    yield ""
    operators = [(op, f"{ms:.3f}", f"{ms / total:.1%}") for op, ms in profile.by_operator().items()]
    yield from align([("operator", "ms", "share"), *operators])


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the rows with aligned columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def _timed(sweep: Sweep, axis: str) -> Iterator[tuple[Point, AnalysisTiming]]:
    return ((point, timing) for point in sweep.points if point.axis == axis for timing in point.timings)


def _cells(point: Point, timing: AnalysisTiming) -> tuple[str, ...]:
    gflop = point.gflop(timing.length)
    return (
        point.precision,
        str(timing.length),
        f"{point.parameters / 1e6:.1f} M",
        f"{gflop:.3g}",
        f"{timing.latency_ms:.2f}",
        f"{timing.latency_cpu_ms:.2f}",
        f"{gflop / timing.latency_cpu_ms * 1000:.0f}",
        f"{timing.texts_per_s:.1f}",
        f"{timing.cpu_ms:.2f}",
        "" if timing.memory_mib is None else f"{timing.memory_mib:.0f}",
    )


def _place(point: Point, axis: str) -> int:
    return 0 if axis == "base" else int(getattr(point.shape, axis))


def can_plot() -> bool:
    """Returns whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_sweep(sweep: Sweep, folder: Path) -> list[Path]:
    """Writes the plots of a sweep with matplotlib, which must be installed; returns their files."""
    paths = [_figure(folder / "length.svg", _lengths, _of_axis(sweep, "base"))]
    for axis in dict.fromkeys(point.axis for point in sweep.points if point.axis != "base"):
        lengths = {timing.length for point in _of_axis(sweep, axis) for timing in point.timings}
        points = sorted([*_of_axis(sweep, axis), *_of_axis(sweep, "base")], key=lambda point: int(getattr(point.shape, axis)))
        paths.append(_figure(folder / f"{axis}.svg", _shapes, points, axis, max(lengths)))
    return paths


def plot_profile(profile: Profile, folder: Path) -> list[Path]:
    """Writes the plots of a profile with matplotlib, which must be installed; returns their files."""
    name = f"{profile.length}-tokens"
    return [
        _figure(folder / f"parts-{name}.svg", _bars, profile.by_part(), profile.attention()),
        _figure(folder / f"operators-{name}.svg", _bars, profile.by_operator(), {}),
    ]


def _figure(path: Path, draw: Any, *arguments: Any) -> Path:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure.add_subplot(), *arguments)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _of_axis(sweep: Sweep, axis: str) -> list[Point]:
    return [point for point in sweep.points if point.axis == axis]


def _lengths(axes: Axes, points: Sequence[Point]) -> None:
    for point in points:
        lengths = [timing.length for timing in point.timings]
        axes.plot(lengths, [timing.latency_cpu_ms for timing in point.timings], "o-", label=f"{point.precision}, one text")
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
        ylabel=f"CPU ms, one text of {length} tokens",
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
