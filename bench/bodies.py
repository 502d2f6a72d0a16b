"""Request bodies, from a built-in workload or from the user's file, and the number of texts in each. Both follow from the service's tasks.

An endpoint is recognized by the last part of its path, so that it also works behind a proxy's prefix and with other servers of the same
wire format. A body at the path of a model is counted as that of the task whose keys it has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.bench import workloads
from bertserve.bench.errors import BenchError
from bertserve.service.errors import CallerError
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.spec import TaskSpec, inputs_body
from bertserve.service.wire.reading import requested_task, validate_body

_MAX_BODIES = 512

NO_LIMITS = Limits(max_inputs=1_000_000, max_chars=100_000_000)


@dataclass(frozen=True, slots=True)
class Body:
    """One request body.

    Attributes:
        content: The JSON that is sent.
        texts: Number of texts that the model reads, as `endpoints.count_texts` counts them.
    """

    content: bytes
    texts: int


def build_bodies(source: str, *, path: str = "/", texts: int = 1, seed: int = 0, mask: str = workloads.MASK) -> list[Body]:
    """Returns the bodies of a workload or of a file.

    Args:
        source: Name of a workload, or path of a JSON Lines file. Each line of a file is an object, which is sent as it is, or a string.
        path: Path of the endpoint that the bodies are for.
        texts: Texts in each request. Objects of a file are whole requests, so it must be 1 for them.
        seed: Seed of a built-in workload.
        mask: How the model spells a word that it is to fill in; what a file has is sent as it is.

    Raises:
        BenchError: There is no such workload or file, a line of the file is not a body, or the endpoint does not take what the workload has.
    """
    if source in workloads.NAMES:
        return _group(path, workloads.workload_inputs(source, seed=seed, mask=mask), texts)
    lines = _read_lines(Path(source))
    if all(isinstance(line, str) for line in lines):
        return _group(path, lines, texts)
    if texts != 1:
        raise BenchError(f"--texts {texts} groups texts, but `{source}` has whole request bodies; remove the flag.")
    return [_encode(request_body(path, [line]) if isinstance(line, str) else line) for line in lines]


def _group(path: str, inputs: Sequence[Any], texts: int) -> list[Body]:
    """Returns bodies of `texts` texts each, in which every input stands equally often."""
    count = min(math.lcm(len(inputs), texts) // texts, max(len(inputs) // texts, _MAX_BODIES))
    return [_encode(request_body(path, [inputs[(i * texts + k) % len(inputs)] for k in range(texts)])) for i in range(count)]


def _encode(value: dict[str, Any]) -> Body:
    return Body(json.dumps(value).encode(), count_texts(value))


def _read_lines(path: Path) -> list[Any]:
    """Returns the values of a JSON Lines file.

    Raises:
        BenchError: The file cannot be read or has no value, or a line is neither an object nor a string.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BenchError(
            f"`{path}` is neither a workload nor a readable file of bodies ({reason}); workloads are {', '.join(workloads.NAMES)}."
        ) from error
    lines = []
    for number, line in enumerate(text.split("\n"), 1):  # a text may contain other line ends, as U+2028
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise BenchError(f"line {number} of `{path}` is not JSON; give an object or a string on each line.") from error
            if not isinstance(value, str | dict):
                raise BenchError(f"line {number} of `{path}` is neither an object nor a string; give one of them.")
            lines.append(value)
    if not lines:
        raise BenchError(f"`{path}` has no body; give an object or a string on each line.")
    return lines


def request_body(path: str, inputs: Sequence[Any]) -> dict[str, Any]:
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
        raise BenchError(
            f"/{spec.path} takes texts, not questions with passages; give another workload, or a file of texts or whole bodies."
        )
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


def default_workload(task: str) -> str:
    """Returns the built-in workload for a task, by its Hugging Face name; of an unknown one that of short texts."""
    return TASKS[task].load_workload if task in TASKS else "short"


def _spec_of(path: str) -> TaskSpec | None:
    """Returns the task of a path, or None. The path of a model has none: its last part is the model's name."""
    *above, last = path.partition("?")[0].rstrip("/").split("/")
    return next((spec for spec in TASKS.values() if spec.path == last and above[-1:] != ["models"]), None)
