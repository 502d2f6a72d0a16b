"""Batch: what a task's function yields to have the graph run, and what such a function is.

A task is a generator function. It turns a request into encodings and yields them; the scheduler runs them together with those of other
requests and sends back one row of outputs for each. The function may yield again, or return the result. It does not use threads or ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bertserve.service.bundle.manifest import Activation, Embedding, MaskToken
from bertserve.service.tasks.cost import NOTHING, Budget, Cost
from bertserve.service.tasks.decoding import Row
from bertserve.service.text.tokenizer import Encoding, Tokenizer, Tokens

# Windows of a text that are told of.
MAX_SPANS = 64


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A part of an input that the model reads in one encoding.

    Attributes:
        field: The text of the input that it is part of; empty if the input has one text.
        start: Its first code point.
        end: Its last code point, exclusive.
    """

    field: str
    start: int
    end: int


def spans_read(tokens: Tokens, cuts: Sequence[range], field: str = "") -> tuple[ReadSpan, ...]:
    """Returns the parts of a text that its windows have, for the first `MAX_SPANS` windows and one more; `cuts` are their tokens."""
    return tuple(ReadSpan(field, *tokens.span(cut)) if cut else ReadSpan(field, 0, 0) for cut in cuts[: MAX_SPANS + 1])


# the warning of an input without tokens: its scores or its vector are those of every other empty text
EMPTY = ("empty; the text is empty, so its answer has no meaning",)


@dataclass(frozen=True, slots=True)
class Batch:
    """Encodings of one input that run before its task continues.

    Attributes:
        encodings: What runs. A batch without any returns to the task at once, or after other requests if the thread has been busy with
            this one for long: a task yields one between the steps of long decoding.
        cost: What the input costs in addition to these encodings, including the tokens of later batches.
        keep: Index of an encoding and its outputs -> what the task needs of them, as arrays of its own: the outputs are views of arrays
            that are shared with other requests, and are held until the last encoding has run. None if they are a few numbers.
        truncated: Whether text was cut off. Only the first batch says this and what follows.
        warnings: Other warnings for the caller, each `topic; message`.
        read: The parts of a text that is cut or read in several windows; empty if the model reads it whole.
    """

    encodings: Sequence[Encoding]
    cost: Cost
    keep: Callable[[int, Row], Row] | None = None
    truncated: bool = False
    warnings: tuple[str, ...] = ()
    read: tuple[ReadSpan, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the encodings, as they count in the queue."""
        return sum(encoding.cost_tokens for encoding in self.encodings)


class ModelConfig(Protocol):
    """What tasks need to know of a model; a manifest has it."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names by id."""
        ...

    @property
    def activation(self) -> Activation:
        """What turns logits into scores."""
        ...

    @property
    def mask(self) -> MaskToken | None:
        """The mask token, if the model fills masks."""
        ...

    @property
    def embedding(self) -> Embedding | None:
        """How a text's vector is made, if the model embeds texts."""
        ...

    @property
    def attention_heads(self) -> tuple[int, ...]:
        """Heads of each layer, if the graph has attention as an output; else empty."""
        ...


@dataclass(frozen=True, slots=True)
class TaskModel:
    """The model that runs one request.

    Attributes:
        tokenizer: Its tokenizer.
        config: Its labels and activation.
        budget: What decoding may take, for all inputs of the request together.
    """

    tokenizer: Tokenizer
    config: ModelConfig
    budget: Budget


# What a task yields where other requests can go first, before and after its first batch.
PAUSE = Batch([], NOTHING)

TaskRun = Generator[Batch, Sequence[Row], Any]
TaskFunction = Callable[[Any, TaskModel], TaskRun]


def copied(_: int, row: Row) -> Row:
    """Returns all outputs, without the padding of their batch."""
    return {name: values.copy() for name, values in row.items()}


def kept(batch: Batch, rows: Sequence[Row]) -> list[Row]:
    """Returns what a task needs of the outputs of its batch.

    Args:
        batch: The batch.
        rows: One row of outputs for each of its encodings.
    """
    return list(rows) if batch.keep is None else [batch.keep(index, row) for index, row in enumerate(rows)]


def first_batch(function: TaskFunction, request: Any, model: TaskModel) -> Batch:
    """Returns what a task runs first for a request."""
    return begin(function(request, model))


def begin(run: TaskRun) -> Batch:
    """Starts a task; returns its first batch, without the pauses before it."""
    return next(batch for batch in run if batch is not PAUSE)


def result_of(function: TaskFunction, request: Any, model: TaskModel, rows: Sequence[Row]) -> Any:
    """Returns a task's result for given outputs of its first batch, which must be its only one.

    Args:
        function: The task.
        request: A request of it.
        model: Its tokenizer and labels.
        rows: One row of outputs for each encoding of the batch.
    """
    given = [rows]
    return run_all(function(request, model), lambda _: given.pop())


def run_all(run: TaskRun, execute: Callable[[Sequence[Encoding]], Sequence[Row]]) -> Any:
    """Runs a task from start to end without a scheduler, and returns its result.

    Args:
        run: What the task's function returned.
        execute: Encodings -> one row of outputs for each.
    """
    try:
        batch = begin(run)
        while True:
            batch = run.send(kept(batch, execute(batch.encodings) if batch.encodings else []))
    except StopIteration as end:
        return end.value
