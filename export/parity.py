"""Compares a graph, run through the service's own tokenizer, engine and decoder, with the checkpoint in PyTorch.

The reference side uses the Hugging Face tokenizer with its own truncation and windows, so that ours are tested too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from export.checkpoint import Checkpoint
from export.errors import ParityError
from service.bundle import Precision
from service.engine import Engine
from service.tasks import classify
from service.tokenization import Tokenizer

# Largest difference of a logit to PyTorch that a precision may show. int8 is judged by task figures, not by logits:
# its bound only catches a graph that is broken.
MAX_ABS_ERROR: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-1, "int8": 10.0}
MAX_ROW_ERROR = 1e-5
BATCH_ROWS = 4


@dataclass(frozen=True)
class Parity:
    """What the comparison found; the fields mean what `service.bundle.Evidence` says."""

    samples: int
    worst_abs_error: float
    label_agreement: float
    worst_row_error: float


class Reference:
    """The checkpoint's answers in PyTorch, float32, computed once and used for every graph."""

    def __init__(self, checkpoint: Checkpoint, requests: Sequence[classify.Request]) -> None:
        """Runs the requests through PyTorch."""
        self.requests = requests
        self.logits = [_torch_logits(checkpoint, request) for request in requests]


def compare(engine: Engine, tokenizer: Tokenizer, reference: Reference, checkpoint: Checkpoint, precision: Precision) -> Parity:
    """Runs the samples alone and in mixed batches and compares.

    Args:
        engine: The graph under test.
        tokenizer: The service's tokenizer on the bundle's files.
        reference: The checkpoint's answers.
        checkpoint: Labels and activation.
        precision: Decides the bound.

    Raises:
        ParityError: A logit is too far off, or a decoded float32 answer differs; the message holds the worst case.
    """
    worst, agree, encodings, alone = 0.0, 0, [], []
    for request, expected in zip(reference.requests, reference.logits, strict=True):
        encoded = classify.encode(request, tokenizer)
        rows = [engine.run([encoding])[0] for encoding in encoded.encodings]
        encodings += encoded.encodings
        alone += rows
        actual = np.stack([row["logits"] for row in rows])
        if actual.shape != expected.shape:
            raise ParityError(f"{actual.shape[0]} windows where the reference has {expected.shape[0]}: {_describe(request)}.")
        error = float(np.abs(actual - expected).max())
        if error > MAX_ABS_ERROR[precision]:
            raise ParityError(
                f"{precision} logits are off by {error:.2e}, allowed is {MAX_ABS_ERROR[precision]:.0e}: {_describe(request)}; "
                f"expected {expected.tolist()}, got {actual.tolist()}."
            )
        worst = max(worst, error)
        agree += _best(request, actual, checkpoint) == _best(request, expected, checkpoint)
    agreement = agree / len(reference.requests)
    if precision == "fp32" and agreement < 1:
        raise ParityError(f"float32 labels agree on {agree} of {len(reference.requests)} samples only.")
    return Parity(len(reference.requests), worst, agreement, _worst_row_error(engine, encodings, alone))


def _worst_row_error(engine: Engine, encodings: Sequence[Any], alone: Sequence[Any]) -> float:
    worst = 0.0
    for i in range(0, len(encodings), BATCH_ROWS):
        batch = engine.run(encodings[i : i + BATCH_ROWS])
        for row, single in zip(batch, alone[i : i + BATCH_ROWS], strict=True):
            worst = max(worst, float(np.abs(row["logits"] - single["logits"]).max()))
    return worst


def _best(request: classify.Request, logits: NDArray[np.float32], checkpoint: Checkpoint) -> str:
    rows = [{"logits": row} for row in logits]
    return classify.decode(request, rows, checkpoint.labels, checkpoint.activation)[0]["label"]


def _torch_logits(checkpoint: Checkpoint, request: classify.Request) -> NDArray[np.float32]:
    """Returns float32 [windows, labels] from PyTorch, one window at a time."""
    cut = "only_second" if request.window and request.text_pair is not None else "longest_first"
    windows = checkpoint.tokenizer(
        request.text,
        request.text_pair,
        truncation=cut,
        max_length=checkpoint.max_length,
        stride=request.stride if request.window else 0,
        return_overflowing_tokens=request.window is not None,
        return_token_type_ids=True,
        return_attention_mask=True,
    )
    nested = windows["input_ids"] if request.window else [windows["input_ids"]]
    logits = []
    for i in range(len(nested)):
        feed = {spec.name: torch.tensor([windows[spec.name][i] if request.window else windows[spec.name]]) for spec in checkpoint.inputs}
        with torch.no_grad():
            logits.append(checkpoint.model(**feed).logits[0].numpy())
    return np.stack(logits)


def _describe(request: classify.Request) -> str:
    texts = [request.text] if request.text_pair is None else [request.text, request.text_pair]
    return " + ".join(f"{text[:60]!r} ({len(text)} characters)" for text in texts)
