"""A graph that was made of a checkpoint, and how. The stages that make graphs hand it to the stages that measure them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bertserve.service.bundle.graph_spec import InputSpec, Precision, ShapePlan
from bertserve.service.providers import Provider

Tracer = Literal["dynamo", "torchscript"]  # PyTorch's exporters, by the names that torch has for them


@dataclass(frozen=True)
class Artifact:
    """A graph that was made.

    Attributes:
        path: The file.
        provider: What it is for.
        precision: What it computes in; TensorRT's fp16 is made of the float32 file.
        form: How it was made, for the reader.
        inputs: What it takes.
        shapes: The plan of the shapes that it is run in, where there is one.
        fusions: Fused operator -> count.
        quantized: What was converted, and what was kept in float -> count.
        error: How far the conversion moves the outputs, as a share of their standard deviation.
        max_error: How far it may move them.
    """

    path: Path
    provider: Provider
    precision: Precision
    form: str
    inputs: tuple[InputSpec, ...]
    shapes: ShapePlan | None = None
    fusions: dict[str, int] = field(default_factory=dict)
    quantized: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    max_error: float = 0.0
