"""TaskSpec: all facts about a task that the rest of the service needs, with its form on the playground and its tensors.

Routes, OpenAPI, docs and load tests follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks.batch import ModelConfig, TaskFunction
from bertserve.service.tasks.body import TaskBody


class Estimate(Protocol):
    """Guesses the tokens that a request costs, all windows and the work of decoding counted, for admission. Cheap: nothing is tokenized."""

    def __call__(self, request: Any, max_length: int) -> int:
        """Returns the tokens, given the model's usable length."""
        ...


@dataclass(frozen=True, slots=True)
class Derivation:
    """Which bundles answer a task that is not their own, and by what a body asks them for it.

    Attributes:
        base: Task of the bundles; None where the task of a bundle does not matter.
        compatible: Whether a bundle of that task can do it.
        needs: What the bundle must have, in words; empty where every bundle of that task is compatible.
        discriminator: Keys, each within the one before, that only a body of this task has. A body at a model's own path is for this
            task if it has them.
    """

    base: str | None
    compatible: Callable[[ModelConfig], bool]
    needs: str
    discriminator: tuple[str, ...]

    def accepts(self, task: str) -> bool:
        """Returns whether bundles of a task may do it."""
        return self.base in (None, task)


def _nothing(manifest: Manifest) -> str | None:
    return None


def _no_widths(manifest: Manifest) -> Mapping[str, int]:
    return {}


def inputs_body(inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns a body with nothing but inputs; one alone is sent as itself."""
    return {"inputs": inputs[0] if len(inputs) == 1 else list(inputs)}


_TOWNS = (
    "Leeds Lyon Turin Bremen Cork Dundee Ghent Basel Lille Porto Bergen Graz Seville Verona Derby Exeter York Bath Oxford Nantes Toulouse "
    "Bologna Genoa Naples Hamburg Dresden Leipzig Zurich Geneva Lisbon"
)
# About 850 tokens, more than most models read at once.
CHRONICLE = " ".join(
    f"In {1851 + 3 * i} the town of {town} opened a railway station, and its first train, drawn by a small engine from Glasgow, was late by "
    f"{7 + i} minutes."
    for i, town in enumerate(_TOWNS.split())
)


@dataclass(frozen=True, slots=True)
class FormField:
    """A control.

    Attributes:
        name: Its name.
        label: What stands above it.
        to: Where its value goes in the body, such as `inputs.text`. `inputs` with nothing but a `text` are sent as that text.
        kind: What it is: a text, a text of which each line is an item, a box to tick, a choice of `options`, or a choice of one number of a
            list, which is sent as a list.
        value: What it has at first; `[MASK]` stands for the model's mask.
        rows: Height of a text.
        optional: Whether an empty text is not sent.
        options: Each value with its name; an empty value is not sent.
        counted: Key of a model's description, a list with as many items as there are numbers.
        each: Where each line goes too, each in a request of its own.
        most: How many lines are sent at most; 0 for all.
        unless: Name of a control; a tick is not sent while that one has a value.
        most_words: A tick is not sent if the texts have more words; 0 if it always is.
    """

    name: str
    label: str
    to: str
    kind: Literal["text", "lines", "tick", "choice", "number"] = "text"
    value: str | bool = ""
    rows: int = 3
    optional: bool = False
    options: tuple[tuple[str, str], ...] = ()
    counted: str = ""
    each: str = ""
    most: int = 0
    unless: str = ""
    most_words: int = 0


@dataclass(frozen=True, slots=True)
class FormExample:
    """Values to fill in.

    Attributes:
        name: What its button says.
        values: Values by the names of controls.
        pairs: Whether it is for models of pairs; None if it suits all.
    """

    name: str
    values: Mapping[str, str | bool]
    pairs: bool | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A tab of the page.

    Attributes:
        title: What it is called.
        about: What the task does, in a sentence.
        fields: Its controls; marks are drawn in the first one's text.
        view: How answers are shown: a name in `forms.js`. `json` suits any answer.
        parameters: Parameters that are always sent.
        examples: Values to fill in.
    """

    title: str
    about: str
    fields: tuple[FormField, ...]
    view: Literal["bars", "entities", "answers", "masks", "similarities", "vectors", "attention", "json"] = "json"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[FormExample, ...] = ()


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


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task.

    Attributes:
        name: Its Hugging Face name, as manifests and pipelines have it.
        path: Its endpoint, without the slash.
        title: What it does, in a few words, for OpenAPI.
        body: The body of a request. Its `parameters_type` declares the parameters, with limits and texts.
        answer: Type of the response's body, for OpenAPI.
        estimate: Guesses a request's tokens.
        run: The task itself: a generator function that yields encodings and returns the result.
        derivation: Set for a task that bundles of another task answer.
        requires: Returns what a manifest of this task lacks, in words, or None.
        widths: Returns how many values outputs of the graph have for each text, token or mask, by their names; a model is checked for it.
        form: Its form on the playground; None for what has no tab there.
        tensors: How it looks in tensors; None if the Open Inference Protocol has no access to it.
        load_body: Returns the body of a load test around its inputs, which are at least one.
        load_workload: The built-in workload of `bert-bench` whose inputs suit it.
    """

    name: str
    path: str
    title: str
    body: type[TaskBody]
    answer: Any
    estimate: Estimate
    run: TaskFunction
    derivation: Derivation | None = None
    requires: Callable[[Manifest], str | None] = _nothing
    widths: Callable[[Manifest], Mapping[str, int]] = _no_widths
    form: Form | None = None
    tensors: TensorForm | None = None
    load_body: Callable[[Sequence[Any]], dict[str, Any]] = inputs_body
    load_workload: str = "short"
