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

from export.checkpoint import sentence_transformers
from export.checkpoint.load import Checkpoint
from export.errors import ParityError
from export.evidence.batch_invariance import MAX_ROW_ERROR as MAX_ROW_ERROR  # noqa: PLC0414 - a bound of parity too
from export.evidence.batch_invariance import worst_row_error
from export.evidence.decisions import choice
from export.evidence.metrics import Span, same, span_f1, spans
from service.backend.onnx_engine import Engine, Row
from service.bundle.graph_spec import LengthParity, Precision
from service.errors import EngineError
from service.tasks import answer, classify, embed, fill_mask, ner
from service.tasks.catalog import TASKS
from service.text.tokenizer import Encoding, Tokenizer
from service.text.windows import default_stride
from service.wire.rendering import to_plain

# Largest difference of a logit to PyTorch that a precision may show. int8 is judged by task figures, not by logits:
# its bound only catches a graph that is broken.
MAX_ABS_ERROR: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-1, "int8": 15.0}
REASON = 300  # characters of ONNX Runtime's own message
SHORTEST_RANGE = 16  # tokens; each range of the table by length reaches twice as far as the one before


@dataclass(frozen=True)
class Parity:
    """What the comparison found; the fields mean what `service.graph.Evidence` says."""

    samples: int
    worst_abs_error: float
    worst_rel_error: float
    label_agreement: float
    spans: int
    span_agreement: float | None
    worst_row_error: float
    lengths: tuple[LengthParity, ...]


class Reference:
    """The checkpoint's answers in PyTorch, float32, computed once and used for every graph."""

    def __init__(self, checkpoint: Checkpoint, requests: Sequence[Any]) -> None:
        """Runs the requests through PyTorch, a window at a time."""
        self.requests = requests
        self.rows = [[_torch_row(checkpoint, window) for window in _windows(checkpoint, request)] for request in requests]


def compare(engine: Engine, tokenizer: Tokenizer, reference: Reference, checkpoint: Checkpoint, precision: Precision) -> Parity:
    """Runs the samples alone and in mixed batches and compares.

    Args:
        engine: The graph under test.
        tokenizer: The service's tokenizer on the bundle's files.
        reference: The checkpoint's answers.
        checkpoint: Task, labels and activation.
        precision: Decides the bound.

    Raises:
        ParityError: A logit is too far off, a decoded float32 answer differs, or the graph fails; the message holds the worst case.
    """
    task = TASKS[checkpoint.task]
    agree, whole, misses = 0, 0, []
    encodings: list[Encoding] = []
    alone: list[Row] = []
    table = _ByLength(tokenizer.max_length)
    places: list[tuple[set[Span], set[Span]]] = []
    for request, expected in zip(reference.requests, reference.rows, strict=True):
        encoded = task.encode(request, tokenizer)
        rows = [_run(engine, encoding, request) for encoding in encoded.encodings]
        encodings += encoded.encodings
        alone += rows
        misses.append(_farthest(request, expected, rows))
        table.add(encoded.encodings, expected, rows)
        right, got = (to_plain(task.decode(request, encoded, outputs, checkpoint)) for outputs in (expected, rows))
        whole += same(right, got)
        agree += same(*(choice(checkpoint.task, result, checkpoint) for result in (right, got)))
        places.append((spans(right), spans(got)))
    worst = max(misses, key=lambda miss: miss.error)
    if worst.error > MAX_ABS_ERROR[precision]:
        raise ParityError(
            f"{precision} logits are off by {worst.error:.2e}, allowed is {MAX_ABS_ERROR[precision]:.0e}: {_describe(worst.request)}; "
            f"expected {worst.expected}, got {worst.actual}."
        )
    if precision == "fp32" and whole < len(reference.requests):
        raise ParityError(f"float32 answers agree on {whole} of {len(reference.requests)} samples only.")
    count = sum(len(right) for right, _ in places)
    return Parity(
        samples=len(reference.requests),
        worst_abs_error=worst.error,
        worst_rel_error=max((entry.worst_rel_error for entry in table.entries), default=0.0),
        label_agreement=agree / len(reference.requests),
        spans=count,
        span_agreement=span_f1(*zip(*places, strict=True)) if any(right or got for right, got in places) else None,
        worst_row_error=worst_row_error(engine, encodings, alone),
        lengths=table.entries,
    )


