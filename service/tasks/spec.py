"""TaskSpec: all facts about a task that the rest of the service needs, including its playground form.

Routes, OpenAPI, docs and load tests are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks.batch import ModelConfig, TaskFunction
from bertserve.service.tasks.body import TaskBody


@dataclass(frozen=True, slots=True)
class Derivation:
    """Rules of a task that bundles of other tasks answer: which bundles, and how a body requests it.

    Attributes:
        base: Task of the bundles; None if bundles of any task can answer.
        compatible: Returns whether a bundle of that task can answer.
        needs: Description of the requirement; empty if every bundle of that task is compatible.
        discriminator: Path of nested keys that only bodies of this task have. A body at a model's own path is for this task if it
            has them.
    """

    base: str | None
    compatible: Callable[[ModelConfig], bool]
    needs: str
    discriminator: tuple[str, ...]

    def accepts(self, task: str) -> bool:
        """Returns whether bundles of a task can answer."""
        return self.base in (None, task)


def inputs_body(inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns a body with only inputs; a single input is sent without a list."""
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
    """A control of a form.

    Attributes:
        name: Its name.
        label: Text above the control.
        to: Path of its value in the body, such as `inputs.text`. If `inputs` has only a `text`, this text is sent directly.
        kind: Type of the control: a text, a text with one item per line, a tick box, a choice of `options`, or a choice of one number of a
            list, which is sent as a list.
        value: Initial value; `[MASK]` is replaced by the model's mask.
        rows: Height of a text field in lines.
        optional: Whether an empty text is not sent.
        options: Each value with its name; an empty value is not sent.
        counted: Key of a list in a model's description; the choice has one number per item.
        each: Additional path for each line; each line is sent in its own request.
        most: Maximum number of lines to send; 0 for all.
        unless: Name of another control; a tick is not sent if that control has a value.
        most_words: Maximum number of words of the texts for a tick to be sent; 0 for no limit.
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
    """Example values of a form.

    Attributes:
        name: Label of its button.
        values: Values by name of the control.
        pairs: Whether it is for models of pairs; None if it suits all models.
    """

    name: str
    values: Mapping[str, str | bool]
    pairs: bool | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A tab of the playground.

    Attributes:
        title: Title of the tab.
        about: One sentence about the task.
        fields: Its controls; answers highlight parts of the first control's text.
        view: Name of a view in `forms.js`. `json` suits any answer.
        parameters: Parameters that are always sent.
        examples: Example values.
    """

    title: str
    about: str
    fields: tuple[FormField, ...]
    view: Literal["bars", "entities", "answers", "masks", "similarities", "vectors", "attention", "json"] = "json"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[FormExample, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task.

    Attributes:
        name: Its Hugging Face name, as in manifests and pipelines.
        path: Its endpoint, without the first slash.
        title: A short description for OpenAPI.
        body: The body of a request. Its `parameters_type` declares the parameters, with limits and texts.
        answer: Type of the response's body, for OpenAPI.
        estimate: Request and the model's maximum length -> estimate of its tokens for admission, including all windows and decoding. It
            must be cheap, so nothing is tokenized.
        run: The task's generator function, which yields encodings and returns the result.
        derivation: Set if bundles of other tasks answer the task.
        requires: Returns the fields that a manifest of this task lacks, as text, or None.
        widths: Returns the number of values of the graph's outputs per text, token or mask, by name; models are checked against it.
        form: Its form on the playground; None for no tab.
        has_one_label: Returns whether the best label with its score is a sufficient answer for most readers, given `parameters` as JSON.
            If so, a result is a list of objects with `label` and `score`, the best first.
        answer_bytes: Returns the maximum bytes of the answer of a request, given the manifest; None if answers are about as small as texts.
        load_body: Returns the body of a load test for one or more inputs.
        load_workload: The built-in workload of `bert-bench` with suitable inputs.
    """

    name: str
    path: str
    title: str
    body: type[TaskBody]
    answer: Any
    estimate: Callable[[Any, int], int]
    run: TaskFunction
    derivation: Derivation | None = None
    requires: Callable[[Manifest], str | None] = lambda manifest: None
    widths: Callable[[Manifest], Mapping[str, int]] = lambda manifest: {}
    form: Form | None = None
    has_one_label: Callable[[Mapping[str, Any], ModelConfig], bool] = lambda parameters, config: False
    answer_bytes: Callable[[Any, Manifest], int] | None = None
    load_body: Callable[[Sequence[Any]], dict[str, Any]] = inputs_body
    load_workload: str = "short"
