"""Calibrated scores, and a decision about each input: its label, its labels, or none. Tasks call it; it does nothing by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from bertserve.service.bundle.decision import Decision
from bertserve.service.bundle.manifest import Activation
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.batch import ScoreCounts, TaskModel
from bertserve.service.tasks.body import NUMBER, PAIR, ClosedModel, one_of
from bertserve.service.tasks.decoding import Floats, calibrate, calibrate_answers
from bertserve.service.tasks.unknown_fields import check_names

CHOSEN = 0.5  # least score of an independent label that counts without a threshold
DECISION_BYTES = 256  # of a decision in an answer, without its texts
_Score = Annotated[float, Field(allow_inf_nan=False)]


class ThresholdParameters(ClosedModel):
    """Parameters that ask for a decision."""

    decide: Annotated[bool, Field(description="Answer with a decision, by the thresholds of the bundle or the following ones.")] = False
    threshold: Annotated[
        Annotated[
            Annotated[_Score, Tag(NUMBER)] | Annotated[dict[str, _Score], Field(max_length=1000), Tag(PAIR)],
            one_of("a number or an object from labels to numbers", NUMBER, PAIR),
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


class DecideParameters(ThresholdParameters):
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


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of a request.

    Attributes:
        by_label: Label -> its threshold; None -> that of all other labels.
        min_confidence: The best score that a decision needs.
        gives_sets: Whether a decision is the set of all labels from the threshold on, although only one is correct.
    """

    by_label: Mapping[str | None, float]
    min_confidence: float | None = None
    gives_sets: bool = False

    def reached(self, label: str | None, score: float, otherwise: float) -> bool:
        """Returns whether a score reaches its threshold, which is `otherwise` if there is none."""
        return score >= self.by_label.get(label, self.by_label.get(None, otherwise))


@dataclass(frozen=True, slots=True)
class Plan:
    """How to calibrate, count and decide the scores of an input.

    Attributes:
        calibration: None for raw scores.
        thresholds: None if no decision is requested.
        counts: Counts predictions and abstentions, if the service does.
    """

    calibration: Decision | None
    thresholds: Thresholds | None
    counts: ScoreCounts | None

    def calibrated(self, scores: Floats, activation: Activation) -> Floats:
        """Returns the scores of labels, float32 of the same shape, calibrated unless raw ones are requested."""
        return scores if self.calibration is None else calibrate(scores, activation, self.calibration.scale, self.calibration.bias)

    def calibrated_logits(self, logits: Floats) -> Floats:
        """Returns logits whose softmax is calibrated, float32 of the same shape."""
        return logits if self.calibration is None else logits * np.float32(self.calibration.scale[0])

    def calibrated_odds(self, odds: Floats, label: int) -> Floats:
        """Returns the calibrated log odds of a label, float32 of the same shape."""
        if self.calibration is None:
            return odds
        scale, bias = (values[label] if len(values) > 1 else values[0] for values in (self.calibration.scale, self.calibration.bias))
        return odds * np.float32(scale) + np.float32(bias)

    def answer_score(self, score: float, *, is_answer: bool) -> float:
        """Returns the calibrated score of an answer, or of "no answer"."""
        if self.calibration is None:
            return score
        return float(
            calibrate_answers(np.array(score, np.float32), self.calibration.scale[0], 0.0 if is_answer else self.calibration.bias[0])
        )

    def is_reached(self, label: str | None, score: float) -> bool:
        """Returns whether a score reaches the threshold of its label, if there is one."""
        return self.thresholds is None or self.thresholds.reached(label, score, float("-inf"))

    @property
    def reorders(self) -> bool:
        """Whether labels have parameters of their own. With common ones the order stays, even if rounding makes scores equal."""
        return self.calibration is not None and len(self.calibration.scale) > 1

    def count(self, labels: Sequence[str], score: float) -> None:
        """Counts a prediction, given its labels and best score. Raw scores do not count, because the reference has calibrated ones."""
        if self.counts is not None and self.calibration is not None:
            self.counts.predicted(labels, score)

    def label(self, scored: Sequence[tuple[str, float]], answer: Any) -> Any:
        """Returns the answer about labels that exclude each other, given all of them, the best first.

        A label with its own threshold is chosen from this score on, even if another label has a better one.
        """
        best, score = scored[0]
        self.count([best], score)
        thresholds = self.thresholds
        if thresholds is None:
            return answer
        if thresholds.gives_sets:
            labels = [label for label, value in scored if thresholds.reached(None, value, CHOSEN)]  # another threshold is not about sets
            return self.answer(labels or None, answer, score)
        own = [label for label, value in scored if label in thresholds.by_label and thresholds.reached(label, value, 0)]
        return self.answer(own[0] if own else best if self.is_reached(best, score) else None, answer, score)

    def labels(self, scored: Sequence[tuple[str, float]], answer: Any) -> Any:
        """Returns the answer about labels of which any number is correct, given all of them, the best first."""
        score = scored[0][1]
        self.count([label for label, value in scored if value >= CHOSEN], score)
        if self.thresholds is None:
            return answer
        return self.answer([label for label, value in scored if self.thresholds.reached(label, value, CHOSEN)], answer, score)

    def answer(self, decision: Any, answer: Any, best: float | None, **more: Any) -> dict[str, Any]:
        """Returns a decision as JSON, and counts an abstention.

        Args:
            decision: The label, labels, answer or indices; None if a threshold is not reached.
            answer: The answer without a decision.
            best: The best score; None if there is no score.
            more: Further fields.
        """
        least, reason = None if self.thresholds is None else self.thresholds.min_confidence, None
        if best is not None and least is not None and best < least:
            decision, reason = None, f"the best score {best:.4g} is below `min_confidence` {least:g}"
        elif decision is None:
            reason = "no score reaches its threshold"
        if decision is None and self.counts is not None:
            self.counts.abstained()
        return {"decision": decision, "abstained": decision is None, "reason": reason, "scores": answer, **more}


