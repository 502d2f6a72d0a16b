"""Parts of messages: names, counts, suggestions, and the requirements of pydantic's errors."""

import difflib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from typing import Any
from urllib.parse import unquote, urlsplit

# Characters of a wrong name, path or key that are shown, and compared with the known ones. Comparing megabytes would take seconds.
SHOWN_CHARS = 64


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", *, name_format: str = "`{}`") -> str:
    """Returns a question with the known name that is most similar to a wrong one, or `otherwise` if none is similar.

    `name_format` is how the question writes the name.
    """
    similar = difflib.get_close_matches(name[:SHOWN_CHARS], list(names), n=1)
    return f"did you mean {name_format.format(similar[0])}?" if similar else otherwise


# Type of pydantic's error -> the requirement, where pydantic describes it with types of Python.
_REQUIREMENTS = {"model_type": "must be an object", "dict_type": "must be an object", "tuple_type": "must be a list"}


def requirement(error: Mapping[str, Any]) -> str:
    """Returns the requirement for a value from one of pydantic's errors, as a clause that begins with a small letter."""
    if error["type"] in _REQUIREMENTS:
        return _REQUIREMENTS[error["type"]]
    message = re.sub(r"\A\w+ should ", "must ", str(error["msg"]).removeprefix("Value error, ")).partition(" after validation")[0]
    return (message[:1].lower() + message[1:]).replace("must be False", "must be false")  # as in JSON and TOML


def describe_validation_error(error: Mapping[str, Any]) -> str:
    """Returns the wrong part of a document, and what it must be, from an error of pydantic."""
    location = f"`{'.'.join(map(str, error['loc']))}`" if error["loc"] else "the document"
    return f"{location}: {requirement(error)}"


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `1 row` or `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quote_names(names: Iterable[str]) -> str:
    """Returns names for a message, or `none`."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def install_command(*extras: str) -> str:
    """Returns the command that installs extras, from the folder or wheel of this installation, or from a clone in the working directory.

    It never gives only the package's name: no index contains bertserve, so anyone could publish a package of that name.
    """
    origin = json.loads(distribution("bertserve").read_text("direct_url.json") or "{}").get("url", "")
    path = unquote(urlsplit(origin).path) if origin.startswith("file:") else ""
    source = path if os.path.exists(path) else "."
    return f"pip install {shlex.quote(source + '[' + ','.join(extras) + ']')}"
