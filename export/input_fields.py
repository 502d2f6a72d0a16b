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
        ValueError: The object has no input, or several.
    """
    keys = _input_keys(document)
    # a text can come with its words
    unused = [key for key in document if key in INPUT_KEYS - {*keys, "parameters", "tokens"} and document[key] is not None]
    if unused:
        raise ValueError(f"it has `{keys[0]}`, and also `{unused[0]}`; give one input.")
    if keys in PAIRS:
        return {"text": document[keys[0]], "text_pair": document[keys[1]]}
    if keys == ("tokens",):
        return " ".join(read_text_list(document, "tokens"))
    return document[keys[0]] if len(keys) == 1 else {name: document[name] for name in keys if name in document}


def _input_keys(document: Document) -> tuple[str, ...]:
    """Returns the keys of the input; `ValueError` as for `read_input`."""
    if "choices" in document:
        return ("choices", "question", "prompt", "context")
    for first, second in PAIRS:
        if first in document and document.get(second) is not None:
            return (first, second)
    if "question" in document:
        return ("question", "context")
    for key in ("inputs", "text", "sentence", "tokens"):
        if key in document:
            return (key,)
    for first, second in PAIRS:
        if first in document:
            raise ValueError(f"it has `{first}`, but no `{second}`.")
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
