"""The scores of a graph on labeled examples, next to their correct answers, and the predictions that follow from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertserve.export.errors import UsageError
from bertserve.export.progress import track
from bertserve.export.tasks.evaluation import Span, exact_match, widen_to_words
from bertserve.export.validation.labeled_data import LabeledRow
from bertserve.export.validation.served_graph import ServedGraph
from bertserve.service.bundle.calibration import Method
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import BertServeError
from bertserve.service.tasks import classify, question_answering, token_classification
from bertserve.service.tasks.decoding import Floats, Link, activate, apply_calibration

# the smallest distance of a score from 0 or 1 in a log loss; float32 has no larger number below 1
CLOSEST = float(np.finfo(np.float32).epsneg)

Values = NDArray[np.float64]
Booleans = NDArray[np.bool_]


class Parameters(NamedTuple):
    """Scales and biases of scores, one for all labels or one for each; by default, scores stay raw."""

    scale: tuple[float, ...] = (1.0,)
    bias: tuple[float, ...] = (0.0,)


RAW = Parameters()


@dataclass(frozen=True)
class Predictions:
    """Predictions whose scores say how probably they are correct, such as the best label of each text or each entity.

    Attributes:
        scores: float64 [predictions].
        correct: bool [predictions].
        losses: The log loss of each, float64 [predictions].
        examples: The index of the example of each, int64 [predictions].
        labels: The label of each, str [predictions].
        count: Number of examples.
        missed: Number of items in no prediction, such as entities that were not found.
    """

    scores: Values
    correct: Booleans
    losses: Values
    examples: NDArray[np.int64]
    labels: NDArray[np.str_]
    count: int
    missed: int = 0


def log_losses(scores: Values, correct: Booleans) -> Values:
    """Returns the log loss of scores that predictions are correct."""
    return -np.log(np.maximum(np.where(correct, scores, 1 - scores), CLOSEST))


@dataclass(frozen=True)
class Scores:
    """The scores of labels, or of the best answer and of "no answer", next to their correct answers.

    Attributes:
        method: How the scores are calibrated.
        labels: The labels that can have parameters of their own.
        scores: Scores of all windows combined, float32 [examples, labels].
        correct: Whether a label is correct, bool [examples, labels].
    """

    method: Method
    labels: tuple[str, ...]
    scores: Floats
    correct: Booleans

    def predictions(self, parameters: Parameters, labels: Sequence[str] | None = None) -> Predictions:
        """Returns predictions with calibrated scores, of some labels; by default of the best ones, or of all if they are independent."""
        scores: Values = apply_calibration(self.scores, LINKS[self.method], *parameters).astype(np.float64)
        if labels is None and self.method == "per-label":
            labels = self.labels
        if labels is None:
            columns = scores.argmax(axis=1)[:, None]
        else:
            columns = np.tile([self.labels.index(label) for label in labels], (len(scores), 1))
        chosen = np.take_along_axis(scores, columns, axis=1).ravel()
        correct = np.take_along_axis(self.correct, columns, axis=1).ravel()
        losses = log_losses(chosen, correct)
        if labels is None and self.method == "temperature":
            losses = log_losses(scores[self.correct], np.ones(len(scores), dtype=bool))
        examples = np.repeat(np.arange(len(scores)), columns.shape[1])
        return Predictions(chosen, correct, losses, examples, np.array(self.labels)[columns].ravel(), len(scores))


@dataclass(frozen=True)
class EntityLogits:
    """The logits of tokens, from which each scale makes other scores of entities: `rows` are the outputs of each example's windows."""

    served: ServedGraph
    examples: Sequence[LabeledRow]
    rows: Sequence[Sequence[Outputs]]
    method: Method = "tags"
    labels: tuple[str, ...] = ()

    def predictions(self, parameters: Parameters, labels: Sequence[str] | None = None) -> Predictions:
        """Returns the entities of all examples, or only the entities with some labels."""
        [scale] = parameters.scale
        entities, missed = list[tuple[float, bool, int, str]](), 0
        for number, (example, rows) in enumerate(zip(self.examples, self.rows, strict=True)):
            scaled = [{name: values * np.float32(scale) for name, values in row.items()} for row in rows]
            correct_spans, words = example.gold
            spans = set[Span]()
            for entity in self.served.decode(example.input, scaled):
                label = entity["entity_group"]
                [span] = widen_to_words([(entity["start"], entity["end"], label)], words)
                if labels is None or label in labels:
                    entities.append((entity["score"], span in correct_spans and span not in spans, number, label))
                spans.add(span)
            missed += sum(labels is None or label in labels for *_, label in correct_spans - spans)
        columns = list(zip(*entities, strict=True)) or [()] * 4
        scores, correct, examples, names = map(np.array, columns, ("f8", "?", "i8", "U"))
        return Predictions(scores, correct, log_losses(scores, correct), examples, names, len(self.examples), missed)


