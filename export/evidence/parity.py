"""Compares a graph, run through the service's own tokenizer, engine and decoder, with the checkpoint in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from export.checkpoint.checkpoint import Checkpoint
from export.errors import ParityError
from export.evidence.batch_invariance import worst_row_error
from export.evidence.decisions import decision, equal_but_for_scores, result_spans
from export.evidence.metrics import Span, span_f1
from export.evidence.reference import Reference
from service.backend.onnx_engine import Engine, Row
from service.bundle.graph_spec import LengthParity, Precision
from service.errors import EngineError
from service.tasks.catalog import TASKS
from service.text.tokenizer import Encoding, Tokenizer
from service.wire.rendering import to_plain

# Largest difference of a logit to PyTorch that a precision may show. int8 is judged by task figures, not by logits:
# its bound only catches a graph that is broken.
MAX_ABS_ERROR: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-1, "int8": 15.0}
MAX_REASON = 300  # characters of ONNX Runtime's own message
SHORTEST_RANGE = 16  # tokens; each range of the table by length is twice as long as the one before


@dataclass(frozen=True)
class Parity:
    """The result of the comparison; the fields mean what those of `service.bundle.graph_spec.Evidence` do."""

    samples: int
    worst_abs_error: float
    worst_rel_error: float
    label_agreement: float
    spans: int
    span_agreement: float | None
    worst_row_error: float
    lengths: tuple[LengthParity, ...]


def measure_parity(engine: Engine, tokenizer: Tokenizer, reference: Reference, checkpoint: Checkpoint, precision: Precision) -> Parity:
    """Runs the reference's requests alone and in mixed batches, and compares outputs and decoded answers.

    Args:
        engine: The graph under test.
        tokenizer: The service's tokenizer on the bundle's files.
        reference: The checkpoint's outputs.
        checkpoint: Task, labels and activation.
        precision: Decides the bound.

    Raises:
        ParityError: A logit is too far off, a decoded float32 answer differs, or the graph fails; the message holds the worst case.
    """
    task = TASKS[checkpoint.task]
    same_decisions, same_answers, differences = 0, 0, []
    encodings: list[Encoding] = []
    alone: list[Row] = []
    errors = _ErrorsByLength(tokenizer.max_length)
    spans: list[tuple[set[Span], set[Span]]] = []
    for request, expected in zip(reference.requests, reference.rows, strict=True):
        encoded = task.encode(request, tokenizer)
        rows = [_run(engine, encoding, request) for encoding in encoded.encodings]
        encodings += encoded.encodings
        alone += rows
        differences.append(_largest_difference(request, expected, rows))
        errors.add(encoded.encodings, expected, rows)
        right, found = (to_plain(task.decode(request, encoded, outputs, checkpoint)) for outputs in (expected, rows))
        same_answers += equal_but_for_scores(right, found)
        same_decisions += equal_but_for_scores(*(decision(checkpoint.task, result, checkpoint) for result in (right, found)))
        spans.append((result_spans(right), result_spans(found)))
    worst = max(differences, key=lambda difference: difference.error)
    _check(worst, same_answers, len(reference.requests), precision)
    return Parity(
        samples=len(reference.requests),
        worst_abs_error=worst.error,
        worst_rel_error=max((entry.worst_rel_error for entry in errors.entries), default=0.0),
        label_agreement=same_decisions / len(reference.requests),
        spans=sum(len(right) for right, _ in spans),
        span_agreement=span_f1(*zip(*spans, strict=True)) if any(right or found for right, found in spans) else None,
        worst_row_error=worst_row_error(engine, encodings, alone),
        lengths=errors.entries,
    )


@dataclass(frozen=True)
class _Difference:
    """The value of a request's outputs that is farthest from PyTorch's."""

    request: Any
    expected: float
    actual: float

    @property
    def error(self) -> float:
        return abs(self.actual - self.expected)


def _check(worst: _Difference, same_answers: int, samples: int, precision: Precision) -> None:
    """Refuses a graph beyond the bound of its precision, and of float32 one with another answer."""
    if worst.error > MAX_ABS_ERROR[precision]:
        raise ParityError(
            f"{precision} logits are off by {worst.error:.2e}, allowed is {MAX_ABS_ERROR[precision]:.0e}: {_describe(worst.request)}; "
            f"expected {worst.expected}, got {worst.actual}."
        )
    if precision == "fp32" and same_answers < samples:
        raise ParityError(f"float32 answers agree on {same_answers} of {samples} samples only.")


class _ErrorsByLength:
    """The worst errors of rows by their length in tokens."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._errors: dict[int, list[tuple[float, float]]] = {}

    def add(self, encodings: Sequence[Encoding], expected: Sequence[Row], actual: Sequence[Row]) -> None:
        for encoding, *pair in zip(encodings, expected, actual, strict=True):
            a, b = (np.concatenate([np.zeros(1), *(value.ravel() for value in row.values())]) for row in pair)
            error, size = float(np.abs(a - b).max()), float(np.abs(a).max())
            self._errors.setdefault(self._range(len(encoding)), []).append((error, error / size if size else error))

    def _range(self, length: int) -> int:
        up_to = SHORTEST_RANGE
        while up_to < length:
            up_to *= 2
        return min(up_to, self._max_length)

    @property
    def entries(self) -> tuple[LengthParity, ...]:
        return tuple(
            LengthParity(
                up_to=up_to,
                rows=len(errors),
                worst_abs_error=max(absolute for absolute, _ in errors),
                worst_rel_error=max(relative for _, relative in errors),
            )
            for up_to, errors in sorted(self._errors.items())
        )


def _run(engine: Engine, encoding: Encoding, request: Any) -> Row:
    """Returns a row's outputs; a graph that fails where the checkpoint answers was not traced for this length."""
    try:
        return engine.run([encoding])[0]
    except EngineError as error:
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        raise ParityError(
            f"the graph fails on {len(encoding)} tokens, which PyTorch answers: {_describe(request)}. What the model's code does with a text's "
            f"length or values does not show in a traced graph, and is not understood. {reason[:MAX_REASON]}"
        ) from error


def _largest_difference(request: Any, expected: Sequence[Row], rows: Sequence[Row]) -> _Difference:
    """Returns the value that is farthest off over the windows of one request."""
    if len(rows) != len(expected):
        raise ParityError(f"{len(rows)} windows where the reference has {len(expected)}: {_describe(request)}.")
    shapes = [[{name: value.shape for name, value in row.items()} for row in side] for side in (expected, rows)]
    if shapes[0] != shapes[1]:
        raise ParityError(f"outputs are {shapes[1]} where the reference has {shapes[0]}: {_describe(request)}.")
    a, b = (np.concatenate([np.zeros(1), *(value.ravel() for row in side for value in row.values())]) for side in (expected, rows))
    worst = int(np.abs(a - b).argmax())
    return _Difference(request, float(a[worst]), float(b[worst]))


def _describe(request: Any) -> str:
    texts = [getattr(request, name, None) for name in ("text", "text_pair", "question", "context")]
    return " + ".join(f"{text[:60]!r} ({len(text)} characters)" for text in texts if text is not None)
