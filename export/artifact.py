"""A graph that was made of a checkpoint, and the precisions that each provider's graphs are made in.

The stages that make graphs hand them to the stages that measure them. Nothing heavy is imported: the command checks its flags with this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bertserve.service.bundle.graph_spec import InputSpec, Precision, ShapePlan
from bertserve.service.providers import PROVIDERS, Provider

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


def choose_precisions(providers: Sequence[Provider], requested: Sequence[Precision] | None) -> dict[Provider, tuple[Precision, ...]]:
    """Returns the precisions to make for each provider, in the given order; the last of each is its default graph.

    Args:
        providers: Different providers.
        requested: Different precisions; None for all that each provider has.

    Raises:
        ValueError: A precision is made for none of the providers, or a provider is left with none.
    """
    have = {provider: PROVIDERS[provider].precisions for provider in providers}
    chosen = {provider: tuple(p for p in (requested or known) if p in known) for provider, known in have.items()}
    for precision in requested or ():
        if not any(precision in precisions for precisions in chosen.values()):
            raise ValueError(f"`{precision}` is not available for {', '.join(providers)}: {_list_precisions()}")
    for provider, precisions in chosen.items():
        if not precisions:
            raise ValueError(f"`{', '.join(requested or ())}` leaves no graph to make for {provider}: {_list_precisions()}")
    return chosen


def _list_precisions() -> str:
    return "; ".join(f"{name} takes {', '.join(provider.precisions)}" for name, provider in PROVIDERS.items())
