"""Reads the input in a JSON object of a user's file, with the field names of the service and of GLUE."""

from __future__ import annotations

from typing import Any

from bertserve.service.errors import SHOWN_CHARS, did_you_mean

Document = dict[str, Any]
# the names of the two texts of a pair, in this project and in the data sets of GLUE
PAIRS = (("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"))
# the keys of a line of data that contain its input
INPUT_KEYS = frozenset({"inputs", "parameters", "question", "prompt", "context", "choices", "text", "sentence", "tokens"}.union(*PAIRS))


def read_input(document: Document) -> Any:
    """Returns the input of an object, in the service's format of `inputs`.

    Raises:
        ValueError: The object has no input.
    """
    if "inputs" in document:
        return document["inputs"]
    if "choices" in document:
        return {name: document[name] for name in ("question", "prompt", "context", "choices") if name in document}
    for first, second in PAIRS:
        if first in document and document.get(second) is not None:
            return {"text": document[first], "text_pair": document[second]}
    if "question" in document:
        return {name: document.get(name) for name in ("question", "context")}
    for name in ("text", "sentence"):
        if name in document:
            return document[name]
    if "tokens" in document:
        return " ".join(read_text_list(document, "tokens"))
    for key in document:
        if key not in INPUT_KEYS and (hint := did_you_mean(key, ("inputs", "text", "tokens", "question"))):
            raise ValueError(f"it has no input, but `{key[:SHOWN_CHARS]}`; {hint}")
    raise ValueError(
        "it has no input; give `inputs`, `text`, `text` and `text_pair`, `tokens`, `question` and `context`, or `question` and `choices`."
    )


def read_text_list(document: Document, name: str) -> list[str]:
    """Returns a field that is a list of texts."""
    value = document[name]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"`{name}` must be a list of texts.")
    return value