class _ByLength:
    """The worst errors of rows by their length in tokens."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
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
        return min(up_to, self._longest)

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


@dataclass(frozen=True)
class _Miss:
    """The logit of a request that is farthest from PyTorch's."""

    request: Any
    expected: float
    actual: float

    @property
    def error(self) -> float:
        return abs(self.actual - self.expected)


def _run(engine: Engine, encoding: Encoding, request: Any) -> Row:
    """Returns a row's outputs; a graph that fails where the checkpoint answered is one that was not traced for this length."""
    try:
        return engine.run([encoding])[0]
    except EngineError as error:
        reason = (str(error.__cause__ or error).splitlines() or [""])[0]
        raise ParityError(
            f"the graph fails on {len(encoding)} tokens, which PyTorch answers: {_describe(request)}. What the model's code does with a text's "
            f"length or values does not show in a traced graph, and is not understood. {reason[:REASON]}"
        ) from error


def _farthest(request: Any, expected: Sequence[Row], rows: Sequence[Row]) -> _Miss:
    """Returns the logit that is farthest off over the windows of one request."""
    if len(rows) != len(expected):
        raise ParityError(f"{len(rows)} windows where the reference has {len(expected)}: {_describe(request)}.")
    shapes = [[{name: value.shape for name, value in row.items()} for row in side] for side in (expected, rows)]
    if shapes[0] != shapes[1]:
        raise ParityError(f"outputs are {shapes[1]} where the reference has {shapes[0]}: {_describe(request)}.")
    a, b = (np.concatenate([np.zeros(1), *(value.ravel() for row in side for value in row.values())]) for side in (expected, rows))
    worst = int(np.abs(a - b).argmax())
    return _Miss(request, float(a[worst]), float(b[worst]))


def _windows(checkpoint: Checkpoint, request: Any) -> list[dict[str, list[int]]]:
    """Returns the inputs of each window by the Hugging Face tokenizer's own truncation."""
    texts, cut, stride, length = _texts(checkpoint, request)
    batch = checkpoint.tokenizer(
        *texts,
        truncation=cut,
        max_length=length,
        stride=stride or 0,
        return_overflowing_tokens=stride is not None,
        return_token_type_ids=True,
        return_attention_mask=True,
    )
    nested = batch if stride is not None else {name: [values] for name, values in batch.items()}
    names = [spec.name for spec in checkpoint.inputs if spec.name in nested]
    return [{name: nested[name][i] for name in names} for i in range(len(nested["input_ids"]))]


def _texts(checkpoint: Checkpoint, request: Any) -> tuple[tuple[str, ...], str, int | None, int]:
    """Returns a request's texts, which of them is cut, the stride of its windows if it has any, and the length of one."""
    length = checkpoint.max_length
    if isinstance(request, classify.Request):
        texts = (request.text, request.text_pair) if request.text_pair else (request.text,)
        return texts, "longest_first", _stride(request.parameters.stride, checkpoint) if request.parameters.window else None, length
    if isinstance(request, ner.Request):
        return (request.text,), "longest_first", _stride(request.parameters.stride, checkpoint), length
    if isinstance(request, answer.Request):
        length = min(answer.DEFAULT_SEQ_LEN, length)
        return (request.question, request.context), "only_second", min(length // 2, answer.DEFAULT_STRIDE), length
    assert isinstance(request, fill_mask.Request | embed.Request)
    return (request.text,), "longest_first", None, length


def _stride(given: int | None, checkpoint: Checkpoint) -> int:
    return default_stride(checkpoint.max_length - 2) if given is None else given


def _torch_row(checkpoint: Checkpoint, window: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Returns a window's outputs as the engine gives them, float32, from PyTorch."""
    with torch.no_grad():
        outputs = checkpoint.model(**{name: torch.tensor([values]) for name, values in window.items()})
    row = {spec.name: sentence_transformers.output(outputs, spec.name)[0].numpy() for spec in checkpoint.outputs}
    if checkpoint.mask is not None:
        masks = [i for i, id_ in enumerate(window["input_ids"]) if id_ == checkpoint.mask.id]
        row = {name: values[masks] for name, values in row.items()}
    return row


def _describe(request: Any) -> str:
    texts = [getattr(request, name, None) for name in ("text", "text_pair", "question", "context")]
    return " + ".join(f"{text[:60]!r} ({len(text)} characters)" for text in texts if text is not None)
