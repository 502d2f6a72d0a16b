"""The largest bodies that `--max-body-bytes` admits are refused with one short error, however many of their items are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from bertserve.service.api.formats.cohere import DocumentsBody
from bertserve.service.api.formats.openai import EmbeddingsBody
from bertserve.service.api.formats.tei import SequencesBody
from bertserve.service.errors import CallerError
from bertserve.service.settings import Settings
from bertserve.service.tasks import classify, fill_mask, multiple_choice, question_answering, rerank, similarity, zero_shot
from bertserve.service.tasks.body import Limits, TaskBody
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.reading import read_as
from bertserve.service.tasks.zero_shot import MAX_LABELS

BYTES = Settings().max_body_bytes
LIMITS = Limits(max_inputs=Settings().max_inputs, max_chars=Settings().max_chars)


def full(head: str, item: str, tail: str, last: str = "") -> bytes:
    """Returns a body with as many equal items as `BYTES` allows, and optionally a different last item."""
    count = (BYTES - len(head) - len(last) - len(tail)) // (len(item) + 1)
    return f"{head}{','.join([item] * count + [last] * bool(last))}{tail}".encode()


def distinct(head: str, item: str, tail: str) -> bytes:
    """Returns a body with as many items as `BYTES` allows, each with its own number."""
    count = (BYTES - len(head) - len(tail)) // (len(item) + 5)
    return f"{head}{','.join(item % i for i in range(count))}{tail}".encode()


def long(head: str, text: str, tail: str) -> bytes:
    return f"{head}{text * ((BYTES - len(head) - len(tail)) // len(text))}{tail}".encode()


PARAMETERS = '{"inputs": "a", "parameters": {'
BODIES: dict[str, tuple[str | type[TaskBody], Callable[[], bytes]]] = {
    "texts, the last wrong": (classify.TASK, lambda: full('{"inputs": [', '""', "]}", "1")),
    "lists within lists": (classify.TASK, lambda: full('{"inputs": [', "[]", "]}")),
    "a deep list": (classify.TASK, lambda: long('{"inputs": ', "[", "")),
    "unknown keys": (classify.TASK, lambda: distinct('{"inputs": [1], ', '"%d": 1', "}")),
    "a huge key": (classify.TASK, lambda: long('{"inputs": [1], "', "a", '": 1}')),
    "unknown parameters": (classify.TASK, lambda: distinct(PARAMETERS, '"%d": 1', "}}")),
    "a huge number": (classify.TASK, lambda: long(f'{PARAMETERS}"top_k": ', "1", "}}")),
    "questions": (question_answering.TASK, lambda: full('{"inputs": [', '{"question": "", "context": ""}', "]}")),
    "choices": (multiple_choice.TASK, lambda: full('{"inputs": {"prompt": "", "choices": [', '""', "]}}")),
    "wrong targets": (fill_mask.TASK, lambda: full(f'{PARAMETERS}"targets": [', "1", "]}}")),
    "labels": (zero_shot.TASK, lambda: distinct(f'{PARAMETERS}"candidate_labels": [', '"%d"', "]}}")),
    "commas": (zero_shot.TASK, lambda: long(f'{PARAMETERS}"candidate_labels": "', ",", '"}}')),
    "a huge query": (rerank.TASK, lambda: long('{"texts": ["a"], "query": "', "a", '"}')),
    "sentences": (similarity.TASK, lambda: full('{"inputs": {"source_sentence": "a", "sentences": [', '""', "]}}")),
    "ids of tokens": (EmbeddingsBody, lambda: full('{"input": [', "1", "]}")),
    "documents, the last wrong": (DocumentsBody, lambda: full('{"query": "a", "documents": [', '""', "]}", "{}")),
    "one sequence of many": (SequencesBody, lambda: full('{"inputs": [[', '""', "]]}")),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_the_largest_bodies_are_refused_with_one_short_error(name: str) -> None:
    """A list of hundreds of thousands of items reports only the first errors, because pydantic would build one error per item."""
    task, make = BODIES[name]
    body = make()
    assert BYTES // 2 < len(body) <= BYTES
    with pytest.raises(CallerError) as caught:
        read_as(TASKS[task].body if isinstance(task, str) else task, body, LIMITS)

    assert len(caught.value.message) < 600
    assert not isinstance(caught.value.__cause__, ValidationError) or caught.value.__cause__.error_count() <= 2


@pytest.mark.parametrize(
    "labels", [[str(i) for i in range(MAX_LABELS + 1)], ",".join(map(str, range(MAX_LABELS + 1))), "a" + "," * MAX_LABELS]
)
def test_more_than_a_thousand_labels_are_refused(labels: Any) -> None:
    with pytest.raises(ValidationError, match=f"{MAX_LABELS} items"):
        zero_shot.ZeroShotParameters(candidate_labels=labels)
