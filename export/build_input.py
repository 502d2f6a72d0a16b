"""The input of graph builders, the manifest entry of a new graph, and the precisions of each provider's graphs.

It imports no large packages, because the command checks its flags with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bertserve.service.bundle.graph_spec import GraphSpec, InputSpec, Precision, ValidationReport
from bertserve.service.providers import PROVIDERS, Provider

if TYPE_CHECKING:
    from bertserve.export.checkpoint.checkpoint import Checkpoint
    from bertserve.export.int8_texts import Int8Texts
    from bertserve.service.text.tokenizer import Tokenizer


Tracer = Literal["dynamo", "torchscript"]  # PyTorch's two tracers


@dataclass(frozen=True)
class GraphBuildInput:
    """The input of a graph builder, a function that yields a provider's graphs one by one; float32 is first, because others need it.

    Attributes:
        traced: The traced graph; intermediate files are written next to it.
        description: A description of the tracing, for readers.
        folder: The folder of the graphs `model.<provider>.<precision>.onnx`.
        texts: The calibration texts create int8 and measure half precision; the gate's texts decide which matrices stay in float.
        max_int8_error: Maximum error of int8's outputs on the gate's texts, relative to their standard deviation.
        quick: Whether int8 is made without measuring the sensitivity of each matrix.
    """

    traced: Path
    description: str
    folder: Path
    checkpoint: "Checkpoint"
    tokenizer: "Tokenizer"
    texts: "Int8Texts"
    max_int8_error: float
    quick: bool


def new_graph(
    checkpoint: "Checkpoint", provider: Provider, description: str, inputs: tuple[InputSpec, ...], fusions: Mapping[str, int]
) -> GraphSpec:
    """Returns the manifest entry of a new float32 graph, without the digests of its files and the measurements of its comparison."""
    return GraphSpec(
        file=f"model.{provider}.fp32.onnx",
        sha256="",
        provider=provider,
        precision="fp32",
        description=description,
        default=False,
        batch_invariant=False,
        inputs=inputs,
        outputs=checkpoint.outputs,
        validation=ValidationReport(samples=0, worst_abs_error=0.0, worst_batch_error=0.0, nodes=0, fusions=dict(fusions), quantized={}),
    )


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
