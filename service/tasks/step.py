"""The interface of a task's function: its input, the model, the steps that it yields, encodings for the graph to run, and its result.

A task is a generator function. It turns an input into encodings and yields them; the scheduler runs them together with encodings of other
inputs and sends back one row of outputs per encoding. The function can yield again, or return a `TaskResult`. It uses no threads or ONNX.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bertserve.service.bundle.calibration import Calibration
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import ModelConfig, Side
from bertserve.service.tasks.cost import ZERO_COST, Cost
from bertserve.service.text.tokenizer import Encoding, ReadSpan, Tokenizer

# Warnings for an input whose texts are empty or only white space. Its tokens do not say this: some tokenizers make tokens of white space,
# and others belong to a prompt.
EMPTY_WARNINGS = ("empty; the text is empty, so its answer has no meaning",)

# The labels of a prediction, which are names of the manifest, and its best calibrated score.
ScoredLabels = tuple[Sequence[str], float]


def all_outputs(_: int, row: Outputs) -> Outputs:
    """Returns all outputs as they are."""
    return row


def copy_outputs(_: int, row: Outputs) -> Outputs:
    """Returns all outputs, without the padding of their batch."""
    return {name: values.copy() for name, values in row.items()}


@dataclass(slots=True)
class Step:
    """Encodings of one input that run before its task continues.

    Attributes:
        encodings: The encodings to run. A step without encodings only adds its cost.
        cost: Cost of the input in addition to these encodings and earlier steps, including the tokens of later steps. It is checked
            before the task continues.
        keep: Index of an encoding and its outputs -> the arrays that the task needs, as copies: the outputs are views of arrays that other
            requests share, and they would stay in memory until the last encoding has run. The default, for a few numbers, copies nothing.
        small_outputs: Whether the graph's small outputs, if any, are sufficient for the task.
        truncated: Whether text was cut. Only the first step sets this and the following attributes.
        warnings: Other warnings for the caller, each `topic; message`.
        read_spans: The parts of a text that is cut or read in several windows; empty if the model reads the whole text.
    """

    encodings: Sequence[Encoding]
    cost: Cost = ZERO_COST
    keep: Callable[[int, Outputs], Outputs] = all_outputs
    small_outputs: bool = False
    truncated: bool = False
    warnings: tuple[str, ...] = ()
    read_spans: tuple[ReadSpan, ...] = ()


@dataclass(slots=True)
class TaskResult:
    """The result of one input.

    Attributes:
        value: What the caller gets, as JSON or with arrays.
        scored_labels: Predictions with calibrated scores, for the metrics.
        abstained: Whether there is no decision, although one was requested.
    """

    value: Any
    scored_labels: Sequence[ScoredLabels] = ()
    abstained: bool = False


@dataclass(frozen=True, slots=True)
class TaskModel:
    """The parts of a model that tasks use. Without a calibration, which includes the thresholds, its scores are raw."""

    tokenizer: Tokenizer
    config: ModelConfig
    calibration: Calibration | None = None


P = TypeVar("P")


@dataclass(slots=True)
class TextInput(Generic[P]):
    """An input of a task that reads one text or a pair, such as a question and its passage.

    Attributes:
        parameters: The parameters of the request, as the task needs them.
        text_pair: The second text; None or empty if there is none.
        truncation_side: The end to truncate, for text classification; None for the model's own.
        other_chars: Characters to tokenize in addition to these texts.
    """

    text: str
    parameters: P
    text_pair: str | None = None
    truncation_side: Side | None = None
    other_chars: int = 0

    @property
    def chars(self) -> int:
        """Characters to tokenize."""
        return len(self.text) + len(self.text_pair or "") + self.other_chars


TaskGenerator = Generator[Step, Sequence[Outputs], TaskResult]
TaskFunction = Callable[[Any, TaskModel], TaskGenerator]


def drive(generator: TaskGenerator, execute: Callable[[Step], Sequence[Outputs]]) -> Any:
    """Returns a task's value. The steps run one after the other; `execute` returns a row of outputs per encoding of a step."""
    try:
        step = next(generator)
        while True:
            rows = execute(step) if step.encodings else ()
            step = generator.send([step.keep(index, row) for index, row in enumerate(rows)])
    except StopIteration as end:
        return end.value.value
