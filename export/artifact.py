"""An exported graph, and the precisions of each provider's graphs.

The stages that create graphs pass them to the stages that measure them. It imports no large packages, because the command checks its flags
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec, Precision, ShapePlan, ValidationReport
from bertserve.service.providers import PROVIDERS, Provider

Tracer = Literal["dynamo", "torchscript"]  # PyTorch's exporters, by torch's names
NO_REPORT = ValidationReport(samples=0, worst_abs_error=0.0, worst_row_error=0.0, nodes=0, fusions={}, quantized={})


@dataclass(frozen=True)
class Artifact:
    """An exported graph.

    Attributes:
        path: Path of the file; TensorRT's fp16 is built from the float32 file.
        form: A description of its creation, for readers.
        report: Fused and converted operators, and the error of the conversion; the comparison adds its measurements.
    """

    path: Path
    provider: Provider
    precision: Precision
    form: str
    inputs: tuple[InputSpec, ...]
    shapes: ShapePlan | None = None
    small_outputs: tuple[OutputSpec, ...] = ()
    report: ValidationReport = NO_REPORT

    def with_facts(self, **facts: Any) -> Artifact:
        """Returns the artifact with other fields of its report."""
        return replace(self, report=self.report.model_copy(update=facts))


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
