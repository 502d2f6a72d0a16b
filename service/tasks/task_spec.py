"""TaskSpec: all facts about a task that the rest of the service needs.

Routes, OpenAPI and docs are derived from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bertserve.service.body.task_body import TaskBody, types_within
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks.step import TaskFunction

UNNAMED_TEXT = "text"  # the name of an input that is a text without a name


@dataclass(frozen=True, slots=True)
class Derivation:
    """Rules of a task that bundles of other tasks answer: which bundles, and how a body requests it.

    Attributes:
        base: Task of the bundles; None if bundles of any task can answer.
        discriminator: Path of nested keys in bodies of this task, and of no other. At a model's own path, they select this task.
        compatible: Returns whether a bundle of that task can answer.
        needs: Description of the requirement; empty if every bundle of that task is compatible.
    """

    base: str | None
    discriminator: tuple[str, ...]
    compatible: Callable[[Manifest], bool] = lambda manifest: True
    needs: str = ""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task.

    Attributes:
        name: Its Hugging Face name, as in manifests and pipelines.
        path: Its endpoint, without the first slash.
        title: A short description for OpenAPI.
        body: The body of a request; its fields define the limits, and the descriptions for OpenAPI.
        response_type: Type of the response's body, for OpenAPI.
        function: The task's generator function, which yields encodings and returns the result.
        derivation: Set if bundles of other tasks answer the task.
        missing_field: Returns an error if a manifest lacks a field that the task needs, otherwise None.
        widths: Returns the number of values of the graph's outputs per text, token or mask, by name; models are checked against it.
        has_one_label: For CSV of `bert-serve score`: returns whether the best label with its score is a sufficient answer for most readers,
            given an input. If so, a result is a list of objects with `label` and `score`, the best first.
        result_bytes: For block sizes of `bert-serve score`: returns the bytes of the result's numbers and explanations, given the input
            and the tokens that the model reads; 0 if a result is about as small as its text.
    """

    name: str
    path: str
    title: str
    body: type[TaskBody]
    response_type: Any
    function: TaskFunction
    derivation: Derivation | None = None
    missing_field: Callable[[Manifest], str | None] = lambda manifest: None
    widths: Callable[[Manifest], Mapping[str, int]] = lambda manifest: {}
    has_one_label: Callable[[Any, Manifest], bool] = lambda input_, manifest: False
    result_bytes: Callable[[Any, int], int] = lambda input_, length: 0

    @property
    def input_fields(self) -> dict[str, FieldInfo]:
        """Its inputs by name: keys of objects in `inputs`, `text` if an input can be a text, or the required fields without `inputs`."""
        fields = self.body.model_fields
        if "inputs" not in fields:
            return {name: info for name, info in fields.items() if info.is_required()}
        kinds = list(types_within(fields["inputs"].annotation))
        inputs = {UNNAMED_TEXT: FieldInfo(annotation=str)} if str in kinds else {}
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                inputs |= kind.model_fields
        return inputs
