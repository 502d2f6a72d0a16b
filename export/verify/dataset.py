"""Reads a user's data for `bert-export verify --data`: JSONL, one request a line, with or without the right answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertserve.export.errors import DataError
from bertserve.export.evidence.metrics import Span, spans_of_tags
from bertserve.export.input_fields import Document, read_input, read_text_list
from bertserve.service.errors import BertServeError
from bertserve.service.tasks import choose
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.tasks.decoding.tag_schemes import scheme_of
from bertserve.service.wire.reading import Limits, read_body

MAX_CHARS = 10**8


@dataclass(frozen=True)
class Entities:
    """The right entities of a text.

    Attributes:
        spans: The entities.
        words: Start and end of the words that were tagged, or none if the spans are exact to the character.
    """

    spans: set[Span]
    words: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Line:
    """One line of the data.

    Attributes:
        number: Its number in the file, from 1.
        request: A request of the service's task.
        gold: The right answer, or None. Of text classification the set of right labels or, for regression, a number; of
            token classification its entities; of question answering a list of texts, empty where there is no answer; of
            fill-mask a list with the word of each mask; of multiple choice the index of the right choice.
    """

    number: int
    request: Any
    gold: Any


def read_dataset(path: Path, task: str, config: ModelConfig) -> list[Line]:
    """Reads JSONL: `{"inputs": ..., "parameters"?: ...}` as the service takes it, or the fields of one input, and the right answer.

    If the right answers need it and a line does not say otherwise, entities are made of words (`aggregation_strategy:
    "first"`), and questions may have no answer (`handle_impossible_answer`, if the data has such questions).

    Args:
        path: The file; empty lines are skipped.
        task: Hugging Face name of the bundle's task.
        config: The bundle's labels, and for embeddings how its vectors are computed.

    Raises:
        DataError: The file cannot be read, or a line is not understood; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may contain other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` cannot be read: {error}.") from error
    documents = [(number, _parse_line(path, number, line)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not documents:
        raise DataError(f"`{path}` holds no line; give a JSON object a line, such as {json.dumps({'inputs': 'a text'})}.")
    impossible = any(document.get("answers") in ([], {"text": []}, {"text": [], "answer_start": []}) for _, document in documents)
    dataset = []
    for number, document in documents:
        try:
            gold = READERS[task](document, config.labels) if task in READERS else None
            if isinstance(gold, frozenset) and len(gold) != 1 and config.activation != "sigmoid":
                raise ValueError(f"`label` has {len(gold)} labels, and those of the model exclude each other; give one.")
            dataset.append(Line(number, _request(task, document, _default_parameters(task, gold, impossible), config), gold))
        except (BertServeError, ValueError) as error:
            raise DataError(f"`{path}` line {number}: {error}") from error
    return dataset


def _parse_line(path: Path, number: int, line: str) -> Document:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DataError(f"`{path}` line {number} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise DataError(f"`{path}` line {number} is no JSON object; give one such as {json.dumps({'inputs': 'a text'})}.")
    return document


def _default_parameters(task: str, gold: Any, impossible: bool) -> Document:
    if task == "token-classification" and gold is not None:
        return {"aggregation_strategy": "first"}
    return {"handle_impossible_answer": True} if task == "question-answering" and impossible else {}


def _request(task: str, document: Document, defaults: Document, config: ModelConfig) -> Any:
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError("`parameters` must be an object.")
    inputs = read_input(document)
    if isinstance(inputs, list):
        raise ValueError("`inputs` is a list; give one input a line.")
    # vectors are compared as numbers, whatever encoding a line asks for
    fixed = {"encoding_format": "float"} if task == "feature-extraction" else {}
    raw = json.dumps({"inputs": inputs, "parameters": defaults | parameters | fixed}).encode()
    (request,) = read_body(task, raw, Limits(max_inputs=choose.MAX_CHOICES, max_chars=MAX_CHARS)).requests(config)
    return request


def _read_label(document: Document, labels: Sequence[str]) -> Any:
    """Reads `label`: a name, an id, a list of these for several labels, or the number of a regression."""
    value = document.get("label")
    if value is None:
        return None
    if len(labels) == 1:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"`label` must be a number, for the model has one label; it is {json.dumps(value)}.")
        return float(value)
    return frozenset(_label_name(item, labels) for item in (value if isinstance(value, list) else [value]))


def _label_name(value: Any, labels: Sequence[str]) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        return labels[value]
    if value not in labels:
        raise ValueError(f"`label` is {json.dumps(value)}; the model has {', '.join(labels)}, or their ids from 0.")
    return str(value)


def _read_entities(document: Document, labels: Sequence[str]) -> Entities | None:
    """Reads `entities`, a list of `{start, end, label}`, or `tags`, one for each of the `tokens`."""
    if document.get("entities") is not None:
        try:
            return Entities({(int(e["start"]), int(e["end"]), str(e.get("label", e.get("entity_group")))) for e in document["entities"]})
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError("`entities` must be a list of {start, end, label}, offsets in code points, end exclusive.") from error
    if document.get("tags") is None:
        return None
    if "tokens" not in document:
        raise ValueError("`tags` need `tokens`, the words that they are for.")
    tags, words = read_text_list(document, "tags"), read_text_list(document, "tokens")
    if len(tags) != len(words):
        raise ValueError(f"there are {len(tags)} `tags` for {len(words)} `tokens`.")
    text = read_input(document)
    offsets, end = [], 0
    for word in words:
        start = text.find(word, end) if isinstance(text, str) else -1
        if start < 0:
            raise ValueError(f"the token {json.dumps(word)} is not in the text where it belongs.")
        end = start + len(word)
        offsets.append((start, end))
    plain = labels if scheme_of(tuple(labels)) == "plain" else ()
    return Entities(spans_of_tags(tags, offsets, plain=plain), offsets)


def _read_answers(document: Document, labels: Sequence[str]) -> list[str] | None:
    """Reads `answers`: texts, or as in SQuAD's files `{text: [...], answer_start: [...]}` or a list of `{text}`."""
    answers = document.get("answers")
    if answers is None:
        return None
    if isinstance(answers, dict):
        answers = answers.get("text")
    texts = [item.get("text") if isinstance(item, dict) else item for item in answers] if isinstance(answers, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("`answers` must be a list of texts, or SQuAD's {text: [...]}; an empty one means that there is no answer.")
    return [str(text) for text in texts]


def _read_choice(document: Document, labels: Sequence[str]) -> int | None:
    """Reads `label`: the index of the right choice, or the choice itself."""
    label, inputs = document.get("label"), read_input(document)
    if label is None:
        return None
    choices = inputs.get("choices") if isinstance(inputs, dict) else None
    if not isinstance(choices, list):
        raise ValueError("it has a `label` and no `choices`, of which it would be one.")
    if isinstance(label, str) and choices.count(label) == 1:
        return choices.index(label)
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(choices):
        raise ValueError(f"`label` is {json.dumps(label)}; it must be one of the {len(choices)} choices, or its index from 0.")
    return label


def _read_target(document: Document, labels: Sequence[str]) -> list[str] | None:
    """Reads `target`: the word of the mask, or a list with that of each."""
    target = document.get("target")
    if target is None:
        return None
    words = [target] if isinstance(target, str) else target
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("`target` must be a word, or a list with one for each mask.")
    return words


READERS: dict[str, Callable[[Document, Sequence[str]], Any]] = {
    "text-classification": _read_label,
    "token-classification": _read_entities,
    "question-answering": _read_answers,
    "fill-mask": _read_target,
    "multiple-choice": _read_choice,
}
