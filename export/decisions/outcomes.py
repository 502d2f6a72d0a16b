"""The scores of a graph on labeled examples, which a calibration changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bertserve.export.decisions.fit import fit_bias, fit_line, fit_scale
from bertserve.export.decisions.predictions import Flags, Predictions, Values, log_losses
from bertserve.export.decisions.thresholds import Aim
from bertserve.export.errors import DataError
from bertserve.export.progress import track
from bertserve.export.tasks.quality import exact_match, widen_to_words
from bertserve.export.tasks.spec import read_input
from bertserve.export.validation.served_graph import ServedGraph
from bertserve.service.bundle.decision import Method
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import BertServeError
from bertserve.service.scoring.rows import Row
from bertserve.service.tasks import classify, question_answering, token_classification
from bertserve.service.tasks.decoding import Floats, activate, calibrate, calibrate_answers

Parameters = tuple[tuple[float, ...], tuple[float, ...]]  # scale and bias
IDENTITY: Parameters = ((1.0,), (0.0,))
MIN_OF_A_KIND = 20  # examples with a label, and others, for parameters of its own
MIN_FOR_MORE = 1000  # examples from which on a calibration has more than one parameter; with fewer, these are mostly noise
ANSWERS = ("answer", "no answer")


@dataclass(frozen=True)
class Example:
    """A labeled row, with its correct answer as read by its task."""

    row: Row
    correct: Any

    @property
    def text(self) -> str:
        """Its input as JSON; copies have the same one."""
        return json.dumps(read_input(dict(self.row.values)), sort_keys=True)

    @property
    def kind(self) -> str:
        """Its labels, or whether there is any entity or answer; halves of the data have equal shares of each kind."""
        correct = self.correct[0] if isinstance(self.correct, tuple) else self.correct  # entities come with the words that they consist of
        return repr(sorted(correct)) if isinstance(correct, frozenset) else repr(bool(correct))


class Outcomes:
    """What a graph gave for examples, next to their correct answers."""

    def fit(self) -> Parameters:
        """Returns the parameters with the lowest log loss: one scale for everything."""
        return (fit_scale(lambda scale: float(self.predictions(((scale,), (0.0,))).losses.sum())),), (0.0,)

    def predictions(self, parameters: Parameters, aim: Aim | None = None) -> Predictions:
        """Returns the predictions with calibrated scores; with an aim, those that it counts."""
        raise NotImplementedError


@dataclass(frozen=True)
class Scores(Outcomes):
    """The scores of labels, or of the best answer and of "no answer".

    Attributes:
        method: How they are calibrated.
        labels: Their names.
        scores: Scores of all windows combined, float32 [examples, labels].
        correct: Whether a label is correct, bool [examples, labels].
    """

    method: Method
    labels: tuple[str, ...]
    scores: Floats
    correct: Flags

    def calibrated(self, parameters: Parameters) -> Values:
        """Returns calibrated scores, float64 [examples, labels]."""
        scale, bias = parameters
        if self.method == "answers":
            columns = [calibrate_answers(self.scores[:, i], scale[0], offset) for i, offset in enumerate((0.0, *bias))]
            return np.stack(columns, axis=1).astype(np.float64)
        return calibrate(self.scores, "softmax" if self.method == "temperature" else "sigmoid", scale, bias).astype(np.float64)

    def fit(self) -> Parameters:
        """Returns the parameters with the lowest log loss; those of a label or "no answer" need enough examples with and without it."""
        (scale,), bias = super().fit() if self.method != "answers" else ((fit_scale(lambda scale: self._loss(0, scale, 0.0)),), (0.0,))
        if len(self.scores) < MIN_FOR_MORE or self.method == "temperature":
            return (scale,), bias
        count = self.correct.sum(axis=0)
        enough = np.minimum(count, len(self.correct) - count) >= MIN_OF_A_KIND
        if self.method == "answers":
            return (scale,), (fit_bias(lambda bias: self._loss(1, scale, bias)) if enough[1] else 0.0,)
        lines = [fit_line(partial(self._loss, i)) if enough[i] else (scale, 0.0) for i in range(len(self.labels))]
        return tuple(line[0] for line in lines), tuple(line[1] for line in lines)

    def _loss(self, column: int, scale: float, bias: float) -> float:
        """Returns the log loss of a label, or of answers."""
        scores = self.scores[:, column]
        calibrated = calibrate_answers(scores, scale, bias) if self.method == "answers" else calibrate(scores, "sigmoid", [scale], [bias])
        return float(log_losses(calibrated.astype(np.float64), self.correct[:, column]).sum())

    def predictions(self, parameters: Parameters, aim: Aim | None = None) -> Predictions:
        """Returns the best label of each example; all labels if they are independent, or if the aim is about labels."""
        scores = self.calibrated(parameters)
        if self.method == "per-label" or (aim is not None and (aim.label is not None or aim.name == "coverage")):
            columns = np.tile(np.arange(len(self.labels)), (len(scores), 1))
        else:
            columns = scores.argmax(axis=1)[:, None]
        chosen, correct = np.take_along_axis(scores, columns, axis=1).ravel(), np.take_along_axis(self.correct, columns, axis=1).ravel()
        losses = log_losses(chosen, correct)
        if self.method == "temperature" and aim is None:
            losses = log_losses(scores[self.correct], np.ones(len(scores), dtype=bool))
        examples = np.repeat(np.arange(len(scores)), columns.shape[1])
        predictions = Predictions(chosen, correct, losses, examples, np.array(self.labels)[columns].ravel(), len(scores))
        return predictions.of_label(aim.label if aim else None)


@dataclass(frozen=True)
class Entities(Outcomes):
    """The logits of tokens, from which each scale makes other scores of entities.

    Attributes:
        served: The graph.
        texts: The request of each text, the outputs of its windows, its correct spans, and the words that these consist of.
    """

    served: ServedGraph
    texts: Sequence[tuple[Any, Sequence[Outputs], set[Any], Any]]

    def predictions(self, parameters: Parameters, aim: Aim | None = None) -> Predictions:
        """Returns the entities of all texts."""
        [scale], _ = parameters
        found, missed = list[tuple[float, bool, int, str]](), list[str]()
        for example, (request, rows, expected, words) in enumerate(self.texts):
            scaled = [{name: values * np.float32(scale) for name, values in row.items()} for row in rows]
            spans = set()
            for entity in self.served.decode(request, scaled):
                label = entity.get("entity_group", entity.get("entity"))
                [span] = widen_to_words([(entity["start"], entity["end"], label)], words)
                found.append((entity["score"], span in expected and span not in spans, example, label))
                spans.add(span)
            missed += [label for *_, label in expected - spans]
        scores, correct = np.array([item[0] for item in found], dtype=np.float64), np.array([item[1] for item in found], dtype=np.bool_)
        examples, labels = np.array([item[2] for item in found], dtype=np.int64), np.array([item[3] for item in found], dtype=np.str_)
        predictions = Predictions(scores, correct, log_losses(scores, correct), examples, labels, len(self.texts), missed)
        return predictions.of_label(aim.label if aim else None)


def method_of(manifest: Manifest) -> Method:
    """Returns how the scores of a model are calibrated.

    Raises:
        DataError: It has no scores that can be calibrated.
    """
    independent = manifest.activation == "sigmoid" or len(manifest.labels) == 1
    methods: dict[str, Method] = {
        classify.TASK: "per-label" if independent else "temperature",
        token_classification.TASK: "tags",
        question_answering.TASK: "answers",
    }
    if manifest.task not in methods or (manifest.activation == "none" and len(manifest.labels) != 1):
        raise DataError(
            f"a model for {manifest.task} with the activation `{manifest.activation}` has no scores to calibrate; calibrate classification, "
            "named entities, question answering or a reranker."
        )
    return methods[manifest.task]


def check_aim(aim: Aim, manifest: Manifest) -> None:
    """Refuses an aim that a model cannot have.

    Raises:
        DataError: It cannot have it.
    """
    method = method_of(manifest)
    names = sorted({*manifest.labels, *token_classification.groups_of(manifest)}) if method == "tags" else manifest.labels
    if method == "answers" and (aim.label is not None or aim.counts_missed):
        raise DataError(f"`{aim}` is not for question answering; use precision or max-error, without a label.")
    if aim.label is not None and aim.label not in names:
        raise DataError(f"the model has no label `{aim.label}`; it has {', '.join(names)}.")
    if aim.name == "coverage" and method != "temperature":
        raise DataError(f"`{aim}` needs labels that exclude each other; use precision or recall of a label.")
    if aim.label is None and method == "temperature" and aim.name == "recall":
        raise DataError(f"`{aim}` needs a label, such as `{names[-1]}:{aim}`, or use `coverage={aim.target:g}`.")
    if aim.label is None and method == "per-label" and len(names) > 1:
        raise DataError(f"`{aim}` needs a label, such as `{names[-1]}:{aim}`, because the labels of a text are not independent examples.")


def check_aims(aims: Sequence[Aim], method: Method) -> None:
    """Refuses aims of which one breaks the promise of another: each text has one decision.

    Raises:
        DataError: There are several aims, unless each has its own label and labels do not exclude each other.
    """
    labels = {aim.label for aim in aims}
    if len(aims) > 1 and (method == "temperature" or None in labels or len(labels) < len(aims)):
        raise DataError(
            f"{' and '.join(f'`{aim}`' for aim in aims)} cannot hold together, because one of them would decide texts of the other; give one "
            "aim, or one for each label if labels do not exclude each other."
        )


def collect(served: ServedGraph, method: Method, examples: Sequence[Example]) -> Outcomes:
    """Runs a graph on labeled rows.

    Raises:
        DataError: A row cannot be answered, or its parameters leave out or change scores.
    """
    values = list[Any]()
    read = {"tags": _read_entities, "answers": _read_answer}.get(method, _read_labels)
    for example in track(examples, served.graph.name, unit="example"):
        parameters = example.row.request.parameters
        excluded = {"tags": ["decide"], "answers": ["decide", "duplicates"]}.get(method, ["decide", "top_k", "function_to_apply"])
        if names := [f"`{name}`" for name in excluded if getattr(parameters, name) not in (None, False, "best")]:
            raise DataError(
                f"line {example.row.line} of the data has {' and '.join(names)}; remove it, because all scores are needed, unchanged."
            )
        try:
            values.append(read(served, example))
        except (BertServeError, ValueError) as error:
            raise DataError(f"line {example.row.line} of the data cannot be answered: {error}") from error
    if method == "tags":
        return Entities(served, values)
    scores, correct = (np.array(column) for column in zip(*values, strict=True))
    return Scores(method, ANSWERS if method == "answers" else served.config.labels, scores.astype(np.float32), correct.astype(bool))


def _read_labels(served: ServedGraph, example: Example) -> tuple[Any, Any]:
    labels, correct = served.config.labels, example.correct
    by_label = {item["label"]: item["score"] for item in served.answer(example.row.request).result}
    scores = np.array([by_label[label] for label in labels], dtype=np.float32)
    if len(labels) > 1:
        return scores, [label in correct for label in labels]
    if correct not in (0, 1):
        raise ValueError(f"its label is {correct:g}; give 1 for a relevant text and 0 for another one.")
    return activate(scores, "sigmoid") if served.config.activation == "none" else scores, [correct]


def _read_entities(served: ServedGraph, example: Example) -> tuple[Any, ...]:
    return (example.row.request, served.answer(example.row.request).rows, *example.correct)


def _read_answer(served: ServedGraph, example: Example) -> tuple[Any, Any]:
    request, correct = example.row.request, example.correct
    changes = {"top_k": 1, "handle_impossible_answer": False}
    answer = served.answer(replace(request, parameters=request.parameters.model_copy(update=changes)))
    allowed = request.parameters.handle_impossible_answer
    nothing = question_answering.no_answer_score(request, answer.rows, served.tokenizer) if allowed else 0.0
    best = answer.result
    return (best["score"], nothing), (exact_match(best["answer"], correct) == 1, not correct)
