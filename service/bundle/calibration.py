"""The calibration and thresholds of a graph: `bert-export calibrate` measures them, and the service applies them."""

from typing import Annotated, Literal

from pydantic import Field

from bertserve.service.bundle.record import Record

Method = Literal["temperature", "per-label", "tags", "answers"]
AimName = Literal["precision", "recall", "max-error", "coverage"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class Interval(Record):
    """A measured value with its 95 % interval from a bootstrap over the examples."""

    value: Finite
    low: Finite
    high: Finite


class Bin(Record):
    """Predictions with similar scores: their mean score, the share of them that is correct, and their number."""

    score: Share
    correct: Share
    count: Count


class Quality(Record):
    """Measures of the match of scores and outcomes. `auroc` is null if all predictions are correct or all are wrong."""

    log_loss: Interval
    brier: Interval
    ece: Interval
    auroc: Interval | None
    bins: Annotated[tuple[Bin, ...], Field(strict=False)]


class Threshold(Record):
    """A threshold of calibrated scores that reaches an aim with 95 % confidence; a prediction counts if its score is at least `threshold`.

    The true share of errors is at most `target` for `max-error`, otherwise 1 - `target`; `error` is the measured one.

    With a `label`, the score is the label's, even if another label's is better. Without one, it is the score of each
    prediction (the best label, an entity, an answer); for `coverage`, the label set contains all labels with at least `threshold`.
    """

    label: str | None
    aim: AimName
    target: Share
    threshold: Share
    decided: Share
    error: Share
    examples: Count


class Calibration(Record):
    """The calibration of a graph, and the thresholds that decide for requests with `decide`.

    Calibrated logits are `scale * logits + bias`, with one value, or for `per-label` and `answers` one per label. The logits belong to
    the combined scores of all windows: the logarithm of a softmax score, the log odds of a sigmoid score. docs/reference/manifest.md
    describes each method.
    """

    method: Method
    scale: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(strict=False, min_length=1)]
    bias: Annotated[tuple[Finite, ...], Field(strict=False, min_length=1)]
    fitted: Count
    tested: Count
    data_sha256: str
    before: Quality
    after: Quality
    thresholds: Annotated[tuple[Threshold, ...], Field(strict=False)] = ()
    score_counts: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
    label_counts: dict[str, Count]
