"""Reads the input in a JSON object of a user's file, with the field names of the service and of GLUE."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertserve.export.errors import UsageError
from bertserve.service.errors import BertServeError
from bertserve.service.messages import SHOWN_CHARS, did_you_mean

JsonObject = dict[str, Any]
# the names of the two texts of a pair, in this project and in the data sets of GLUE
PAIRS = (("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"))
# the keys of each kind of input, in the order in which they are tried; the first key and, for pairs, the second one must exist
_FORMS = (("choices", "question", "prompt", "context"), *PAIRS, ("question", "context"), ("inputs",), ("text",), ("sentence",), ("tokens",))
# the keys of a line of data that contain its input
INPUT_KEYS = frozenset({"parameters"}.union(*_FORMS))


def read_input(document: JsonObject) -> Any:
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


def _input_keys(document: JsonObject) -> tuple[str, ...]:
    """Returns the keys of the input; `ValueError` as for `read_input`."""
    for keys in _FORMS:
        if keys[0] in document and (keys not in PAIRS or document.get(keys[1]) is not None):
            return keys
    for first, second in PAIRS:
        if first in document:
            raise ValueError(f"it has `{first}`, but no `{second}`.")
    for key in document:
        if key not in INPUT_KEYS and (hint := did_you_mean(key, ("inputs", "text", "tokens", "question"))):
            raise ValueError(f"it has no input, but `{key[:SHOWN_CHARS]}`; {hint}")
    raise ValueError(
        "it has no input; give `inputs`, `text`, `text` and `text_pair`, `tokens`, `question` and `context`, or `question` and `choices`."
    )


@contextmanager
def naming_line(path: Path, line: int | None) -> Iterator[None]:
    """Raises the errors of a line's values with its file and its number."""
    try:
        yield
    except (BertServeError, ValueError) as error:
        raise UsageError(f"`{path}` line {line}: {error}") from error


def read_text_list(document: JsonObject, name: str) -> list[str]:
    """Returns a field that is a list of texts."""
    value = document[name]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"`{name}` must be a list of texts.")
    return value
