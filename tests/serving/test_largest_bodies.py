"""The largest bodies that `--max-body-bytes` admits do not block the event loop, even if they are built to be slow to read.

The tests count function calls, errors and comparisons; they do not measure time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from bertserve.service.bundle import files
from bertserve.service.errors import CallerError
from bertserve.service.serving.registry import Registry
from bertserve.service.settings import Settings
from bertserve.service.tasks import (
    classify,
    embed,
    fill_mask,
    multiple_choice,
    question_answering,
    rerank,
    similarity,
    token_classification,
    zero_shot,
)
from bertserve.service.tasks.body import MAX_ITEMS, Limits, TaskBody
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.zero_shot import MAX_LABELS
from bertserve.service.wire.call import Call, Incoming
from bertserve.service.wire.cohere import DocumentsBody
from bertserve.service.wire.hugging_face import read_predict
from bertserve.service.wire.open_inference import read_infer
from bertserve.service.wire.openai import EmbeddingsBody
from bertserve.service.wire.reading import read_as
from bertserve.service.wire.tei import SequencesBody

Reader = Callable[[Incoming], Call]

BYTES = Settings().max_body_bytes
LIMITS = Limits(max_inputs=Settings().max_inputs, max_chars=Settings().max_chars)
# A few calls per item at the limit of items; a body of 2 MiB can have a million items.
MOST_CALLS = 6 * MAX_ITEMS


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
LABELS, IGNORED, TARGETS = (f'{PARAMETERS}"{name}": ' for name in ("candidate_labels", "ignore_labels", "targets"))
CHOICES = '{"prompt": "", "choices": ["", ""]}'
QUESTION = '{"question": "", "context": ""}'
SENTENCES = '{"inputs": {"source_sentence": "a", "sentences": ['
BODIES: dict[str, tuple[str | type[TaskBody], Callable[[], bytes]]] = {
    "texts": (classify.TASK, lambda: full('{"inputs": [', '""', "]}")),
    "texts, the last wrong": (classify.TASK, lambda: full('{"inputs": [', '""', "]}", "1")),
    "pairs": (classify.TASK, lambda: full('{"inputs": [', '{"text": ""}', "]}")),
    "pairs, the last wrong": (classify.TASK, lambda: full('{"inputs": [', '{"text": ""}', "]}", "{}")),
    "lists within lists": (classify.TASK, lambda: full('{"inputs": [', "[]", "]}")),
    "a deep list": (classify.TASK, lambda: long('{"inputs": ', "[", "")),
    "a deep object": (classify.TASK, lambda: long('{"inputs": ', '{"a": ', "")),
    "a pair with many keys": (classify.TASK, lambda: distinct('{"inputs": {', '"%d": 1', "}}")),
    "unknown keys": (classify.TASK, lambda: distinct('{"inputs": [1], ', '"%d": 1', "}")),
    "unknown keys to rank by": (rerank.TASK, lambda: distinct('{"query": "a", "texts": [], ', '"%d": 1', "}")),
    "a huge key": (classify.TASK, lambda: long('{"inputs": [1], "', "a", '": 1}')),
    "unknown options": (classify.TASK, lambda: distinct('{"inputs": [1], "options": {', '"%d": 1', "}}")),
    "a huge option": (classify.TASK, lambda: long('{"inputs": [1], "options": {"', "a", '": 1}}')),
    "a huge stream": (classify.TASK, lambda: long('{"inputs": [1], "stream": "', "a", '"}')),
    "pairs, each with an unknown key": (classify.TASK, lambda: full('{"inputs": [', '{"text": "", "a": ""}', "]}")),
    "a pair with a huge key": (classify.TASK, lambda: long('{"inputs": [{"', "a", '": ""}]}')),
    "a question with many keys": (
        question_answering.TASK,
        lambda: distinct('{"inputs": {"question": "", "context": "", ', '"%d": 1', "}}"),
    ),
    "sentences beside many keys": (
        similarity.TASK,
        lambda: distinct('{"inputs": {"source_sentence": "", "sentences": [], ', '"%d": 1', "}}"),
    ),
    "unknown parameters": (classify.TASK, lambda: distinct(PARAMETERS, '"%d": 1', "}}")),
    "one unknown parameter often": (classify.TASK, lambda: full(PARAMETERS, '"a": 1', "}}")),
    "a huge number": (classify.TASK, lambda: long(f'{PARAMETERS}"top_k": ', "1", "}}")),
    "a huge fraction": (classify.TASK, lambda: long(f'{PARAMETERS}"top_k": 0.', "1", "}}")),
    "a huge choice": (classify.TASK, lambda: long(f'{PARAMETERS}"window": "', "A", '"}}')),
    "a huge text of escapes": (classify.TASK, lambda: long('{"inputs": "', "\\u0041", '"}')),
    "questions": (question_answering.TASK, lambda: full('{"inputs": [', QUESTION, "]}")),
    "questions, the last wrong": (question_answering.TASK, lambda: full('{"inputs": [', QUESTION, "]}", "{}")),
    "questions with choices": (multiple_choice.TASK, lambda: full('{"inputs": [', CHOICES, "]}")),
    "questions with choices, the last wrong": (multiple_choice.TASK, lambda: full('{"inputs": [', CHOICES, "]}", "{}")),
    "choices": (multiple_choice.TASK, lambda: full('{"inputs": {"prompt": "", "choices": [', '""', "]}}")),
    "a huge choice of two": (multiple_choice.TASK, lambda: long('{"inputs": {"prompt": "", "choices": ["", "', "a", '"]}}')),
    "ignored labels": (token_classification.TASK, lambda: full(f"{IGNORED}[", '""', "]}}")),
    "wrong ignored labels": (token_classification.TASK, lambda: full(f"{IGNORED}[", "1", "]}}")),
    "a huge ignored label": (token_classification.TASK, lambda: long(f'{IGNORED}["', "a", '"]}}')),
    "targets": (fill_mask.TASK, lambda: full(f"{TARGETS}[", '""', "]}}")),
    "wrong targets": (fill_mask.TASK, lambda: full(f"{TARGETS}[", "1", "]}}")),
    "a huge target": (fill_mask.TASK, lambda: long(f'{TARGETS}"', "a", '"}}')),
    "labels": (zero_shot.TASK, lambda: distinct(f"{LABELS}[", '"%d"', "]}}")),
    "labels, the last two equal": (zero_shot.TASK, lambda: distinct(f"{LABELS}[", '"%d"', ', "0"]}}')),
    "labels with commas": (zero_shot.TASK, lambda: long(f'{LABELS}"', "a,", '"}}')),
    "commas": (zero_shot.TASK, lambda: long(f'{LABELS}"', ",", '"}}')),
    "wrong texts": (embed.TASK, lambda: full('{"inputs": [', "1", "]}")),
    "a huge prompt beside wrong inputs": (embed.TASK, lambda: long('{"inputs": 1, "prompt_name": "', "a", '"}')),
    "texts to rank": (rerank.TASK, lambda: full('{"query": "a", "texts": [', '""', "]}")),
    "a huge query": (rerank.TASK, lambda: long('{"texts": ["a"], "query": "', "a", '"}')),
    "texts of OpenAI's": (EmbeddingsBody, lambda: full('{"input": [', '""', "]}")),
    "ids of tokens": (EmbeddingsBody, lambda: full('{"input": [', "1", "]}")),
    "lists of ids of tokens": (EmbeddingsBody, lambda: full('{"input": [', "[1]", "]}")),
    "wrong texts of OpenAI's": (EmbeddingsBody, lambda: full('{"input": ["a",', "{}", "]}")),
    "unknown keys of OpenAI's": (EmbeddingsBody, lambda: distinct('{"input": "a", ', '"%d": 1', "}")),
    "documents": (DocumentsBody, lambda: full('{"query": "a", "documents": [', '{"text": ""}', "]}")),
    "documents, the last wrong": (DocumentsBody, lambda: full('{"query": "a", "documents": [', '""', "]}", "{}")),
    "a huge document": (DocumentsBody, lambda: long('{"query": "a", "documents": [{"text": "', "a", '"}]}')),
    "sequences": (SequencesBody, lambda: full('{"inputs": [', '["", ""]', "]}")),
    "texts that are no sequence": (SequencesBody, lambda: full('{"inputs": [', '""', "]}")),
    "one sequence of many": (SequencesBody, lambda: full('{"inputs": [[', '""', "]]}")),
    "sentences": (similarity.TASK, lambda: full(SENTENCES, '""', "]}}")),
    "a huge sentence": (similarity.TASK, lambda: long(f'{SENTENCES}"', "a", '"]}}')),
}


TENSOR = '{"inputs": [{"name": "inputs", "datatype": "BYTES", "shape": [1], "data": '
SIZED = TENSOR.replace('"shape": [1]', f'"shape": [{LIMITS.max_inputs}]')
TENSORS: dict[str, tuple[Reader, Callable[[], bytes]]] = {
    "tensors": (read_infer, lambda: full('{"inputs": [', "{}", "]}")),
    "tensors with many keys": (read_infer, lambda: distinct('{"inputs": [{', '"%d": 1', "}]}")),
    "axes": (read_infer, lambda: full('{"inputs": [{"name": "inputs", "datatype": "BYTES", "data": [], "shape": [', "1", "]}]}")),
    "a huge axis": (read_infer, lambda: long('{"inputs": [{"name": "inputs", "datatype": "BYTES", "data": [], "shape": [', "1", "]}]}")),
    "a huge name": (read_infer, lambda: long('{"inputs": [{"shape": [1], "name": "', "a", '"}]}')),
    "a huge datatype": (read_infer, lambda: long('{"inputs": [{"name": "a", "shape": [1], "datatype": "', "a", '"}]}')),
    "more values than the shape": (read_infer, lambda: full(f"{TENSOR}[", '""', "]}]}")),
    "values in lists": (read_infer, lambda: full(f"{SIZED.replace(']', ', 1]')}[", "[]", "]}]}")),
    "outputs": (read_infer, lambda: full(f'{TENSOR}["a"]}}], "outputs": [', '{"name": "a"}', "]}")),
    "parameters": (read_infer, lambda: distinct(f'{TENSOR}["a"]}}], "parameters": {{', '"%d": 1', "}}")),
    "a huge timeout": (read_infer, lambda: long(f'{TENSOR}["a"]}}], "parameters": {{"timeout": 1', "1", "}}")),
    "instances": (read_predict, lambda: full('{"instances": [', '""', "]}")),
    "wrong instances": (read_predict, lambda: full('{"instances": [', "1", "]}")),
    "keys beside instances": (read_predict, lambda: distinct('{"instances": [], ', '"%d": 1', "}")),
}


# slow cases: most of their time is spent in the parser
SLOW = {
    "lists within lists",
    "questions with choices",
    "pairs, the last wrong",
    "sentences beside many keys",
    *("values in lists", "parameters", "keys beside instances", "tensors with many keys"),
    *("lists of ids of tokens", "sequences", "pairs", "documents", "questions", "unknown options", "unknown parameters"),
    *("unknown keys to rank by", "unknown keys of OpenAI's", "a pair with many keys", "a question with many keys", "labels"),
}


def parameters(names: Iterable[str]) -> list[Any]:
    """Returns the names as pytest parameters; `make test` skips the slow ones."""
    return [pytest.param(name, marks=[pytest.mark.full_grid] if name in SLOW else []) for name in names]


@pytest.mark.parametrize("name", parameters(TENSORS))
def test_the_largest_tensors_are_refused_with_little_work(models: Path, name: str) -> None:
    """Covers the protocols in which the model is known before the body is read."""
    read, make = TENSORS[name]
    body = make()
    assert BYTES // 2 < len(body) <= BYTES
    bundle = files.load_bundle(models / "tiny")
    model = SimpleNamespace(name="tiny", task=classify.TASK, tasks=[classify.TASK], bundle=bundle, graph=bundle.manifest.graphs[0])
    incoming: Incoming = Incoming(body, {}, model, SimpleNamespace(for_task=lambda task, name: model), LIMITS)
    caught: list[CallerError] = []

    def run() -> None:
        try:
            read(incoming)
        except CallerError as error:
            caught.append(error)

    assert calls_of(run) <= MOST_CALLS
    assert len(caught[0].message) < 600


def calls_of(action: Callable[[], Any]) -> int:
    """Returns how many Python and C functions are called while an action runs."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", parameters(BODIES))
