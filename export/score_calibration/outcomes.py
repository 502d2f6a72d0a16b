"""The scores of a graph on labeled examples, next to their correct answers; and the calibration that fits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize, stats

from bertserve.export.errors import UsageError
from bertserve.export.flags import Aim
from bertserve.export.progress import track
from bertserve.export.score_calibration.predictions import Booleans, Predictions, Values, log_losses
from bertserve.export.tasks.evaluation import exact_match, widen_to_words
from bertserve.export.validation.labeled_data import LabeledRow
from bertserve.export.validation.served_graph import ServedGraph
from bertserve.service.bundle.calibration import Method
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import BertServeError
from bertserve.service.tasks import classify, question_answering, token_classification
from bertserve.service.tasks.decoding import Floats, Link, activate, apply_calibration

Parameters = tuple[tuple[float, ...], tuple[float, ...]]  # scale and bias
IDENTITY: Parameters = ((1.0,), (0.0,))
LINKS: dict[Method, Link] = {"temperature": "softmax", "per-label": "sigmoid", "answers": "power"}
_OF_LABELS: dict[str, list[Any]] = {"decide": [False], "top_k": [None], "function_to_apply": [None]}
# parameters that may leave out or change scores, with the values that do not
ALLOWED_VALUES: dict[Method, dict[str, list[Any]]] = {
    "temperature": _OF_LABELS,
    "per-label": _OF_LABELS,
    "tags": {"decide": [False], "aggregation_strategy": ["simple", "first", "average", "max"], "ignore_labels": [["O"]]},
    "answers": {"decide": [False], "duplicates": ["best"]},
}
MAX_LOG_SCALE = 3.0  # scales are from 1/20 to 20
MAX_BIAS = 10.0  # a bias of 10 is a factor of 20,000
MIN_OF_A_KIND = 20  # minimum examples with a label, and without it, for parameters of its own
MIN_FOR_MORE = 1000  # minimum examples for more than one parameter; with fewer, parameters are mostly noise


@dataclass(frozen=True)
class Scores:
    """The scores of labels, or of the best answer and of "no answer", next to their correct answers.

    Attributes:
        method: How the scores are calibrated.
        labels: Those that can have parameters of their own.
        scores: Scores of all windows combined, float32 [examples, labels].
        correct: Whether a label is correct, bool [examples, labels].
    """

    method: Method
    labels: tuple[str, ...]
    scores: Floats
    correct: Booleans

    def predictions(self, parameters: Parameters, labels: Sequence[str] | None = None) -> Predictions:
        """Returns predictions with calibrated scores: those of some labels; by default the best ones, or all if they are independent."""
        scores: Values = apply_calibration(self.scores, LINKS[self.method], *parameters).astype(np.float64)
        if labels is None and self.method == "per-label":
            labels = self.labels
        if labels is None:
            columns = scores.argmax(axis=1)[:, None]
        else:
            columns = np.tile([self.labels.index(label) for label in labels], (len(scores), 1))
        chosen, correct = np.take_along_axis(scores, columns, axis=1).ravel(), np.take_along_axis(self.correct, columns, axis=1).ravel()
        losses = log_losses(chosen, correct)
        if labels is None and self.method == "temperature":
            losses = log_losses(scores[self.correct], np.ones(len(scores), dtype=bool))
        examples = np.repeat(np.arange(len(scores)), columns.shape[1])
        return Predictions(chosen, correct, losses, examples, np.array(self.labels)[columns].ravel(), len(scores))


@dataclass(frozen=True)
class EntityLogits:
    """The logits of tokens, from which each scale makes other scores of entities.

    Attributes:
        served: The graph.
        texts: The input of each text, the outputs of its windows, its correct spans, and the words that these consist of.
    """

    served: ServedGraph
    texts: Sequence[tuple[Any, Sequence[Outputs], set[Any], Any]]
    method: Method = "tags"
    labels: tuple[str, ...] = ()

    def predictions(self, parameters: Parameters, labels: Sequence[str] | None = None) -> Predictions:
        """Returns the entities of all texts, or those with some labels."""
        [scale], _ = parameters
        entities, missed = list[tuple[float, bool, int, str]](), 0
        for example, (input_, rows, expected, words) in enumerate(self.texts):
            scaled = [{name: values * np.float32(scale) for name, values in row.items()} for row in rows]
            spans = set()
            for entity in self.served.decode(input_, scaled):
                label = entity["entity_group"]
                [span] = widen_to_words([(entity["start"], entity["end"], label)], words)
                if labels is None or label in labels:
                    entities.append((entity["score"], span in expected and span not in spans, example, label))
                spans.add(span)
            missed += sum(labels is None or label in labels for *_, label in expected - spans)
        columns = list(zip(*entities, strict=True)) or [()] * 4
        scores, correct, examples, names = map(np.array, columns, ("f8", "?", "i8", "U"))
        return Predictions(scores, correct, log_losses(scores, correct), examples, names, len(self.texts), missed)


Outcomes = Scores | EntityLogits


def fit(outcomes: Outcomes) -> Parameters:
    """Returns the parameters with the lowest log loss: one scale for everything, or a scale and a bias per label with enough examples."""
    common = _fit(outcomes, None, MAX_LOG_SCALE)
    if not isinstance(outcomes, Scores) or outcomes.method == "temperature" or len(outcomes.scores) < MIN_FOR_MORE:
        return (common[0],), (0.0,)
    lines = []  # logistic regressions (Platt, 1999)
    for label, correct in zip(outcomes.labels, outcomes.correct.sum(axis=0).tolist(), strict=True):
        enough = MIN_OF_A_KIND <= correct <= len(outcomes.correct) - MIN_OF_A_KIND
        lines.append(_fit(outcomes, [label], MAX_LOG_SCALE, MAX_BIAS) if enough else common)
    scale, bias = zip(*lines, strict=True)
    return scale, bias


def _fit(outcomes: Outcomes, labels: Sequence[str] | None, *limits: float) -> tuple[float, float]:
    """Returns the scale and bias with the lowest log loss.

    `limits` bounds the logarithm of the scale and, if there are two, the bias; with one limit the bias is 0. Returns (1, 0) if a likelihood
    ratio test at 95 % finds no gain.
    """

    def loss(values: Values) -> float:
        scale, bias = math.exp(values[0]), [*values, 0.0][1]
        return float(outcomes.predictions(((scale,), (bias,)), labels).losses.sum())

    zeros = np.zeros(len(limits))
    best = optimize.minimize(loss, zeros, method="Powell", bounds=[(-limit, limit) for limit in limits])
    is_noise = loss(zeros) - best.fun < stats.chi2.isf(0.05, len(limits)) / 2
    log_scale, bias, *_ = (0.0, 0.0) if is_noise else (*best.x.tolist(), 0.0)
    return math.exp(log_scale), bias


def method_of(manifest: Manifest) -> Method:
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


def check_aims(aims: Sequence[Aim], method: Method, manifest: Manifest) -> None:
    """Refuses aims that the model does not support, and aims that cannot hold together, because a text has one decision."""
    names = sorted({*manifest.labels, *token_classification.groups_of(manifest)}) if method == "tags" else manifest.labels
    for aim in aims:
        if method == "answers" and (aim.label is not None or aim.counts_missed):
            raise UsageError(f"`{aim}` is not for question answering; use precision or max-error, without a label.")
        if aim.label is not None and aim.label not in names:
            raise UsageError(f"the model has no label `{aim.label}`; it has {', '.join(names)}.")
        if aim.name == "coverage" and method != "temperature":
            raise UsageError(f"`{aim}` needs labels that exclude each other; use precision or recall of a label.")
        # the labels of a text are not independent examples
        if aim.label is None and (aim.name == "recall" if method == "temperature" else method == "per-label" and len(names) > 1):
            raise UsageError(f"`{aim}` needs a label, such as `{names[-1]}:{aim}`.")
    labels = {aim.label for aim in aims}
    if len(aims) > 1 and (method == "temperature" or None in labels or len(labels) < len(aims)):
        raise UsageError(
            f"{' and '.join(f'`{aim}`' for aim in aims)} cannot hold together, because one of them would decide texts of the other; give "
            "one aim, or one for each label if labels do not exclude each other."
        )


def collect(served: ServedGraph, method: Method, examples: Sequence[LabeledRow]) -> Outcomes:
    """Runs a graph on labeled rows.

    Raises:
        UsageError: A row cannot be answered, or its parameters leave out or change scores.
    """
    values = list[Any]()
    for example in track(examples, served.graph.name, unit="example"):
        parameters = example.row.input.parameters
        if names := [f"`{name}`" for name, allowed in ALLOWED_VALUES[method].items() if getattr(parameters, name) not in allowed]:
            raise UsageError(
                f"line {example.row.line} of the data has {' and '.join(names)}; remove it, because all scores are needed, unchanged."
            )
        try:
            if method == "tags":
                values.append((example.row.input, served.predict(example.row.input).rows, *example.gold))
            else:
                values.append(_read_answer(served, example) if method == "answers" else _read_labels(served, example))
        except (BertServeError, ValueError) as error:
            raise UsageError(f"line {example.row.line} of the data cannot be answered: {error}") from error
    if method == "tags":
        return EntityLogits(served, values)
    labels = ("answer", "no answer") if method == "answers" else served.config.labels
    scores, correct = (np.array(column) for column in zip(*values, strict=True))
    return Scores(method, labels, scores.astype(np.float32), correct.astype(bool))


def _read_labels(served: ServedGraph, example: LabeledRow) -> tuple[Any, Any]:
    labels, correct = served.config.labels, example.gold
    by_label = {item["label"]: item["score"] for item in served.predict(example.row.input).result}
    scores = np.array([by_label[label] for label in labels], dtype=np.float32)
    if len(labels) > 1:
        return scores, [label in correct for label in labels]
    if correct not in (0, 1):
        raise UsageError(f"line {example.row.line} of the data: `label` is {correct:g}; it must be 1 for a relevant text, otherwise 0.")
    return activate(scores, "sigmoid") if served.config.activation == "none" else scores, [correct]


def _read_answer(served: ServedGraph, example: LabeledRow) -> tuple[Any, Any]:
    input_, correct = example.row.input, example.gold
    changes = {"top_k": 1, "handle_impossible_answer": False}
    answer = served.predict(replace(input_, parameters=input_.parameters.model_copy(update=changes)))
    no_answer_score, best = 0.0, answer.result
    if input_.parameters.handle_impossible_answer:
        read = question_answering.windows_of(input_, served.tokenizer)
        windows = zip(read.encodings, read.token_ranges, answer.rows, strict=True)
        no_answer_score = min(read.probabilities(encoding, len(window), row)[0] for encoding, window, row in windows)
    return (best["score"], no_answer_score), (exact_match(best["answer"], correct) == 1, not correct)
