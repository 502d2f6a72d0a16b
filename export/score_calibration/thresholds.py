"""Chooses thresholds that have an error of at most a target, with 95 % confidence.

The method is fixed sequence testing (Angelopoulos and others, "Learn then Test", 2021, section 2.3). The examples that fitted the
calibration also fix a sequence of thresholds. Each is tested on the other examples, in this order. Its p-value is the binomial probability
of at most this many errors if the true share equaled the target. The sequence ends at the first p-value above 5 %, and the threshold before
it is chosen. The choice is wrong only if the test of the first threshold that is too weak passes by chance, so all tests together have the
error probability of a single test.
Recall and coverage count correct items below the threshold: the training-conditional guarantee of split conformal prediction (Vovk, 2012).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bertserve.export.errors import ExportError, UsageError
from bertserve.export.flags import Aim
from bertserve.export.score_calibration.scores import Predictions, Values
from bertserve.service.bundle.calibration import Method, Threshold
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks import token_classification

MAX_P = 0.05  # maximum p-value: 1 - the confidence
CANDIDATES = 200  # thresholds to try; each decides only about 0.5 % more than its neighbor
_DEVIATIONS = 1.645  # the 95 % quantile of the standard normal distribution


def check_aims(aims: Sequence[Aim], method: Method, manifest: Manifest) -> None:
    """Refuses aims that the model does not support, and aims that cannot hold together, because a text has one decision."""
    names = sorted({*manifest.labels, *token_classification.entity_groups(manifest)}) if method == "tags" else manifest.labels
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


def choose_threshold(aim: Aim, graph_name: str, fitted: Predictions, tested: Predictions) -> Threshold:
    """Returns the threshold that lets a graph decide the most predictions.

    `fitted` are predictions on the examples that fitted the calibration, `tested` predictions on the test examples.

    Raises:
        UsageError: One of them has no correct predictions.
        ExportError: No threshold reaches the aim.
    """
    if not (fitted.correct.any() and tested.correct.any()):
        raise UsageError(f"`{aim}`: {graph_name} finds no correct `{aim.label}` in a half of the examples; give more with this label.")
    quantiles = np.quantile(fitted.scores[fitted.correct], np.arange(CANDIDATES) / CANDIDATES, method="lower")
    candidates = np.unique(np.append(quantiles, 0.0))
    if not aim.counts_missed:
        candidates = candidates[::-1]  # errors become more frequent along the sequence
    start = _closest(aim, *_errors(aim, fitted, candidates))
    errors, counts = _errors(aim, tested, candidates)
    failures = np.flatnonzero(stats.binom.cdf(errors[start:], counts[start:], aim.max_error) > MAX_P)
    passed = int(failures[0]) if len(failures) else len(candidates) - start
    chosen = start + passed - 1 if passed else _closest(aim, errors, counts)
    error, count = float(errors[chosen] / max(counts[chosen], 1)), int(counts[chosen])
    above = tested.scores >= candidates[chosen]
    if aim.name == "coverage":  # examples whose label set has one label
        above = np.bincount(tested.examples[above], minlength=tested.count) == 1
    decided = float(above.mean())
    if not passed:
        advice = "every threshold has more errors than the aim allows, so more examples do not help; choose an easier aim"
        if error < aim.max_error:
            # so many that the distance to the aim is as large as `_DEVIATIONS` standard errors
            total = aim.max_error * (1 - aim.max_error) * (_DEVIATIONS / (aim.max_error - error)) ** 2
            more = math.ceil(max(total / max(count, 1) - 1, 0.1) * tested.count)
            advice = f"add about {2 * more} lines to --data (half are for the test), or {more} to --test-data, or choose an easier aim"
        raise ExportError(
            f"no threshold of {graph_name} reaches `{aim}`: the closest decides {decided:.1%} with {error:.2%} errors, and the aim is "
            f"{aim.max_error:.2%}; {advice}."
        )
    return Threshold(
        label=aim.label,
        aim=aim.name,
        target=aim.target,
        threshold=float(candidates[chosen]),
        decided=decided,
        error=error,
        examples=count,
    )


def _errors(aim: Aim, predictions: Predictions, thresholds: Values) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the number of errors at each threshold, and what they are a share of."""
    correct, wrong = (np.sort(predictions.scores[side]) for side in (predictions.correct, ~predictions.correct))
    correct_below = np.searchsorted(correct, thresholds)
    if aim.counts_missed:
        return predictions.missed + correct_below, np.full(len(thresholds), predictions.missed + len(correct))
    wrong_above = len(wrong) - np.searchsorted(wrong, thresholds)
    return wrong_above, wrong_above + len(correct) - correct_below


def _closest(aim: Aim, errors: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """Returns the index of the candidate whose error is farthest below the aim, in standard errors, or least above it."""
    distances = (aim.max_error * counts - errors) / np.sqrt(np.maximum(counts, 1))
    return int(np.where(counts > 0, distances, -np.inf).argmax())
