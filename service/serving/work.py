"""Work: an item of a batch; TaskInput and RequestRun: the progress of one input, and of a request; and what traces are told of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bertserve.service.backend.onnx_engine import Row
from bertserve.service.serving.prediction import Prediction
from bertserve.service.tasks.batch import Batch, TaskModel, TaskRun
from bertserve.service.tasks.cost import NOTHING, Cost
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding
from bertserve.service.tracing.trace import Stage, StageName, Trace


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

    def __len__(self) -> int:
        return len(self.encoding)


class TaskInput:
    """One input of a request, with its task under way.

    Attributes:
        batch: What it has to run, or ran last.
        result: The task's result, once it has ended.
    """

    __slots__ = ("_run", "batch", "result")

    def __init__(self, run: TaskRun, batch: Batch) -> None:
        """Takes a task that was run up to its first batch."""
        self._run = run
        self.batch = batch
        self.result: Any = None

    def advance(self, rows: Sequence[Row]) -> bool:
        """Sends the task the rows of its batch; returns whether it has another batch to run."""
        try:
            self.batch = self._run.send(rows)
        except StopIteration as end:
            self.result = end.value
            return False
        return True


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
    prediction: Prediction = field(default_factory=lambda: Prediction([], [], []))
    open: list[int] = field(default_factory=list)
    ready: deque[tuple[int, Sequence[Row]]] = field(default_factory=deque)
    reserved_tokens: int = 0
    next_reserved_tokens: int = 0

    def note(self, name: StageName, start: float, end: float, *, waits: bool) -> None:
        """Adds a stage to the trace, if there is one.

        Args:
            name: The stage.
            start: Seconds, by `time.perf_counter`.
            end: The same.
            waits: Whether the request waits in the queue from then on.
        """
        if self.trace is not None:
            self.trace.add(Stage(name, start, end))
            if waits:
                self.trace.put(end)


def trace_run(
    works: Sequence[Work],
    model: Mapping[str, str],
    shape: tuple[int, int],
    *,
    start: float,
    multi_threaded: bool,
    error: Exception | None = None,
) -> None:
    """Makes a span of a run that ends now, if a request in it is traced.

    Args:
        works: What ran.
        model: Attributes of the model and its graph.
        shape: Padded rows and length.
        start: Seconds, by `time.perf_counter`.
        multi_threaded: Whether it took several threads.
        error: What it ended with.
    """
    traces = list(dict.fromkeys(work.trace for work in works if work.trace is not None))
    if not traces:
        return
    real = sum(map(len, works))
    batch = {"rows": len(works), "tokens": real, "padded_tokens": shape[0] * shape[1] - real, "multi_threaded": multi_threaded}
    attributes = {f"bertserve.{name}": value for name, value in model.items()} | {f"bertserve.batch.{name}": n for name, n in batch.items()}
    kind = None if error is None else type(error).__name__
    traces[0].tracer.batch(traces, f"batch {model['model']}", start, time.perf_counter(), attributes=attributes, error=kind)