Outcomes = Scores | EntityLogits


def choose_method(manifest: Manifest) -> Method:
    """Returns how the scores of a model are calibrated; refuses a model without such scores."""
    if manifest.task == token_classification.TASK:
        return "tags"
    if manifest.task == question_answering.TASK:
        return "answers"
    if manifest.task == classify.TASK and (manifest.activation == "sigmoid" or len(manifest.labels) == 1):
        return "per-label"
    if manifest.task == classify.TASK and manifest.activation == "softmax":
        return "temperature"
    raise UsageError(
        f"a model for {manifest.task} with the activation `{manifest.activation}` has no scores to calibrate; calibrate classification, "
        "named entities, question answering or a reranker."
    )


def collect(served: ServedGraph, method: Method, examples: Sequence[LabeledRow]) -> Outcomes:
    """Runs a graph on labeled rows.

    Raises:
        UsageError: A row cannot be answered, or its parameters leave out or change scores.
    """
    values, read = list[Any](), _READERS[method]
    for example in track(examples, served.graph.name, unit="example"):
        parameters = example.input.parameters
        if names := [f"`{name}`" for name, allowed in _ALLOWED_VALUES[method].items() if getattr(parameters, name) not in allowed]:
            raise UsageError(f"line {example.line} of the data has {' and '.join(names)}; remove it: all raw scores are needed.")
        try:
            values.append(read(served, example))
        except (BertServeError, ValueError) as error:
            raise UsageError(f"line {example.line} of the data cannot be answered: {error}") from error
    if method == "tags":
        return EntityLogits(served, examples, values)
    labels = ("answer", "no answer") if method == "answers" else served.config.labels
    scores, correct = (np.array(column) for column in zip(*values, strict=True))
    return Scores(method, labels, scores.astype(np.float32), correct.astype(bool))


def _read_labels(served: ServedGraph, example: LabeledRow) -> tuple[Any, Any]:
    labels, correct = served.config.labels, example.gold
    by_label = {item["label"]: item["score"] for item in served.predict(example.input).result}
    scores = np.array([by_label[label] for label in labels], dtype=np.float32)
    if len(labels) > 1:
        return scores, [label in correct for label in labels]
    if correct not in (0, 1):
        raise UsageError(f"line {example.line} of the data: `label` is {correct:g}; it must be 1 for a relevant text, otherwise 0.")
    return activate(scores, "sigmoid") if served.config.activation == "none" else scores, [correct]


def _read_answer(served: ServedGraph, example: LabeledRow) -> tuple[Any, Any]:
    input_, correct = example.input, example.gold
    changes = {"top_k": 1, "handle_impossible_answer": False}
    answer = served.predict(replace(input_, parameters=input_.parameters.model_copy(update=changes)))
    no_answer_score, best = 0.0, answer.result
    if input_.parameters.handle_impossible_answer:
        read = question_answering.cut_passage(input_, served.tokenizer)
        windows = zip(read.encodings, read.token_ranges, answer.rows, strict=True)
        no_answer_score = min(read.probabilities(encoding, len(window), row)[0] for encoding, window, row in windows)
    return (best["score"], no_answer_score), (exact_match(best["answer"], correct) == 1, not correct)


def _read_logits(served: ServedGraph, example: LabeledRow) -> Sequence[Outputs]:
    return served.predict(example.input).rows


_LABEL_VALUES: dict[str, Any] = {"decide": [False], "top_k": [None], "function_to_apply": [None]}
# the function from logits to scores; `none` for the logits of tags
LINKS: dict[Method, Link] = {"temperature": "softmax", "per-label": "sigmoid", "tags": "none", "answers": "power"}
# runs a graph on a row; returns scores and which of them are correct, or for tags the outputs
_READERS: dict[Method, Callable[[ServedGraph, LabeledRow], Sequence[Any]]] = {
    "temperature": _read_labels,
    "per-label": _read_labels,
    "tags": _read_logits,
    "answers": _read_answer,
}
# parameters that can leave out or change scores, with the values that do not
_ALLOWED_VALUES: dict[Method, Mapping[str, Sequence[Any]]] = {
    "temperature": _LABEL_VALUES,
    "per-label": _LABEL_VALUES,
    "tags": {"decide": [False], "aggregation_strategy": ["simple", "first", "average", "max"], "ignore_labels": [["O"]]},
    "answers": {"decide": [False], "duplicates": ["best"]},
}
