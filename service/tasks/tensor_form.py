"""TensorForm: how a task looks in the tensors of the Open Inference Protocol. A task declares one, `service/wire` reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks.body import TaskBody

Values = NDArray[Any]  # float32, int64, or texts as objects


@dataclass(frozen=True, slots=True)
class TensorField:
    """A tensor as the metadata of a model describe it; by default texts of a request.

    Attributes:
        name: Its name.
        datatype: Its datatype.
        shape: Its axes, -1 for any length.
        optional: Whether a request may omit it.
        single: Whether it has exactly one text; the others have one text for each input or choice.
        alias: Another name of it; empty if there is none.
    """

    name: str
    datatype: str = "BYTES"
    shape: tuple[int, ...] = (-1, 1)
    optional: bool = False
    single: bool = False
    alias: str = ""


INPUTS = TensorField("inputs", alias="text")
SCORE = TensorField("score", "FP32", (-1,))


def _no_outputs(manifest: Manifest, body: TaskBody | None) -> tuple[TensorField, ...]:
    return ()


def _no_tensors(results: Sequence[Any], body: TaskBody, manifest: Manifest) -> dict[str, Values]:
    return {}


@dataclass(frozen=True, slots=True)
class TensorForm:
    """How a task looks in tensors.

    Attributes:
        inputs: Its texts. The tensor `inputs` becomes `inputs` of the body; with others next to it, it is the `text` of each object. Other
            tensors are keys of these objects, or of the one object that `single` texts make.
        outputs: The tensors that results become, in addition to `json`: all that a model has, or those that a body leaves.
        tensors: Makes the outputs of the results.
        labels: Returns the labels in the order of the output `scores`; None if it has no such output. `top_k` then limits `json` only.
        token_axes: Axes of a raw output that has values for each token.
    """

    inputs: tuple[TensorField, ...] = (INPUTS,)
    outputs: Callable[[Manifest, TaskBody | None], tuple[TensorField, ...]] = _no_outputs
    tensors: Callable[[Sequence[Any], TaskBody, Manifest], dict[str, Values]] = _no_tensors
    labels: Callable[[TaskBody, Manifest], Sequence[str]] | None = None
    token_axes: int = 3


def floats(values: Sequence[Any]) -> Values:
    """Returns numbers as a tensor."""
    return np.array(values, np.float32)


def objects(texts: Sequence[str]) -> Values:
    """Returns texts as a tensor."""
    return np.array(texts, object)


def labeled_form(labels: Callable[[TaskBody, Manifest], Sequence[str]], *inputs: TensorField) -> TensorForm:
    """Returns the form of a task that gives each input labels with scores, best first.

    Args:
        labels: Returns the labels in the order of `scores`.
        inputs: The texts.
    """
    return TensorForm(
        inputs,
        lambda manifest, body: (TensorField("label", "BYTES", (-1,)), SCORE, TensorField("scores", "FP32", (-1, len(manifest.labels)))),
        lambda results, body, manifest: _labeled(results, labels(body, manifest)),
        labels,
    )


def _labeled(results: Sequence[Any], labels: Sequence[str]) -> dict[str, Values]:
    """Returns the best label of each result with its score, and the scores of all in the order of `labels`."""
    places: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, []).append(place)
    scores = np.zeros((len(results), len(labels)), np.float32)
    for row, result in zip(scores, results, strict=True):
        # if labels have the same name, which an answer cannot tell apart, the first one gets the best score
        left = {label: iter(found) for label, found in places.items()}
        for item in result:
            row[next(left[item["label"]])] = item["score"]
    return {
        "label": objects([result[0]["label"] for result in results]),
        "score": floats([result[0]["score"] for result in results]),
        "scores": scores,
    }


def scored_by_index(*inputs: TensorField) -> TensorForm:
    """Returns the form of a task whose one result has `{index, score}` of each text of a list."""
    return TensorForm(
        inputs,
        lambda manifest, body: (SCORE,),
        lambda results, body, manifest: {"score": floats([item["score"] for item in sorted(results[0], key=lambda item: item["index"])])},
    )