def test_the_largest_bodies_are_refused_with_little_work(name: str) -> None:
    """A list of millions of items, or an error in each item, costs a bounded number of calls and reports few errors."""
    task, make = BODIES[name]
    body = make()
    assert BYTES // 2 < len(body) <= BYTES
    caught: list[CallerError] = []

    def read() -> None:
        try:
            read_as(TASKS[task].body if isinstance(task, str) else task, body, LIMITS)
        except CallerError as error:
            caught.append(error)

    assert calls_of(read) <= MOST_CALLS
    assert len(caught[0].message) < 600
    assert not isinstance(caught[0].__cause__, ValidationError) or caught[0].__cause__.error_count() <= 2


def test_labels_are_compared_in_one_pass() -> None:
    """To find that the last label is a duplicate, each label is looked up once."""
    compared = 0

    class Label(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, str(other))

        __hash__ = str.__hash__

    labels = [Label(i) for i in range(MAX_LABELS - 1)]
    with pytest.raises(ValidationError, match="`0`"):
        zero_shot.ZeroShotParameters(candidate_labels=[*labels, Label("0")])

    assert compared <= MAX_LABELS // 10  # the two equal labels, and a few hash collisions


@pytest.mark.parametrize(
    "labels", [[str(i) for i in range(MAX_LABELS + 1)], ",".join(map(str, range(MAX_LABELS + 1))), "a" + "," * MAX_LABELS]
)
def test_more_than_a_thousand_labels_are_refused(labels: Any) -> None:
    with pytest.raises(ValidationError, match=f"{MAX_LABELS} items"):
        zero_shot.ZeroShotParameters(candidate_labels=labels)


def test_a_huge_model_name_is_not_compared_in_full() -> None:
    def get(name: str) -> None:
        with pytest.raises(CallerError):
            Registry([], {}).get(name)

    assert calls_of(lambda: get("a" * 64)) == calls_of(lambda: get("a" * 10**6))
