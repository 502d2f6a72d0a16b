"""Call: what a request asks of a model, whatever wire format it came in; and Incoming, of which a format makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.wire.reading import Limits


class Served(Protocol):
    """A loaded model, as far as reading a request needs it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def task(self) -> str:
        """Its own task."""
        ...

    @property
    def tasks(self) -> Sequence[str]:
        """All tasks that it answers, its own first."""
        ...

    @property
    def bundle(self) -> Bundle:
        """What it was loaded from."""
        ...

    @property
    def graph(self) -> GraphSpec:
        """Which of its graphs runs."""
        ...


M = TypeVar("M", bound=Served)
M_co = TypeVar("M_co", bound=Served, covariant=True)


class Models(Protocol[M_co]):
    """Where loaded models are found."""

    @property
    def models(self) -> Mapping[str, M_co]:
        """All of them, by name."""
        ...

    def get(self, name: str) -> M_co:
        """Returns the model of that name, or raises NotFoundError."""
        ...

    def for_task(self, task: str, name: str | None = None) -> M_co:
        """Returns the named model, or the task's default one; raises NotFoundError or InvalidValueError."""
        ...

    def one(self, name: str | None) -> M_co:
        """Returns the named model, or the only one that there is; raises NotFoundError or InvalidValueError."""
        ...


class Answered(Protocol):
    """What a model made of a request, as far as writing the answer needs it."""

    @property
    def results(self) -> list[Any]:
        """One per input, in order."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that the model read, special ones included."""
        ...


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
class Incoming(Generic[M]):
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
    model: M | None
    models: Models[M]
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
class Call(Generic[M]):
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
    model: M
    body: Asked
    answer: Callable[[Answered], Any]
    timeout_s: float | None = None
    spec: TaskSpec | None = None
