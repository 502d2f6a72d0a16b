"""Work: the payload of an item; TaskInput and RequestRun: the progress of an input and of a request; Prediction: the answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bertserve.service.engine.onnx_engine import Row
from bertserve.service.tasks.batch import Batch, ReadSpan, TaskModel, TaskRun
from bertserve.service.tasks.cost import NOTHING, Cost
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding
from bertserve.service.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class Work:
    """The payload of a scheduler item: one encoding of one input.

    Attributes:
        encoding: The encoding to run.
        input_index: Index of its input in the request.
        keep: Selects the outputs that its task needs; None for all outputs.
        trace: The request's trace, if it is recorded.
    """

    encoding: Encoding
    input_index: int
    keep: Callable[[Row], Any] | None
    trace: Trace | None


@dataclass(slots=True)
class TaskInput:
    """One input of a request, with its running task.

    Attributes:
        run: The task, which receives the rows of its batch.
        batch: The encodings to run, or those of the last run.
        result: The task's result, once it is done.
    """

    run: TaskRun
    batch: Batch
    result: Any = None


@dataclass(slots=True)
class Prediction:
    """The answer to a request, with its times in seconds.

    Attributes:
        results: One per input, in order.
        truncated: Indices of inputs whose text was cut.
        warnings: Further warnings for the caller: index of the input, and text as `topic; message`.
        tokens: Tokens that the model read, including special tokens, plus one for each mask to be filled.
        tokenize_s: Seconds to tokenize all inputs.
        queue_s: Seconds until its first run started, without `tokenize_s`.
        inference_s: Seconds from the start of its first run to the end of its last one.
        decode_s: Seconds to decode all inputs.
        read: The spans that the model read of a single input, if it is cut or was read in several windows.
    """

    results: list[Any] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    tokens: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    decode_s: float = 0.0
    read: Sequence[ReadSpan] = ()


@dataclass(slots=True)
class RequestRun:
    """The progress of one request. Only one thread at a time continues it.

    Attributes:
        requests: Its inputs.
        spec: The task of the inputs.
        model: The parts of the model.
        trace: Records the stages, if the request is traced.
        inputs: The inputs whose task has yielded its first batch.
        paused_task: The task of the next input, if it has paused before its first batch.
        cost: Cost of the batches so far in addition to their tokens.
        prediction: The prediction so far.
        open: Indices of the inputs that have a batch to run.
        ready: Indices of inputs whose task can continue, with their rows.
        reserved_tokens: Maximum tokens of the batches after the current ones.
    """

    requests: Sequence[Any]
    spec: TaskSpec
    model: TaskModel
    trace: Trace | None
    inputs: list[TaskInput] = field(default_factory=list)
    paused_task: TaskRun | None = None
    cost: Cost = NOTHING
    prediction: Prediction = field(default_factory=Prediction)
    open: list[int] = field(default_factory=list)
    ready: deque[tuple[int, Sequence[Row]]] = field(default_factory=deque)
    reserved_tokens: int = 0


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
    """Records a span of a run that ends now, for the traced requests in it.

    Args:
        traces: The traces of the run's items, at least one; a request with several items occurs once per item.
        model: Attributes of the model and its graph.
        lengths: Tokens of each row.
        padded: Tokens of the run, padding included.
        start: Start time in seconds of `time.perf_counter`.
        multi_threaded: Whether the run had several threads.
        error: The error of the run, if it failed.
    """
    traces = list(dict.fromkeys(traces))
    real = sum(lengths)
    batch = {"rows": len(lengths), "tokens": real, "padded_tokens": padded - real, "multi_threaded": multi_threaded}
    attributes = {f"bertserve.{name}": value for name, value in model.items()} | {f"bertserve.batch.{name}": n for name, n in batch.items()}
    kind = None if error is None else type(error).__name__
    traces[0].tracer.batch(traces, f"batch {model['model']}", start, time.perf_counter(), attributes=attributes, error=kind)
