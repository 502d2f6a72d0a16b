"""The scores of a graph on labeled examples, which a calibration changes: one class for each way to calibrate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bertserve.export.decisions.fit import fit_bias, fit_line, fit_scale
from bertserve.export.decisions.predictions import Indices, Predictions, log_losses
from bertserve.export.decisions.thresholds import Goal
from bertserve.export.errors import DataError
from bertserve.export.progress import track
from bertserve.export.tasks.quality import exact_match, widen_to_words
from bertserve.export.validation.served_graph import Answer, ServedGraph
from bertserve.service.bundle.decision import Method
from bertserve.service.bundle.manifest import Activation
from bertserve.service.errors import CallerError
from bertserve.service.scoring.rows import Row
from bertserve.service.tasks import classify, question_answering, token_classification
from bertserve.service.tasks.decoding import Floats, activate, calibrate, calibrate_answers, logits_of

Parameters = tuple[tuple[float, ...], tuple[float, ...]]  # scale and bias
IDENTITY: Parameters = ((1.0,), (0.0,))
ENOUGH_FOR_TWO = 1000  # examples from which on a calibration has more than one parameter


class Outcomes:
    """What a graph gave for examples, next to their correct answers."""

    method: ClassVar[Method]

    def __len__(self) -> int:
        """Number of examples."""
        raise NotImplementedError

    def take(self, examples: Indices) -> Outcomes:
        """Returns the outcomes of some examples."""
        raise NotImplementedError

    @property
    def kinds(self) -> list[str]:
        """The kind of each example, such as its label; halves of the data have equal shares of each."""
        raise NotImplementedError

    def fit(self) -> Parameters:
        """Returns the parameters with the lowest log loss."""
        raise NotImplementedError

    def predictions(self, parameters: Parameters, goal: Goal | None = None) -> Predictions:
        """Returns the predictions with calibrated scores; with a goal, those that it counts.

        Raises:
            DataError: The task has no such goal.
        """
        raise NotImplementedError

    def reference(self, parameters: Parameters) -> tuple[Sequence[float], Counter[str]]:
        """Returns the scores and the number of predictions per label that a service counts."""
        predictions = self.predictions(parameters)
        return predictions.scores.tolist(), Counter(predictions.labels)


@dataclass(frozen=True)
class _Labels(Outcomes):
    """The scores of labels that exclude each other (softmax).

    Attributes:
        labels: Their names.
        scores: Scores of all windows combined, float32 [examples, labels].
        truth: Whether a label is correct, bool [examples, labels].
    """

    labels: tuple[str, ...]
    scores: Floats
    truth: NDArray[np.bool_]
    method: ClassVar[Method] = "temperature"
    activation: ClassVar[Activation] = "softmax"

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, examples: Indices) -> _Labels:
        return replace(self, scores=self.scores[examples], truth=self.truth[examples])

    @property
    def kinds(self) -> list[str]:
        return [" ".join(label for label, is_true in zip(self.labels, row, strict=True) if is_true) for row in self.truth.tolist()]

    def fit(self) -> Parameters:
        return (fit_scale(lambda scale: float(self.predictions(((scale,), (0.0,))).losses.sum())),), (0.0,)

    def predictions(self, parameters: Parameters, goal: Goal | None = None) -> Predictions:
        if goal is not None and goal.label is None and goal.aim == "recall":
            raise DataError(f"`{goal}` needs a label, such as `{self.labels[-1]}:{goal}`, or use `coverage={goal.target:g}`.")
        scores = calibrate(self.scores, self.activation, *parameters)
        if goal is not None and (goal.label is not None or goal.aim == "coverage"):
            return self.by_label(scores, goal.label)
        rows, best = np.arange(len(self)), self.scores.argmax(axis=1)
        return Predictions(
            scores=scores[rows, best].astype(np.float64),
            right=self.truth[rows, best],
            losses=log_losses(scores[self.truth].astype(np.float64), np.ones(len(self), dtype=bool)),
            examples=rows,
            labels=[self.labels[i] for i in best],
            count=len(self),
        )

    def by_label(self, scores: Floats, label: str | None) -> Predictions:
        """Returns each label of each example, or only one label, as a prediction of its own."""
        if label is not None and label not in self.labels:
            raise DataError(f"the model has no label `{label}`; it has {', '.join(self.labels)}.")
        columns = [i for i, name in enumerate(self.labels) if label in (None, name)]
        flat, right = scores[:, columns].astype(np.float64).ravel(), self.truth[:, columns].ravel()
        names = [self.labels[i] for i in columns] * len(self)
        return Predictions(flat, right, log_losses(flat, right), np.repeat(np.arange(len(self)), len(columns)), names, len(self))


class _IndependentLabels(_Labels):
    """The scores of labels of which any number is correct (sigmoid); the only label of a reranker is one, too."""

    method: ClassVar[Method] = "per-label"
    activation: ClassVar[Activation] = "sigmoid"

    def fit(self) -> Parameters:
        [scale], bias = super().fit()
        if len(self) < ENOUGH_FOR_TWO:
            return (scale,), bias
        logits = logits_of(self.scores, "sigmoid")
        lines = [fit_line(logits[:, i], self.truth[:, i], scale) for i in range(len(self.labels))]
        return tuple(line[0] for line in lines), tuple(line[1] for line in lines)

    def predictions(self, parameters: Parameters, goal: Goal | None = None) -> Predictions:
        if goal is not None and goal.aim == "coverage":
            raise DataError(f"`{goal}` needs labels that exclude each other; use precision or recall.")
        return self.by_label(calibrate(self.scores, self.activation, *parameters), goal.label if goal else None)

    def reference(self, parameters: Parameters) -> tuple[Sequence[float], Counter[str]]:
        scores = calibrate(self.scores, self.activation, *parameters)
        chosen = (scores >= 0.5).sum(axis=0)
        return scores.max(axis=1).tolist(), Counter(dict(zip(self.labels, chosen.tolist(), strict=True)))


@dataclass(frozen=True)
class _Entities(Outcomes):
    """The logits of tokens, from which each scale makes other scores of entities; `golds` has the correct spans and the tagged words."""

    served: ServedGraph
    requests: Sequence[Any]
    answers: Sequence[Answer]
    golds: Sequence[Any]
    method: ClassVar[Method] = "tags"

    def __len__(self) -> int:
        return len(self.requests)

    def take(self, examples: Indices) -> _Entities:
        chosen = [[values[i] for i in examples] for values in (self.requests, self.answers, self.golds)]
        return _Entities(self.served, *chosen)

    @property
    def kinds(self) -> list[str]:
        return ["entities" if spans else "" for spans, _ in self.golds]

    def fit(self) -> Parameters:
        return (fit_scale(lambda scale: float(self.predictions(((scale,), (0.0,))).losses.sum())),), (0.0,)

    def predictions(self, parameters: Parameters, goal: Goal | None = None) -> Predictions:
        if goal is not None and goal.aim == "coverage":
            raise DataError(f"`{goal}` is for classification; use precision or recall.")
        [scale], _ = parameters
        found, missed = list[tuple[float, bool, int, str]](), 0
        for example, (request, answer, (expected, words)) in enumerate(zip(self.requests, self.answers, self.golds, strict=True)):
            rows = [{name: values * np.float32(scale) for name, values in row.items()} for row in answer.rows]
            spans = set()
            for entity in self.served.decode(request, rows):
                span = (entity["start"], entity["end"], entity.get("entity_group", entity.get("entity")))
                [widened] = widen_to_words([span], words)
                if goal is None or goal.label in (None, span[2]):
                    found.append((entity["score"], widened in expected and widened not in spans, example, span[2]))
                    spans.add(widened)
            missed += sum(goal is None or goal.label in (None, span[2]) for span in expected - spans)
        scores, right, examples, labels = zip(*found, strict=True) if found else ((), (), (), ())
        values, is_right = np.array(scores, dtype=np.float64), np.array(right, dtype=bool)
        return Predictions(
            values, is_right, log_losses(values, is_right), np.array(examples, dtype=np.int64), list(labels), len(self), missed
        )


@dataclass(frozen=True)
class _Answers(Outcomes):
    """The scores of the best answer to each question, and of "no answer"; 0 if a request does not allow it.

    Attributes:
        scores: float32 [questions, 2].
        truth: Whether the answer and "no answer" are correct, bool [questions, 2].
    """

    scores: Floats
    truth: NDArray[np.bool_]
    method: ClassVar[Method] = "answers"

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, examples: Indices) -> _Answers:
        return _Answers(self.scores[examples], self.truth[examples])

    @property
    def kinds(self) -> list[str]:
        return ["no answer" if nothing else "" for nothing in self.truth[:, 1].tolist()]

    def _column(self, column: int, scale: float, bias: float) -> Floats:
        return calibrate_answers(self.scores[:, column], scale, bias)

    def _loss(self, column: int, scale: float, bias: float) -> float:
        return float(log_losses(self._column(column, scale, bias).astype(np.float64), self.truth[:, column]).sum())

    def fit(self) -> Parameters:
        scale = fit_scale(lambda scale: self._loss(0, scale, 0.0))
        has_both = 0 < self.truth[:, 1].sum() < len(self)
        bias = fit_bias(lambda bias: self._loss(1, scale, bias)) if has_both and len(self) >= ENOUGH_FOR_TWO else 0.0
        return (scale,), (bias,)

    def predictions(self, parameters: Parameters, goal: Goal | None = None) -> Predictions:
        if goal is not None and (goal.label is not None or goal.counts_correct_items):
            raise DataError(f"`{goal}` is not for question answering; use precision or max-error, without a label.")
        [scale], [bias] = parameters
        answers, nothing = self._column(0, scale, 0.0), self._column(1, scale, bias)
        best = (nothing > answers).astype(np.int64)
        rows = np.arange(len(self))
        scores, right = np.where(best, nothing, answers).astype(np.float64), self.truth[rows, best]
        names = ("answer", "no answer")
        return Predictions(scores, right, log_losses(scores, right), rows, [names[i] for i in best], len(self))


def collect(served: ServedGraph, rows: Sequence[Row], golds: Sequence[Any]) -> Outcomes:
    """Runs a graph on labeled rows.

    Raises:
        DataError: The task cannot answer a row, or its scores cannot be calibrated.
    """
    config, answers = served.config, list[Answer]()
    collector = {
        classify.TASK: _label_outcomes,
        token_classification.TASK: _entity_outcomes,
        question_answering.TASK: _answer_outcomes,
    }.get(config.task)
    if collector is None or (config.activation == "none" and len(config.labels) != 1):
        raise DataError(
            f"a model for {config.task} with the activation `{config.activation}` has no scores to calibrate; calibrate classification, "
            "named entities, question answering or a reranker."
        )
    for row in track(rows, served.graph.name, unit="example"):
        if config.task == question_answering.TASK:  # the best answer; `_answer_outcomes` reads the score of "no answer"
            row.request.parameters = row.request.parameters.model_copy(update={"top_k": 1})
        try:
            answers.append(served.answer(row.request))
        except CallerError as error:
            raise DataError(f"line {row.line} of the data cannot be answered: {error}") from error
    return collector(served, rows, answers, golds)


def _label_outcomes(served: ServedGraph, rows: Sequence[Row], answers: Sequence[Answer], golds: Sequence[Any]) -> _Labels:
    labels = served.config.labels
    for row in rows:
        if row.request.parameters.top_k is not None or row.request.parameters.function_to_apply is not None:
            raise DataError(f"line {row.line} of the data has `top_k` or `function_to_apply`; remove them, because all scores are needed.")
    by_label = [{item["label"]: item["score"] for item in answer.result} for answer in answers]
    scores = np.array([[scores[label] for label in labels] for scores in by_label], dtype=np.float32)
    if served.config.activation == "softmax" and len(labels) > 1:
        return _Labels(labels, scores, np.array([[label in gold for label in labels] for gold in golds]))
    if len(labels) > 1:
        return _IndependentLabels(labels, scores, np.array([[label in gold for label in labels] for gold in golds]))
    for row, gold in zip(rows, golds, strict=True):
        if gold not in (0, 1):
            raise DataError(f"line {row.line} of the data has the label {gold:g}; give 1 for a relevant text and 0 for another one.")
    scores = activate(scores, "sigmoid") if served.config.activation == "none" else scores
    return _IndependentLabels(labels, scores, np.array(golds, dtype=bool)[:, None])


def _entity_outcomes(served: ServedGraph, rows: Sequence[Row], answers: Sequence[Answer], golds: Sequence[Any]) -> _Entities:
    return _Entities(served, [row.request for row in rows], answers, golds)


def _answer_outcomes(served: ServedGraph, rows: Sequence[Row], answers: Sequence[Answer], golds: Sequence[Any]) -> _Answers:
    scores, truth = list[tuple[float, float]](), list[tuple[bool, bool]]()
    for row, answer, gold in zip(rows, answers, golds, strict=True):
        request = row.request
        nothing = (
            question_answering.no_answer_score(request, answer.rows, served.tokenizer)
            if request.parameters.handle_impossible_answer
            else 0.0
        )
        best = served.decode(
            replace(request, parameters=request.parameters.model_copy(update={"handle_impossible_answer": False})), answer.rows
        )
        scores.append((best["score"], nothing))
        truth.append((exact_match(best["answer"], gold) == 1, not gold))
    return _Answers(np.array(scores, dtype=np.float32), np.array(truth))
