"""Call: the request to a model, independent of its wire format; and Incoming, from which a format makes a Call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bertserve.service.errors import BertServeError
from bertserve.service.models.model import Model
from bertserve.service.models.registry import Registry
from bertserve.service.models.request_run import Prediction
from bertserve.service.tasks.body import Limits, TaskBody


@dataclass(slots=True)
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


class BinaryAnswer(NamedTuple):
    """An answer of JSON, followed by bytes."""

    value: Any
    tail: bytes


@dataclass(slots=True)
class Call:
    """A request to a model.

    Attributes:
        task: The task, one of the model's.
        model: The model that answers.
        body: The inputs.
        answer: Converts the prediction to the JSON value of the response, or to a BinaryAnswer.
    """

    task: str
    model: Model
    body: TaskBody
    answer: Callable[[Prediction], Any]

    async def predict(self, timeout_s: float, **options: Any) -> Prediction:
        """Runs the model, with the arguments and errors of `Model.predict`; the message of an error names the wrong input."""
        try:
            requests = self.body.requests(self.model.bundle.manifest)
            return await self.model.predict(requests, timeout_s=timeout_s, task=self.task, **options)
        except BertServeError as error:
            error.name_input(many=self.body.is_list, subject=self.body.subject)
            raise
