"""Call: what a request asks of a model, whatever wire format it came in; and Incoming, of which a format makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bertserve.service.serving.model import Model
from bertserve.service.serving.registry import Registry
from bertserve.service.serving.work import Prediction
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.spec import TaskSpec


class Asked(Protocol):
    """What a request asks, as far as running it needs it; a task's body, or what stands in its place."""

    @property
    def is_list(self) -> bool:
        """Whether errors name the input at fault by its place in a list."""
        ...

    @property
    def subject(self) -> str:
        """What holds the inputs."""
        ...

    def requests(self, config: Any = None) -> list[Any]:
        """Returns one request of the task per input, for a model of this manifest."""
        ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request of which nothing was read yet.

    Attributes:
        raw: Its body.
        headers: Its headers, found by their names in lower case.
        model: The model that its path names; None where it names none.
        models: All models.
        limits: What it may measure.
        version: The version of the model that its path names, or None.
        request_id: Its id, which the answer's header has.
    """

    raw: bytes
    headers: Mapping[bytes, bytes]
    model: Model | None
    models: Registry
    limits: Limits
    version: str | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """An answer that is more than JSON.

    Attributes:
        data: The body.
        media_type: What it is.
        headers: More headers, each name in lower case.
    """

    data: bytes
    media_type: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Call:
    """What a request asks for.

    Attributes:
        task: The task, one of the model's.
        model: Who answers.
        body: The inputs.
        answer: Makes of what the model answered what the response holds: a value for JSON, or Content.
        timeout_s: Seconds until it must have started, where the format says it in the body; None leaves it to the header.
        spec: What runs in place of the task, which then only counts it; None for the task itself.
    """

    task: str
    model: Model
    body: Asked
    answer: Callable[[Prediction], Any]
    timeout_s: float | None = None
    spec: TaskSpec | None = None
