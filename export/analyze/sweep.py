"""Measures a model, and others that differ from it in one thing, as long as there is time."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bertserve.export.analyze.build import build_fp32, build_int8
from bertserve.export.analyze.random_model import random_checkpoint, read_config, shape_of, with_shape
from bertserve.export.analyze.shapes import LENGTHS, MIDDLE, NAMED, Axis, Shape, choose_lengths, variants
from bertserve.export.analyze.timing import BuiltGraph, Timing, measure_apart
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import ExportError
from bertserve.export.progress import Progress, stage
from bertserve.export.tasks import feature_extraction
from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.bundle.manifest import Flops

CELL_SECONDS = 2.0  # for the runs of a length


@dataclass(frozen=True)
class SweepSpec:
    """What to measure, as the flags say.

    Attributes:
        source: A named shape, a configuration, or a checkpoint.
        precisions: fp32 or int8 or both, in this order.
        lengths: In tokens; None for those of `LENGTHS` that the model takes.
        axes: Along which other shapes are measured too.
        batch: Texts of a batch.
        seconds: After so many nothing more is begun.
    """

    source: str
    precisions: Sequence[Precision]
    lengths: Sequence[int] | None
    axes: Sequence[Axis]
    batch: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """A graph that was measured.

    Attributes:
        axis: What it differs in from the base; `base` for that itself.
        shape: Its shape.
        precision: What it computes in.
        parameters: Numbers that the model has.
        graph_bytes: Size of the graph's files.
        flops: Arithmetic of a text by its length.
        timings: What its runs took, by length.
    """

    axis: Axis | Literal["base"]
    shape: Shape
    precision: Precision
    parameters: int
    graph_bytes: int
    flops: Flops
    timings: Sequence[Timing]

    def gflop(self, length: int) -> float:
        """Returns the arithmetic of a text of so many tokens, in 10^9 operations."""
        return (self.flops.linear * length + self.flops.quadratic * length**2) / 1e9


@dataclass(frozen=True)
class Sweep:
    """What was measured.

    Attributes:
        model: What the base is.
        base: Its shape.
        points: The graphs.
        omitted: What was left out, and why, a line each.
    """

    model: str
    base: Shape
    points: Sequence[Point]
    omitted: Sequence[str]


class Budget:
    """The time that there is: nothing is begun that would take longer, if it takes as long as the longest so far."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the clock."""
        self._clock = clock
        self._end = clock() + seconds
        self._longest = 0.0

    def steps(self, names: Iterable[str]) -> Iterator[tuple[str, bool]]:
        """Yields each step with whether there is time for it; the first is always begun."""
        first = True
        for name in names:
            start = self._clock()
            fits = first or start + self._longest < self._end
            yield name, fits
            if fits:
                self._longest = max(self._longest, self._clock() - start)
            first = False


def run_sweep(spec: SweepSpec, progress: Progress) -> Sweep:
    """Measures the base at all lengths and in all precisions, and other shapes at the middle one.

    Args:
        spec: What to measure.
        progress: Called with a line for each graph that was measured.

    Raises:
        CheckpointError: The source cannot be read, or does not take a length.
        ExportError: The base cannot be measured; of the other shapes that is said in the result.
    """
    checkpoint, config = _base(spec.source)
    base = shape_of(config)
    lengths = choose_lengths(spec.lengths, LENGTHS, checkpoint.max_length)
    others = [(axis, shape) for axis in spec.axes for shape in variants(base, axis) if shape != base]
    named = {"the model itself": None} | {f"{axis}: {shape}": (axis, shape) for axis, shape in others}
    points: list[Point] = []
    omitted: list[str] = []
    for name, fits in Budget(spec.seconds).steps(named):
        chosen = named[name]
        if not fits:
            omitted.append(f"{name}: not begun, because --seconds {spec.seconds:g} would not have been enough")
        elif chosen is None:
            points += _measure(checkpoint, "base", base, spec, lengths, progress)
            del checkpoint  # the next model needs the memory
        else:
            axis, shape = chosen
            try:
                points += _measure(random_checkpoint(with_shape(config, shape)), axis, shape, spec, [_middle(lengths)], progress)
            except ExportError as error:
                omitted.append(f"{name}: {error}")
        gc.collect()
    return Sweep(f"{spec.source} ({type(config).__name__})", base, points, omitted)


def _base(source: str) -> tuple[Checkpoint, object]:
    """Returns the model that a source names, of random weights where it has none, and its configuration."""
    path = Path(source)
    if source in NAMED or path.is_file() or (path.is_dir() and not any(path.rglob("*.safetensors"))):
        config = read_config(source)
        return random_checkpoint(config), config
    checkpoint = load_checkpoint(source, task=feature_extraction.TASK.name)
    return checkpoint, checkpoint.model.config


def _measure(
    checkpoint: Checkpoint, axis: Axis | Literal["base"], shape: Shape, spec: SweepSpec, lengths: Sequence[int], progress: Progress
) -> Iterator[Point]:
    """Yields the points of a model, one a precision."""
    parameters, flops = sum(parameter.numel() for parameter in checkpoint.model.parameters()), checkpoint.flops
    with tempfile.TemporaryDirectory(prefix="bert-export-analyze-") as name:
        folder = Path(name)
        with stage(progress, "build", f"{shape}, fp32"):
            fp32 = build_fp32(checkpoint, folder)
        for precision in spec.precisions:
            graph = fp32
            if precision == "int8":
                with stage(progress, "build", f"{shape}, int8"):
                    graph = build_int8(fp32, checkpoint, folder)
            with stage(progress, "measure", f"{shape}, {precision}"):
                timings = _timings(graph, lengths, spec)
            yield Point(axis, shape, precision, parameters, graph.bytes, flops, timings)


def _timings(graph: BuiltGraph, lengths: Sequence[int], spec: SweepSpec) -> list[Timing]:
    return measure_apart(graph, lengths, batch=spec.batch, seconds=min(CELL_SECONDS, spec.seconds / 20))


def _middle(lengths: Sequence[int]) -> int:
    """Returns the length at which shapes are compared: the one nearest to `MIDDLE`."""
    return min(lengths, key=lambda length: abs(length - MIDDLE))
