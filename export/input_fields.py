"""The input in a JSON object of a user's file: in `inputs`, or in fields of its own, as the service and the data sets of GLUE name them. Pure."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
# the two texts of a pair, as we and as the data sets of GLUE name them
PAIRS = (("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"))


def read_input(document: Document) -> Any:
    """Returns the input that an object holds, as the service takes it in `inputs`.

    Raises:
        ValueError: It holds none.
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
    raise ValueError(
        "it has no input; give `inputs`, `text`, `text` and `text_pair`, `tokens`, `question` and `context`, or `question` and `choices`."
    )


def read_text_list(document: Document, name: str) -> list[str]:
    """Returns a field that is a list of texts.

    Raises:
        ValueError: It is something else.
    """
    value = document[name]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"`{name}` must be a list of texts.")
    return value
