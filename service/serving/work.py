"""Work: an item of a batch; TaskInput and RequestRun: the progress of one input, and of a request; Prediction: the answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bertserve.service.backend.onnx_engine import Row
from bertserve.service.tasks.batch import Batch, ReadSpan, TaskModel, TaskRun
from bertserve.service.tasks.cost import NOTHING, Cost
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding
from bertserve.service.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class Work:
    """The payload of a scheduler item: one encoding of one input.

    Attributes:
        encoding: What runs.
        input_index: Of the request's input that it is of.
        keep: Its outputs -> what its task needs of them; None for all of them.
        trace: Its request's, where that is recorded.
    """

    encoding: Encoding
    input_index: int
    keep: Callable[[Row], Any] | None
    trace: Trace | None


@dataclass(slots=True)
class TaskInput:
    """One input of a request, with its task under way.

    Attributes:
        run: The task, which takes the rows of its batch.
        batch: What it has to run, or ran last.
        result: The task's result, once it has ended.
    """

    run: TaskRun
    batch: Batch
    result: Any = None


@dataclass(slots=True)
class RequestRun:
    """The progress of one request, which one thread at a time advances.

    Attributes:
        requests: Its inputs.
        spec: Their task.
        model: The model, with the budget of decoding.
        trace: Where its stages are noted, if it is traced.
        inputs: Those whose task has yielded its first batch.
        begun: The task of the next input, if it has paused before its first batch.
        tokens: Tokens of their first batches.
        cost: Their other cost.
        tokenize_s: Seconds to begin them.
        prediction: What is known of the answer, once all have begun.
        open: Indices of the inputs that have a batch to run.
        ready: Indices of inputs whose task can continue, with the rows for it.
        reserved_tokens: Tokens of the batches after the current ones, at most.
        next_reserved_tokens: The same for the batches of `open`.
    """

    requests: Sequence[Any]
    spec: TaskSpec
    model: TaskModel
    trace: Trace | None
    inputs: list[TaskInput] = field(default_factory=list)
    begun: TaskRun | None = None
    tokens: int = 0
    cost: Cost = NOTHING
    tokenize_s: float = 0.0
    prediction: Prediction = field(init=False)
    open: list[int] = field(default_factory=list)
    ready: deque[tuple[int, Sequence[Row]]] = field(default_factory=deque)
    reserved_tokens: int = 0
    next_reserved_tokens: int = 0


def trace_run(
    traces: Sequence[Trace],
    model: Mapping[str, str],
    lengths: Sequence[int],
    padded: int,
    *,
    start: float,
    multi_threaded: bool,
    error: Exception | None = None,
) -> None:
    """Makes a span of a run that ends now, with requests that are traced.

    Args:
        traces: Those of what ran, at least one; a request with several items in it has one for each.
        model: Attributes of the model and its graph.
        lengths: Tokens of each row.
        padded: Tokens that ran, padding included.
        start: Seconds, by `time.perf_counter`.
        multi_threaded: Whether it took several threads.
        error: What it ended with.
    """
    traces = list(dict.fromkeys(traces))
    real = sum(lengths)
    batch = {"rows": len(lengths), "tokens": real, "padded_tokens": padded - real, "multi_threaded": multi_threaded}
    attributes = {f"bertserve.{name}": value for name, value in model.items()} | {f"bertserve.batch.{name}": n for name, n in batch.items()}
    kind = None if error is None else type(error).__name__
    traces[0].tracer.batch(traces, f"batch {model['model']}", start, time.perf_counter(), attributes=attributes, error=kind)


@dataclass(slots=True)
class Prediction:
    """The answer to a request, with the seconds of its parts.

    Attributes:
        results: One per input, in order.
        truncated: Indices of inputs of which text was cut off.
        warnings: What else the caller should know, each `topic; message`.
        tokens: What the model read, special tokens included; each mask to be filled counts for one more.
        warned: Index of the input that each of the warnings is about.
        tokenize_s: Seconds to tokenize all inputs.
        queue_s: Seconds until its first run started, without `tokenize_s`.
        inference_s: Seconds from the start of its first run to the end of its last one.
        decode_s: Seconds to decode all inputs.
        answer_bytes: About how long the answer is as JSON, at most.
        read: What the model read of the only input, where it is cut or was read in several windows.
    """

    results: list[Any]
    truncated: list[int]
    warnings: list[str]
    tokens: int = 0
    warned: list[int] = field(default_factory=list)
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    decode_s: float = 0.0
    answer_bytes: int = 0
    read: Sequence[ReadSpan] = ()
