"""Decisions about inputs: a label, labels or none, by the thresholds of their scores; and the calibration of these scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from bertserve.service.body.reading import check_names
from bertserve.service.body.task_body import ClosedModel, one_of
from bertserve.service.bundle.calibration import Calibration
from bertserve.service.errors import CallerValue, InvalidParameterError
from bertserve.service.tasks.cost import text_bytes
from bertserve.service.tasks.decoding import Floats, Link, apply_calibration, best_first
from bertserve.service.tasks.step import ScoredLabels, TaskModel, TaskResult

DEFAULT_THRESHOLD = 0.5  # threshold of an independent label if neither the request nor the bundle sets one
_DECISION_BYTES = 256  # bytes of a decision in an answer, without its texts
_Score = Annotated[float, Field(allow_inf_nan=False)]


class DecisionParameters(ClosedModel):
    """Parameters that ask for a decision."""

    decide: Annotated[bool, Field(description="Answer with a decision, by the thresholds of the bundle or the following ones.")] = False
    threshold: Annotated[
        Annotated[
            _Score | Annotated[dict[str, _Score], Field(min_length=1, max_length=1000)],
            one_of("a number or an object from labels to numbers"),
        ]
        | None,
        Field(description="With `decide`, the least score that counts: a number, or one per label."),
    ] = None
    min_confidence: Annotated[_Score | None, Field(description="With `decide`, abstain if the best score is lower.")] = None

    @model_validator(mode="after")
    def _thresholds_need_decide(self) -> Self:
        if not self.decide and (self.threshold is not None or self.min_confidence is not None):
            raise PydanticCustomError("decide", "must have `decide` set to true if it has `threshold` or `min_confidence`")
        return self


class CalibratedDecisionParameters(DecisionParameters):
    """Parameters of tasks whose scores can be calibrated."""

    calibrated: Annotated[bool | None, Field(description="Calibrated scores, by default if the bundle has them, or raw ones.")] = None


class Decided(BaseModel):
    """The decision about an input."""

    decision: Annotated[
        str | list[str] | list[int] | None,
        Field(examples=["positive"], description="The label or answer; a list of labels or indices if any number is correct."),
    ]
    abstained: Annotated[bool, Field(examples=[False], description="Whether there is no decision.")]
    reason: Annotated[str | None, Field(examples=[None], description="Why there is no decision.")]
    scores: Annotated[list[dict[str, Any]], Field(description="The answer without `decide`.")]
    left_out: Annotated[int | None, Field(description="Number of entities below their threshold, for `/ner`.")] = None


@dataclass(slots=True)
class DecisionRule:
    """The rule that calibrates the scores of an input and decides by them.

    Attributes:
        calibration: None for raw scores.
        decision_requested: Whether the request asks for a decision.
        thresholds: Label -> the least score that counts.
        default_threshold: The least score of all other labels; None if the task's own default applies.
        min_confidence: The best score that a decision needs.
        for_label_sets: Whether a decision is a label set: all labels that reach the threshold, although the labels exclude each other.
        decision_bytes: Maximum bytes of a decision in an answer; 0 without one.
    """

    calibration: Calibration | None = None
    decision_requested: bool = False
    thresholds: Mapping[str, float] = field(default_factory=dict)
    default_threshold: float | None = None
    min_confidence: float | None = None
    for_label_sets: bool = False
    decision_bytes: int = 0

    def calibrated(self, scores: Floats, link: Link, label: int | None = None) -> Floats:
        """Returns scores, float32 of the same shape, calibrated unless raw ones are requested.

        The last axis contains all labels, or all scores belong to the label with an index.
        """
        if self.calibration is None:
            return scores
        scale, bias = self.calibration.scale, self.calibration.bias
        if label is not None:
            scale, bias = (values if len(values) == 1 else (values[label],) for values in (scale, bias))
        return apply_calibration(scores, link, scale, bias)

    def ranked(self, scores: Floats, link: Link) -> tuple[Floats, list[int]]:
        """Returns the calibrated scores of all labels, and their ids, the best first; equal scores keep the order of the labels."""
        if self.calibration is None:
            return scores, best_first(scores)
        calibrated = self.calibrated(scores, link)
        # common parameters keep the order of the raw scores, even if rounding makes calibrated ones equal
        return calibrated, best_first(scores if len(self.calibration.scale) == 1 else calibrated)

    def least_score(self, label: str, default: float = float("-inf")) -> float:
        """Returns the least score of a label that counts, which is `default` if neither the request nor the bundle sets a threshold."""
        return self.thresholds.get(label, default if self.default_threshold is None else self.default_threshold)

    def answer_or_labels(self, scored: Sequence[Mapping[str, Any]], answer: Any, *, exclusive: bool) -> TaskResult:
        """Returns the answer of a task that scores labels, or the decision by all labels with their scores, the best first.

        If the labels exclude each other, the decision is a label, or a label set. A label with its own threshold is chosen
        if its score reaches it, even if another label has a better score. Otherwise any number of labels is chosen.
        """
        if self.calibration is None and not self.decision_requested:
            return TaskResult(answer)
        label, score = scored[0]["label"], scored[0]["score"]
        predicted = [label] if exclusive else [item["label"] for item in scored if item["score"] >= DEFAULT_THRESHOLD]
        decision: Any
        if not exclusive:
            decision = [item["label"] for item in scored if item["score"] >= self.least_score(item["label"], DEFAULT_THRESHOLD)]
        elif self.for_label_sets:
            decision = [item["label"] for item in scored if item["score"] >= self.least_score(label)] or None
        else:
            reached_labels = (item["label"] for item in scored if item["score"] >= self.thresholds.get(item["label"], float("inf")))
            decision = next(reached_labels, label if score >= self.least_score(label) else None)
        return self.answer_or_decision(decision, answer, score, [(predicted, score)], label)

    def answer_or_decision(
        self, decision: Any, answer: Any, best: float | None, scored_labels: Sequence[ScoredLabels], label: str = "", **more: Any
    ) -> TaskResult:
        """Returns the answer, or the decision as JSON if the request asks for one; it abstains below `min_confidence`.

        Args:
            decision: The label, labels, answer or indices; None if the threshold of the best score is not reached.
            answer: The answer without a decision.
            best: The best score; None if there is no score.
            scored_labels: The predictions to count. Raw scores do not count, because the reference is calibrated.
            label: The label of the best score, if `decision` can be None.
            **more: Further fields of the decision.
        """
        if self.calibration is None:
            scored_labels = ()
        if not self.decision_requested:
            return TaskResult(answer, scored_labels)
        reason = None
        if best is not None and self.min_confidence is not None and best < self.min_confidence:
            decision, reason = None, _reason(best, "`min_confidence`", self.min_confidence)
        elif best is not None and decision is None:
            reason = _reason(best, "its threshold", self.least_score(label))
        abstained = decision is None
        value = {"decision": decision, "abstained": abstained, "reason": reason, "scores": answer, **more}
        return TaskResult(value, scored_labels, abstained)


def _reason(best: float, name: str, least: float) -> str:
    """Returns why there is no decision, with as many digits as distinguish both numbers, at least 6."""
    digits = next(count for count in range(6, 18) if f"{best:.{count}g}" != f"{least:.{count}g}")
    return f"the best score {best:.{digits}g} is below {name} {least:.{digits}g}"


def _check_range(name: str, *values: float | None) -> None:
    for value in values:
        if value is not None and not 0 <= value <= 1:
            raise InvalidParameterError(
                "`{name}` is {value}, but these scores are from 0 to 1; give a number from 0 to 1.", name=name, value=CallerValue(value)
            )


def decision_rule(
    parameters: DecisionParameters, model: TaskModel, labels: Sequence[str] = (), *, can_calibrate: bool = True, probabilities: bool = True
) -> DecisionRule:
    """Returns the rule for the inputs of a request; by default it calibrates the scores if the model has a calibration.

    `labels` are the names that `threshold` and the decision can contain. A calibration applies neither to logits nor to zero-shot
    classification. If the scores are not `probabilities`, which are from 0 to 1, a threshold can be any number.

    Raises:
        InvalidParameterError: The model has no calibration for these scores or no thresholds, `threshold` has an unknown label, or a number
            is outside the range of the scores.
    """
    requested = getattr(parameters, "calibrated", None)
    if requested and model.calibration is None:
        raise InvalidParameterError(
            "this model has no calibrated scores; remove `calibrated`, or the operator can calibrate it with `bert-export calibrate`."
        )
    if requested and not can_calibrate:
        raise InvalidParameterError(
            "`calibrated` is not possible for these scores; remove it, or `function_to_apply`, `raw_scores` or `duplicates`."
        )
    calibration = model.calibration if can_calibrate and requested is not False else None
    if not parameters.decide:
        return DecisionRule(calibration)
    requested_thresholds, minimum = parameters.threshold, parameters.min_confidence
    stored = calibration.thresholds if calibration is not None and requested_thresholds is None else ()
    for_label_sets = any(item.aim == "coverage" for item in stored)
    # label sets share one threshold
    thresholds = {item.label: item.threshold for item in stored if item.label is not None and not for_label_sets}
    default_threshold = next((item.threshold for item in stored if item.label is None), None)
    if isinstance(requested_thresholds, dict):
        check_names(requested_thresholds, labels, "`threshold`", InvalidParameterError)
        thresholds = requested_thresholds
    elif requested_thresholds is not None:
        default_threshold = requested_thresholds
    if probabilities:
        _check_range("threshold", *thresholds.values(), default_threshold)
        _check_range("min_confidence", minimum)
    if not thresholds and default_threshold is None and minimum is None:
        raise InvalidParameterError(
            "`decide` needs thresholds, and this model has none for these scores; give `threshold` or `min_confidence`{remedy}.",
            remedy=", or the operator can calibrate the bundle with `bert-export calibrate --aim`" if can_calibrate else "",
        )
    return DecisionRule(
        calibration,
        decision_requested=True,
        thresholds=thresholds,
        default_threshold=default_threshold,
        min_confidence=minimum,
        for_label_sets=for_label_sets,
        decision_bytes=_DECISION_BYTES + sum(map(text_bytes, labels)),
    )