def plan(parameters: DecideParameters, model: TaskModel, labels: Sequence[str] = (), *, own_scores: bool = True) -> Plan | None:
    """Returns how to calibrate and decide, or None for raw scores without a decision.

    Args:
        parameters: Those of the request.
        model: The model with its calibration.
        labels: Names that `threshold` may have.
        own_scores: Whether the scores are those that were calibrated; otherwise the request asks for others, such as logits.

    Raises:
        InvalidValueError: The model has no calibration for these scores or no thresholds, or `threshold` has an unknown label.
    """
    calibration = model.decision
    if calibration is None and not parameters.decide and not parameters.calibrated:
        return None
    if parameters.calibrated and calibration is None:
        raise InvalidValueError(
            "this model has no calibrated scores; remove `calibrated`, or the operator can calibrate the bundle with `bert-export calibrate`."
        )
    if parameters.calibrated and not own_scores:
        raise InvalidValueError(
            "`calibrated` is not possible for these scores; remove it, or `function_to_apply`, `raw_scores` or `duplicates`."
        )
    if not own_scores or parameters.calibrated is False:
        calibration = None
    return Plan(calibration, thresholds_of(parameters, calibration, labels) if parameters.decide else None, model.counts)


def thresholds_of(
    parameters: ThresholdParameters, calibration: Decision | None, labels: Sequence[str], *, can_be_calibrated: bool = True
) -> Thresholds:
    """Returns the thresholds of a request that asks for a decision: its `threshold`, or those of the calibration.

    Raises:
        InvalidValueError: There are none, or one has an unknown label.
    """
    own, calibrated = parameters.threshold, () if calibration is None else calibration.thresholds
    if isinstance(own, dict):
        check_names(own, labels, "`parameters.threshold`")
        return Thresholds(dict[str | None, float](own.items()), parameters.min_confidence)
    if own is not None:
        return Thresholds({None: own}, parameters.min_confidence)
    if not calibrated and parameters.min_confidence is None:
        raise InvalidValueError(
            "`decide` needs thresholds, and {model}; give `threshold` or `min_confidence`{remedy}.",
            model="this model has none for these scores" if can_be_calibrated else "this task has none of its own",
            remedy=", or the operator can calibrate the bundle with `bert-export calibrate --aim`" if can_be_calibrated else "",
        )
    by_label = {item.label: item for item in calibrated}
    return Thresholds(
        {label: item.threshold for label, item in by_label.items()},
        parameters.min_confidence,
        gives_sets=None in by_label and by_label[None].aim == "coverage",
    )
