"""Measures how closely results agree with a reference's, by the measure of the model's head. Pure.

`bertserve.service.bundle.agreement` says which head has which measure. A measure without anything to decide has no value, rather than full agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bertserve.export.evidence.decisions import (
    chosen_labels,
    cosine_distance,
    decision,
    equal_but_for_scores,
    regression_value,
    result_spans,
)
from bertserve.export.evidence.metrics import f1, spearman
from bertserve.service.bundle.agreement import measure_of
from bertserve.service.bundle.graph_spec import Agreement, Measure
from bertserve.service.tasks.batch import ModelConfig

_Pairs = Sequence[tuple[Any, Any]]


class AgreementMeter:
    """Compares results one by one, and keeps only what the measure needs."""

    def __init__(self, task: str, config: ModelConfig) -> None:
        """Chooses the measure.

        Args:
            task: Hugging Face name of the task.
            config: The model's labels and activation.
        """
        self._task = task
        self._config = config
        self._measure: Measure = measure_of(task, config.labels, config.activation)
        self._pairs: list[tuple[Any, Any]] = []

    def add(self, expected: Any, actual: Any) -> None:
        """Counts the results of one input in.

        Args:
            expected: The reference's result, as the task's decoder returned it.
            actual: The graph's.
        """
        if self._measure == "cosine":  # a vector for each token of a text is too much to keep
            self._pairs.append((1.0, 1.0 - cosine_distance(expected, actual)))
        else:
            self._pairs.append((self._reduced(expected), self._reduced(actual)))

    @property
    def agreement(self) -> Agreement:
        """The agreement over all inputs so far."""
        return _VALUES[self._measure](self._measure, self._pairs)

    def _reduced(self, result: Any) -> Any:
        if self._measure == "spearman":
            # float32 agrees with PyTorch in about five digits; the ranks of scores that differ by less, as near 1, are rounding
            return float(f"{regression_value(result):.5g}")
        if self._measure == "span_f1":
            return result_spans(result)
        if self._measure == "set_f1":
            return chosen_labels(result, self._config)
        return decision(self._task, result, self._config)


def _equal_share(measure: Measure, pairs: _Pairs) -> Agreement:
    equal = sum(equal_but_for_scores(a, b) for a, b in pairs)
    return Agreement(measure=measure, value=equal / len(pairs) if pairs else None, decisions=len(pairs))


def _f1_of_sets(measure: Measure, pairs: _Pairs) -> Agreement:
    some = [(a, b) for a, b in pairs if a or b]
    right, found, expected = sum(len(a & b) for a, b in some), sum(len(b) for _, b in some), sum(len(a) for a, _ in some)
    return Agreement(measure=measure, value=f1(right, found, expected) if some else None, decisions=len(some))


def _mean_cosine(measure: Measure, pairs: _Pairs) -> Agreement:
    cosines = [min(cosine, 1.0) for _, cosine in pairs]
    if not cosines:
        return Agreement(measure=measure, value=None, decisions=0)
    return Agreement(measure=measure, value=sum(cosines) / len(cosines), decisions=len(cosines), worst=min(cosines))


def _rank_correlation(measure: Measure, pairs: _Pairs) -> Agreement:
    # a reference that gives all inputs one score has no order; a graph that does so lost the order, which is 0
    if len({expected for expected, _ in pairs}) <= 1:
        return Agreement(measure=measure, value=None, decisions=0)
    return Agreement(measure=measure, value=spearman(*zip(*pairs, strict=True)), decisions=len(pairs))


_VALUES: dict[Measure, Callable[[Measure, _Pairs], Agreement]] = {
    "label": _equal_share,
    "set_f1": _f1_of_sets,
    "span_f1": _f1_of_sets,
    "cosine": _mean_cosine,
    "spearman": _rank_correlation,
}
