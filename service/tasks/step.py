"""Step: what a task's function yields, encodings for the graph to run; and the type of such a function.

A task is a generator function. It turns an input into encodings and yields them; the scheduler runs them together with encodings of other
inputs and sends back one row of outputs per encoding. The function can yield again, or return the result. It uses no threads or ONNX.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from bertserve.service.bundle.calibration import Calibration
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import ModelConfig, Side
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.cost import ZERO_COST, Cost
from bertserve.service.text.tokenizer import Encoding, Tokenizer, Tokens
from bertserve.service.text.windows import kept_of_pair

# Warnings for an input whose texts are empty or only white space. Its tokens do not say this: some tokenizers make tokens of white space,
# and others belong to a prompt.
EMPTY_WARNINGS = ("empty; the text is empty, so its answer has no meaning",)

# A part of an input that the model reads in one encoding: the name of its text, empty if the input has only one, the index of its first
# code point, and the index after its last one.
ReadSpan = tuple[str, int, int]

# The labels of a prediction, which are names of the manifest, and its best calibrated score.
ScoredLabels = tuple[Sequence[str], float]


def window_spans(tokens: Tokens, windows: Sequence[range], field: str = "") -> tuple[ReadSpan, ...]:
    """Returns the spans of a text's windows; `windows` has the tokens of each window."""
    return tuple((field, *tokens.range_offsets(window)) if window else (field, 0, 0) for window in windows)


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
        encodings: The encodings to run. A step without encodings only adds its cost, which is checked before the task continues, or
            reports what the metrics count.
        cost: Cost of the input in addition to these encodings and earlier steps, including the tokens of later steps.
        keep: Index of an encoding and its outputs -> the arrays that the task needs, as copies: the outputs are views of arrays that other
            requests share, and they would stay in memory until the last encoding has run. The default, for a few numbers, copies nothing.
        small_outputs: Whether the task needs only the graph's small outputs, if it has some.
        predictions: Predictions with calibrated scores, for the metrics. Only later steps set this and `abstained`.
        abstained: Whether there is no decision, although one was requested.
        truncated: Whether text was cut. Only the first step sets this and the following attributes.
        warnings: Other warnings for the caller, each `topic; message`.
        read_spans: The parts of a text that is cut or read in several windows; empty if the model reads the whole text.
    """

    encodings: Sequence[Encoding]
    cost: Cost = ZERO_COST
    keep: Callable[[int, Outputs], Outputs] = all_outputs
    small_outputs: bool = False
    predictions: Sequence[ScoredLabels] = ()
    abstained: bool = False
    truncated: bool = False
    warnings: tuple[str, ...] = ()
    read_spans: tuple[ReadSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskModel:
    """The parts of a model that tasks use.

    Attributes:
        tokenizer: Its tokenizer.
        config: Its properties.
        calibration: Its calibration and thresholds; None for raw scores.
    """

    tokenizer: Tokenizer
    config: ModelConfig
    calibration: Calibration | None = None


P = TypeVar("P")


@dataclass(slots=True)
class TextInput(Generic[P]):
    """An input of a task that reads one text or a pair, such as a question and its passage.

    Attributes:
        text: The text.
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


TaskGenerator = Generator[Step, Sequence[Outputs], Any]
TaskFunction = Callable[[Any, TaskModel], TaskGenerator]


def too_long_error(total: int, room: int, remedy: str) -> InvalidValueError:
    """Returns the error of a text of `total` tokens in place of at most `room`; `remedy` ends its sentence."""
    return InvalidValueError(
        "the text has {total} tokens and the model takes {room}; shorten it, {remedy}.", total=total, room=room, remedy=remedy
    )


def encode_pairs(
    tokenizer: Tokenizer, first: str, others: Iterable[str], *, side: Side | None = None, must_fit: bool, field: str, option: str
) -> tuple[list[Encoding], bool]:
    """Returns the encodings of a text with each other text, and whether a pair is truncated, the longer text first.

    `side` is the end to truncate; None for the model's own. For the error, `field` has the other texts, and `option` truncates.

    Raises:
        InvalidValueError: A pair is too long and `must_fit` is true.
    """
    room, encodings, truncated = tokenizer.max_text_tokens(pair=True), [], False
    texts = tokenizer.tokenize_lazily(chain([first], others))
    a = next(texts)
    for index, b in enumerate(texts):
        total = len(a) + len(b)
        if total > room and must_fit:
            raise InvalidValueError(
                "`{field}[{index}]` has {total} tokens together with the other text of its pair, and the model takes {room}; shorten them, "
                "or set `{option}` to true.",
                field=field,
                index=index,
                total=total,
                room=room,
                option=option,
            )
        truncated |= total > room
        kept_a, kept_b = kept_of_pair(len(a), len(b), room, side or tokenizer.spec.truncation_side)
        encodings.append(tokenizer.assemble(a.ids[kept_a.start : kept_a.stop], b.ids[kept_b.start : kept_b.stop]))
    return encodings, truncated
