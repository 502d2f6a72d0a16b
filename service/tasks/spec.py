"""TaskSpec: all facts about a task that the rest of the service needs. Routes, OpenAPI, docs and load tests follow from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks.batch import ModelConfig, TaskFunction
from bertserve.service.tasks.body import TaskBody
from bertserve.service.tasks.form import Form
from bertserve.service.tasks.tensor_form import TensorForm


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
