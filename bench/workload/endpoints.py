"""The request body of each endpoint around the texts of a mix, and the number of texts in a body.

Most endpoints take `inputs`, a text or a list. `/rerank`, `/similarity` and `/zero-shot` have bodies of their own. They are recognized
by the last part of the path, so that they also work behind a proxy's prefix and with other servers of the same wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.errors import BenchError
from bench.workload import sentences

Body = dict[str, Any]
_SIMILARITY = "similarity"


def inputs_per_body(path: str, texts: int) -> int:
    """Returns how many inputs of a mix a body of `texts` texts takes; `/similarity` takes one more, the source sentence."""
    return texts + (_endpoint_name(path) == _SIMILARITY)


def request_body(path: str, index: int, inputs: Sequence[Any]) -> Body:
    """Returns one body.

    Args:
        path: Path of the endpoint, with or without a query.
        index: Index of the body in the load; the query of a rerank request changes with it.
        inputs: As many as `inputs_per_body` says, at least one. A single input is sent as itself if the endpoint also takes a list.

    Raises:
        BenchError: The endpoint takes texts, and the inputs are questions with passages.
    """
    name = _endpoint_name(path)
    if name in _BODY_OF and not all(isinstance(item, str) for item in inputs):
        raise BenchError(f"/{name} takes texts, not questions with passages; give another mix, or a file of texts or whole bodies.")
    return _BODY_OF.get(name, _inputs_body)(index, inputs)


def count_texts(value: Mapping[str, Any]) -> int:
    """Returns how many texts the model reads for a body.

    Each text of a rerank request counts as one, each sentence of a similarity request, and each pair of a text and a candidate label.
    """
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


def _endpoint_name(path: str) -> str:
    """Returns the last part of a path. It is empty for `/models/{name}`, where the last part is the name of a model."""
    *above, last = path.partition("?")[0].rstrip("/").split("/")
    return "" if above[-1:] == ["models"] else last


def _inputs_body(index: int, inputs: Sequence[Any]) -> Body:
    return {"inputs": inputs[0] if len(inputs) == 1 else list(inputs)}


def _rerank_body(index: int, inputs: Sequence[Any]) -> Body:
    return {"query": sentences.QUESTIONS[index % len(sentences.QUESTIONS)], "texts": list(inputs)}


def _similarity_body(index: int, inputs: Sequence[Any]) -> Body:
    source, *others = inputs
    return {"inputs": {"source_sentence": source, "sentences": others}}


def _zero_shot_body(index: int, inputs: Sequence[Any]) -> Body:
    return _inputs_body(index, inputs) | {"parameters": {"candidate_labels": list(sentences.LABELS)}}


_BODY_OF: Mapping[str, Callable[[int, Sequence[Any]], Body]] = {
    "rerank": _rerank_body,
    _SIMILARITY: _similarity_body,
    "zero-shot": _zero_shot_body,
}
