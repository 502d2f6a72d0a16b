"""An exported graph, and the precisions of each provider's graphs.

The stages that create graphs pass them to the stages that measure them. It imports no large packages, because the command checks its flags
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bertserve.service.bundle.graph_spec import InputSpec, Precision, ShapePlan
from bertserve.service.providers import PROVIDERS, Provider

Tracer = Literal["dynamo", "torchscript"]  # PyTorch's exporters, by torch's names


@dataclass(frozen=True)
class Artifact:
    """An exported graph.

    Attributes:
        path: Path of the file; TensorRT's fp16 is built from the float32 file.
        form: A description of its creation, for readers.
        fusions: Fused operator -> count.
        quantized: Converted operators, and operators that stay in float -> count.
        error: Error of the outputs caused by the conversion, relative to their standard deviation.
        max_error: Maximum of this error.
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
    """Returns the precisions to create for each provider, in the given order; the last one is the default graph.

    Args:
        providers: Distinct providers.
        requested: Distinct precisions; None for all precisions of each provider.

    Raises:
        ValueError: No provider has a precision, or a provider has none of them.
    """
    supported = {provider: PROVIDERS[provider].precisions for provider in providers}
    choices = {provider: tuple(p for p in (requested or precisions) if p in precisions) for provider, precisions in supported.items()}
    for precision in requested or ():
        if not any(precision in precisions for precisions in choices.values()):
            raise ValueError(f"`{precision}` is not available for {', '.join(providers)}: {_list_precisions()}")
    for provider, precisions in choices.items():
        if not precisions:
            raise ValueError(f"`{', '.join(requested or ())}` leaves no graph to make for {provider}: {_list_precisions()}")
    return choices


def _list_precisions() -> str:
    return "; ".join(f"{name} takes {', '.join(provider.precisions)}" for name, provider in PROVIDERS.items())
