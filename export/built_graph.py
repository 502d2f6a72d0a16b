"""An exported graph, what the functions that create graphs get, and the precisions of each provider's graphs.

The stages that create graphs pass them to the stages that measure them. It imports no large packages, because the command checks its flags
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec, Precision, ShapePlan, ValidationReport
from bertserve.service.providers import PROVIDERS, Provider

if TYPE_CHECKING:
    from bertserve.export.checkpoint.checkpoint import Checkpoint
    from bertserve.export.int8_texts import Int8Texts
    from bertserve.service.text.tokenizer import Tokenizer

NO_REPORT = ValidationReport(samples=0, worst_abs_error=0.0, worst_batch_error=0.0, nodes=0, fusions={}, quantized={})


@dataclass(frozen=True)
class BuiltGraph:
    """An exported graph.

    Attributes:
        path: Path of the file; TensorRT's fp16 is built from the float32 file.
        description: A description of its creation, for readers.
        report: Fused and converted operators, and the error of the conversion; the comparison adds its measurements.
    """

    path: Path
    provider: Provider
    precision: Precision
    description: str
    inputs: tuple[InputSpec, ...]
    shapes: ShapePlan | None = None
    small_outputs: tuple[OutputSpec, ...] = ()
    report: ValidationReport = NO_REPORT

    def with_report(self, **fields: Any) -> BuiltGraph:
        """Returns the graph with other fields of its report."""
        return replace(self, report=self.report.model_copy(update=fields))


@dataclass(frozen=True)
class GraphBuildInput:
    """The input of a graph builder, a function that yields a provider's graphs one by one; float32 is first, because others need it.

    Attributes:
        traced: The traced graph; intermediate files are written next to it.
        description: A description of the tracing, for readers.
        folder: The folder of the graphs `model.<provider>.<precision>.onnx`.
        texts: The calibration texts create int8 and measure half precision; the gate's texts decide which matrices stay in float.
        max_int8_error: Maximum error of int8's outputs on the gate's texts, relative to their standard deviation.
    """

    traced: Path
    description: str
    folder: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    texts: Int8Texts
    max_int8_error: float


def choose_precisions(providers: Sequence[Provider], requested: Sequence[Precision] | None) -> dict[Provider, tuple[Precision, ...]]:
    """Returns the precisions to create for each provider, by default all; the last one is the default graph.

    Raises:
        ValueError: No provider has a precision, or a provider has none of them.
    """
    supported = {provider: PROVIDERS[provider].precisions for provider in providers}
    choices = {provider: tuple(p for p in (requested or precisions) if p in precisions) for provider, precisions in supported.items()}
    unused = [name for name in requested or () if not any(name in precisions for precisions in choices.values())]
    empty_providers = [provider for provider, precisions in choices.items() if not precisions]
    if unused or empty_providers:
        available = "; ".join(f"{name} takes {', '.join(provider.precisions)}" for name, provider in PROVIDERS.items())
        raise ValueError(f"`{','.join(unused or requested or ())}` does not fit {', '.join(empty_providers or providers)}: {available}")
    return choices
