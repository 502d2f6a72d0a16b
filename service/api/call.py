"""Call: the request to a model, independent of its wire format; and Incoming, from which a format makes a Call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bertserve.service.models.model import Model
from bertserve.service.models.registry import Registry
from bertserve.service.models.work import Prediction
from bertserve.service.tasks.body import Limits, TaskBody


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request whose body has not been read.

    Attributes:
        raw: The body.
        headers: The headers, by name in lower case.
        model: The model in the path, or None.
        models: All models.
        limits: The limits of a request.
        request_id: The request id, which the answer's header also has.
    """

    raw: bytes
    headers: Mapping[bytes, bytes]
    model: Model | None
    models: Registry
    limits: Limits
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """An answer as bytes, with additional headers, whose names are in lower case."""

    body: bytes
    media_type: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a model.

    Attributes:
        task: The task, one of the model's.
        model: The model that answers.
        body: The inputs.
        answer: Converts the prediction to the content of the response: a value for JSON, or Content.
        timeout_s: Seconds until it must have started, if the body sets them; None to use the header.
    """

    task: str
    model: Model
    body: TaskBody
    answer: Callable[[Prediction], Any]
    timeout_s: float | None = None
