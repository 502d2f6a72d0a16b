"""Call: the request to a model, independent of its wire format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from bertserve.service.errors import BertServeError
from bertserve.service.models.model import Model
from bertserve.service.models.request_run import Prediction
from bertserve.service.tasks.body import TaskBody


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
