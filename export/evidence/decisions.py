"""Reduces results to the decisions that a user takes from them, without the scores: labels, entities, answers, tokens. Pure.

Results are what the service's decoders return.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from bertserve.export.evidence.metrics import Span
from bertserve.service.tasks.batch import ModelConfig

ORDERED_BY_SCORE = ("text-classification", "question-answering", "multiple-choice", "fill-mask")  # tasks whose results are, best first
SIGMOID_THRESHOLD = 0.5  # a label of a sigmoid head is chosen from this score on


def decision(task: str, result: Any, config: ModelConfig) -> Any:
    """Returns what a user takes from a result: the chosen labels, the entities, the best answer or choice, the best token of each mask.

    Args:
        task: Hugging Face name of the task; of a task that is not known here the whole result is the decision.
        result: What the task's decoder returned.
        config: The model's labels and activation.
    """
    if task == "text-classification":
        return chosen_labels(result, config)
    if task == "question-answering":
        best = best_answer(result)
        return {name: best[name] for name in ("answer", "start", "end")}
    if task == "multiple-choice":
        return result[0]["index"]
    if task == "fill-mask":
        return [candidates[0]["token"] for candidates in mask_candidates(result)]
    return result_spans(result) or result


def equal_but_for_scores(expected: Any, actual: Any) -> bool:
    """Returns whether two results or decisions are equal if the values of their floats are left out."""
    if isinstance(expected, list):
        return isinstance(actual, list) and len(expected) == len(actual) and all(map(equal_but_for_scores, expected, actual))
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and expected.keys() == actual.keys()
            and all(equal_but_for_scores(expected[key], actual[key]) for key in expected)
        )
    if isinstance(expected, float):
        return isinstance(actual, float)
    return type(expected) is type(actual) and bool(expected == actual)


def equal_but_for_ties(task: str, expected: Any, actual: Any, tolerance: float) -> bool:
    """Returns whether two results are equal, if items whose scores are nearly equal may be in either order.

    Args:
        task: Hugging Face name of the task, which says whether its lists are ordered by score.
        expected: The reference's result.
        actual: The graph's result.
        tolerance: How far two scores may differ that rounding can order either way.
    """
    scored = task in ORDERED_BY_SCORE and _is_scored(expected) and _is_scored(actual) and len(expected) == len(actual)
    if not scored:
        nested = isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual)
        if nested and all(isinstance(item, list) for item in expected):
            return all(equal_but_for_ties(task, one, other, tolerance) for one, other in zip(expected, actual, strict=True))
        return equal_but_for_scores(expected, actual)
    scores = {_identity(item): item["score"] for item in expected}
    # an item that the reference has not is one behind its last, and may be there if it is nearly as good
    last = expected[-1]["score"] if expected else 0.0
    return all(
        _identity(one) == _identity(other)
        or abs(one["score"] - scores.get(_identity(other), last if abs(other["score"] - last) <= tolerance else math.inf)) <= tolerance
        for one, other in zip(expected, actual, strict=True)
    )


def _is_scored(result: Any) -> bool:
    """Returns whether a result is a list of items with scores."""
    return isinstance(result, list) and all(isinstance(item, dict) and isinstance(item.get("score"), float) for item in result)


def _identity(item: dict[str, Any]) -> str:
    """Returns what an item is, its floats left out."""
    return json.dumps({name: value for name, value in item.items() if not isinstance(value, float)}, sort_keys=True)


def chosen_labels(result: Any, config: ModelConfig) -> frozenset[str]:
    """Returns the best label, or of a head with independent labels all from `SIGMOID_THRESHOLD` on."""
    if config.activation == "sigmoid":
        return frozenset(item["label"] for item in result if item["score"] >= SIGMOID_THRESHOLD)
    return frozenset({result[0]["label"]})


def result_spans(result: Any) -> set[Span]:
    """Returns the entities or answers of a result: all of its items that have a start and an end."""
    if isinstance(result, list):
        return {span for item in result for span in result_spans(item)}
    if isinstance(result, dict) and {"start", "end"} <= result.keys():
        return {(result["start"], result["end"], str(result.get("entity_group", result.get("entity", ""))))}
    return set()


def best_answer(result: Any) -> dict[str, Any]:
    """Returns the best answer of question answering."""
    best: dict[str, Any] = result[0] if isinstance(result, list) else result
    return best


def mask_candidates(result: Any) -> list[list[dict[str, Any]]]:
    """Returns the candidates of each mask; the result of a text with one mask is that mask's candidates."""
    return result if isinstance(result[0], list) else [result]


def is_regression(task: str, config: ModelConfig) -> bool:
    """Returns whether the model gives a value and no label."""
    return task == "text-classification" and len(config.labels) == 1


def regression_value(result: Any) -> float:
    """Returns the value of a regression."""
    return float(result[0]["score"])


def cosine_distance(a: Any, b: Any) -> float:
    """Returns 1 - cosine of two vectors; of a text's token vectors the largest, each with its counterpart."""
    x, y = (np.atleast_2d(np.asarray(value, dtype=np.float64)) for value in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(np.max(1 - (x * y).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)))
