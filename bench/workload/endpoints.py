"""What a request to each endpoint looks like around the texts of a mix, and how many texts a body has.

Most endpoints take `inputs`, a text or a list. A query with texts, a sentence with others, and texts with candidate labels
have bodies of their own, known by the last part of the path, so that they work behind a proxy's prefix and with other
servers of the same wire format too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.errors import BenchError
from bench.workload import sentences

Body = dict[str, Any]
_SIMILARITY = "similarity"


def take(path: str, texts: int) -> int:
    """Returns how many inputs of a mix a body of so many texts takes: of sentences to compare, one more to compare them with."""
    return texts + (_name(path) == _SIMILARITY)


def body(path: str, number: int, inputs: Sequence[Any]) -> Body:
    """Returns one body.

    Args:
        path: The endpoint's, with or without a query.
        number: Which body of the load it is; the query of a rerank request changes with it.
        inputs: As many as `take` says, which is at least one; one alone is sent as itself where the endpoint takes a list or not.

    Raises:
        BenchError: The endpoint takes texts, and these are questions with passages.
    """
    name = _name(path)
    if name in _SHAPES and not all(isinstance(item, str) for item in inputs):
        raise BenchError(f"/{name} takes texts, not questions with passages; give another mix, or a file of texts or whole bodies.")
    return _SHAPES.get(name, _plain)(number, inputs)


def count(value: Mapping[str, Any]) -> int:
    """Returns how many texts a body has the model read: each text of a query, each pair of a text and a label, each sentence."""
    texts = value.get("texts")
    if isinstance(texts, list):
        return len(texts)
    inputs = value.get("inputs")
    if isinstance(inputs, dict) and isinstance(inputs.get("sentences"), list):
        return len(inputs["sentences"]) + 1
    parameters = value.get("parameters")
    labels = parameters.get("candidate_labels") if isinstance(parameters, dict) else None
    if isinstance(labels, str):
        labels = [label for label in labels.split(",") if label.strip()]
    return (len(inputs) if isinstance(inputs, list) else 1) * (len(labels) if isinstance(labels, list) else 1)


def _name(path: str) -> str:
    """Returns the last part of a path, empty for a model's own path: a model may have any name."""
    *above, last = path.partition("?")[0].rstrip("/").split("/")
    return "" if above[-1:] == ["models"] else last


def _plain(number: int, inputs: Sequence[Any]) -> Body:
    return {"inputs": inputs[0] if len(inputs) == 1 else list(inputs)}


def _rerank(number: int, inputs: Sequence[Any]) -> Body:
    return {"query": sentences.QUESTIONS[number % len(sentences.QUESTIONS)], "texts": list(inputs)}


def _similarity(number: int, inputs: Sequence[Any]) -> Body:
    source, *others = inputs
    return {"inputs": {"source_sentence": source, "sentences": others}}


def _zero_shot(number: int, inputs: Sequence[Any]) -> Body:
    return _plain(number, inputs) | {"parameters": {"candidate_labels": list(sentences.LABELS)}}


_SHAPES: Mapping[str, Callable[[int, Sequence[Any]], Body]] = {
    "rerank": _rerank,
    _SIMILARITY: _similarity,
    "zero-shot": _zero_shot,
}
