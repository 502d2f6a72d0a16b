"""The input of the functions that create a provider's graphs, which is the same for all providers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bertserve.export.calibration import Int8Texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GraphBuild:
    """The input of a graph builder, a function that yields a provider's graphs one by one; float32 is first, because others need it.

    Attributes:
        traced: The traced graph; intermediate files are written next to it.
        form: A description of the tracing, for readers.
        folder: The folder of the graphs `model.<provider>.<precision>.onnx`.
        texts: The calibration texts create int8 and measure half precision; the gate's texts judge int8.
        max_int8_error: Maximum error of int8's outputs on the gate's texts, relative to their standard deviation.
        quick: Whether to skip the measurement of which matrices matter most for int8.
    """

    traced: Path
    form: str
    folder: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    texts: Int8Texts
    max_int8_error: float
    quick: bool
