"""The request body of each endpoint around the texts of a mix, and the number of texts in a body. Both follow from the service's tasks.

An endpoint is recognized by the last part of its path, so that it also works behind a proxy's prefix and with other servers of the same
wire format. A body at the path of a model is counted as that of the task whose keys it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertserve.bench.errors import BenchError
from bertserve.service.errors import CallerError
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.spec import TaskSpec, inputs_body
from bertserve.service.wire.reading import requested_task, validate_body

Body = dict[str, Any]
NO_LIMITS = Limits(max_inputs=1_000_000, max_chars=100_000_000)


def request_body(path: str, inputs: Sequence[Any]) -> Body:
    """Returns one body.

    Args:
        path: Path of the endpoint, with or without a query.
        inputs: At least one. A single input is sent as itself if the endpoint also takes a list.

    Raises:
        BenchError: The endpoint takes texts, and the inputs are questions with passages.
    """
    spec = _spec_of(path)
    body = inputs_body if spec is None else spec.load_body
    if spec is not None and body is not inputs_body and not all(isinstance(item, str) for item in inputs):
        raise BenchError(f"/{spec.path} takes texts, not questions with passages; give another mix, or a file of texts or whole bodies.")
    return body(inputs)


def count_texts(value: Mapping[str, Any]) -> int:
    """Returns how many texts the model reads for a body: each text of a rerank request, each sentence, each pair of a text and a label.

    Args:
        value: A body. Of one that is none of our tasks' the items of `inputs` are counted.
    """
    names = {requested_task(spec.name, value) for spec in TASKS.values() if spec.derivation is None}
    # the derived tasks that the body's keys name come before those that take any inputs
    for name in sorted(names, key=lambda name: TASKS[name].derivation is None):
        try:
            return validate_body(name, value, NO_LIMITS).texts_read
        except CallerError:
            continue
    inputs = value.get("inputs")
    return len(inputs) if isinstance(inputs, list) else 1


def default_mix(task: str) -> str:
    """Returns the built-in mix for a task, by its Hugging Face name; of an unknown one that of short texts."""
    return TASKS[task].load_mix if task in TASKS else "short"


def _spec_of(path: str) -> TaskSpec | None:
    """Returns the task of a path, or None. The path of a model has none: its last part is the model's name."""
    *above, last = path.partition("?")[0].rstrip("/").split("/")
    return next((spec for spec in TASKS.values() if spec.path == last and above[-1:] != ["models"]), None)
