"""Builds request bodies from a built-in workload or a user's file, and counts the texts of each. It is derived from the service's tasks.

An endpoint is recognized by the last part of its path, so it also works behind a proxy's prefix, and for other servers with the same
wire format. A body at a model's path counts as that of the task with the same keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.bench import BenchError, workloads
from bertserve.service.errors import CallerError
from bertserve.service.tasks import attention, multiple_choice, rerank, similarity, zero_shot
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.reading import requested_task, validate_as
from bertserve.service.tasks.task_spec import TaskSpec

_CHOICES = ["It was late.", "The bridge was closed.", "Nobody had seen it before.", "They sold it for ten times the price."]

NO_LIMITS = Limits(max_inputs=1_000_000, max_chars=100_000_000)


def _single_or_list(inputs: Sequence[Any]) -> Any:
    return inputs[0] if len(inputs) == 1 else list(inputs)


# Task -> the body for one or more texts. The bodies of other tasks have only inputs.
_TEXT_BODIES: Mapping[str, Callable[[Sequence[Any]], dict[str, Any]]] = {
    # with all layers, answers of several texts would be too long
    attention.TASK: lambda texts: {"inputs": _single_or_list(texts), "parameters": {"output_attentions": True, "layers": [-1]}},
    multiple_choice.TASK: lambda texts: {"inputs": _single_or_list([{"prompt": text, "choices": _CHOICES} for text in texts])},
    rerank.TASK: lambda texts: {"query": "Who built the bridge over the river?", "texts": list(texts)},
    similarity.TASK: lambda texts: {
        "inputs": {"source_sentence": "The bridge was opened in the summer of 1886.", "sentences": list(texts)}
    },
    zero_shot.TASK: lambda texts: {
        "inputs": _single_or_list(texts),
        "parameters": {"candidate_labels": ["culture", "travel", "technology", "history"]},
    },
}


@dataclass(frozen=True, slots=True)
class Body:
    """One request body: the JSON that is sent, and the number of texts that the model reads, as `count_texts` counts them."""

    content: bytes
    texts: int


def build_bodies(source: str, *, path: str = "/", texts: int = 1, seed: int = 0, mask: str = workloads.MASK) -> list[Body]:
    """Returns the bodies of a workload or of a file.

    Args:
        source: Name of a workload, or path of a JSON Lines file with a text on each line, or a whole body, which is sent unchanged.
        path: Path of the endpoint for the bodies.
        texts: Number of texts per request. Objects of a file are whole requests, so it must be 1 for them.
        seed: Seed of a built-in workload.
        mask: The model's spelling of the mask; the content of a file is sent unchanged.

    Raises:
        BenchError: The workload or file does not exist, a line of the file is not a body, or the endpoint does not support the workload.
    """
    is_file = source not in workloads.NAMES
    inputs = _read_lines(Path(source)) if is_file else workloads.workload_inputs(source, seed=seed, mask=mask)
    spec = _spec_of(path)
    if is_file and isinstance(inputs[0], dict):
        if texts != 1:
            raise BenchError(f"--texts {texts} groups texts, but `{source}` has whole request bodies; remove the flag.")
        values = inputs
    else:
        # all inputs occur equally often, unless this takes more than 512 bodies
        count = min(math.lcm(len(inputs), texts) // texts, max(len(inputs) // texts, 512))
        values = [_request_body(spec, [inputs[(i * texts + k) % len(inputs)] for k in range(texts)]) for i in range(count)]
    return [Body(json.dumps(value).encode(), count_texts(value)) for value in values]


def _read_lines(path: Path) -> list[Any]:
    """Returns the values of a JSON Lines file.

    Raises:
        BenchError: The file cannot be read, has no values, or they are neither all objects nor all strings.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BenchError(
            f"`{path}` is neither a workload nor a readable file of bodies ({reason}); workloads are {', '.join(workloads.NAMES)}."
        ) from error
    try:
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]  # a text may contain other line ends, such as U+2028
    except ValueError as error:
        raise BenchError(f"`{path}` has a line that is not JSON: {error}.") from error
    if not any(lines and all(isinstance(line, kind) for line in lines) for kind in (str, dict)):
        raise BenchError(f"`{path}` must have a JSON string on each line, or a JSON object on each line.")
    return lines


def _request_body(spec: TaskSpec | None, inputs: Sequence[Any]) -> dict[str, Any]:
    """Returns one body for an endpoint; a single input is sent without a list if the endpoint also accepts that.

    Raises:
        BenchError: The endpoint takes texts, and the inputs are questions with passages.
    """
    if spec is None or spec.name not in _TEXT_BODIES:
        return {"inputs": _single_or_list(inputs)}
    if not all(isinstance(item, str) for item in inputs):
        raise BenchError(
            f"/{spec.path} takes texts, not questions with passages; give another workload, or a file of texts or whole bodies."
        )
    return _TEXT_BODIES[spec.name](inputs)


def count_texts(value: Mapping[str, Any]) -> int:
    """Returns the number of texts that the model reads for a body: texts to rank, sentences to compare, or pairs of text and label.

    If the body fits no task, the items of `inputs` are counted.
    """
    names = {requested_task(spec.name, value) for spec in TASKS.values() if spec.derivation is None}
    # derived tasks with specific keys come before tasks that accept any inputs
    for name in sorted(names, key=lambda name: TASKS[name].derivation is None):
        try:
            # the count of similarity is without the source sentence
            return validate_as(TASKS[name].body, value, NO_LIMITS).count + (name == similarity.TASK)
        except CallerError:
            continue
    inputs = value.get("inputs")
    return len(inputs) if isinstance(inputs, list) else 1


def _spec_of(path: str) -> TaskSpec | None:
    """Returns the task of a path, or None. It is None for the path of a model, whose last part is the model's name."""
    *above, last = path.partition("?")[0].rstrip("/").split("/")
    return next((spec for spec in TASKS.values() if spec.path == last and above[-1:] != ["models"]), None)
