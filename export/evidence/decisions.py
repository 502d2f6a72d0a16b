"""What a result comes down to, scores aside: the label, the entities, the answer, the token. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from export.evidence.metrics import spans
from service.tasks.encoded import ModelConfig

SURE = 0.5  # from this score on a label of a sigmoid head is chosen


def choice(task: str, result: Any, head: ModelConfig) -> Any:
    """Returns what a user takes from a result: best label or sure labels, entities, best answer, best token of each mask.

    Args:
        task: Hugging Face name of the task; of one that is not known here the whole result counts.
        result: What the task's decoder returned.
        head: The model's labels and activation.
    """
    if task == "text-classification":
        return labels(result, head)
    if task == "question-answering":
        best = best_answer(result)
        return {name: best[name] for name in ("answer", "start", "end")}
    if task == "fill-mask":
        return [candidates[0]["token"] for candidates in masks(result)]
    return spans(result) or result


def is_regression(task: str, head: ModelConfig) -> bool:
    """Returns whether the model gives a value and no label."""
    return task == "text-classification" and len(head.labels) == 1


def value(result: Any) -> float:
    """Returns the value of a regression."""
    return float(result[0]["score"])


def angle(a: Any, b: Any) -> float:
    """Returns 1 - cosine of two vectors; of a text's token vectors the largest, each with its counterpart."""
    x, y = (np.atleast_2d(np.asarray(value, dtype=np.float64)) for value in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return float(np.max(1 - (x * y).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)))


def labels(result: Any, head: ModelConfig) -> frozenset[str]:
    """Returns the best label, or of a head with independent labels all that are sure."""
    if head.activation == "sigmoid":
        return frozenset(item["label"] for item in result if item["score"] >= SURE)
    return frozenset({result[0]["label"]})


def best_answer(result: Any) -> dict[str, Any]:
    """Returns the best answer of question answering."""
    best: dict[str, Any] = result[0] if isinstance(result, list) else result
    return best


def masks(result: Any) -> list[list[dict[str, Any]]]:
    """Returns the candidates of each mask; with one mask alone the result is its candidates."""
    return result if isinstance(result[0], list) else [result]
