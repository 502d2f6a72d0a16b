"""What a body that is no JSON looks like, and what to send in its place. Knows no HTTP: it goes by the bytes, whatever a header says of them."""

from __future__ import annotations

import codecs
import json
import re

from bertserve.service.errors import InvalidValueError, MalformedRequestError
from bertserve.service.tasks.body import TaskBody
from bertserve.service.wire.keys import listed, required

_HEAD = 1024  # bytes that are looked at
_FORM = re.compile(rb"\s*[A-Za-z0-9_.%+\[\]-]+=")
_LINES = re.compile(rb"\{[^\n]*\}[ \t\r]*(\n\s*\{|\{)")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def no_json(raw: bytes, reason: str, body: type[TaskBody] | None) -> MalformedRequestError:
    """Returns the error of a body that is no JSON.

    Args:
        raw: The body.
        reason: What the parser says of it.
        body: The class of body that was expected; None where it is not one of a task.
    """
    example = "" if body is None else f", such as {example_of(body)}"
    return MalformedRequestError("the body is not valid JSON: {detail}; send JSON{example}.", detail=_looks(raw) or reason, example=example)


def no_object(value: object, body: type[TaskBody]) -> InvalidValueError:
    """Returns the error of a body that is JSON, but no object: most often the inputs alone."""
    kinds = {str: "a text", list: "a list", bool: "a truth value", int: "a number", float: "a number"}
    return InvalidValueError(
        "the body is {get}, and must be an object with {known}, such as {example_of}.",
        get=kinds.get(type(value), "null"),
        known=listed(required(body)),
        example_of=example_of(body),
    )


def example_of(body: type[TaskBody]) -> str:
    """Returns a body as JSON."""
    return json.dumps(body.example())


def _looks(raw: bytes) -> str | None:
    """Returns what a body that is no JSON seems to be, if it is something that clients send by mistake."""
    head = raw[:_HEAD].lstrip()
    signs = {
        "it is empty": not head and len(raw) <= _HEAD,
        "it is compressed (gzip)": head.startswith(b"\x1f\x8b"),
        "it begins with a byte order mark, which must be left out": head.startswith(codecs.BOM_UTF8),
        "it looks like UTF-16, and must be UTF-8": head.startswith(_UTF16) or b"\0" in head[:4],
        "it looks like form data (multipart/form-data)": head.startswith(b"--") and b"form-data" in head.lower(),
        "it looks like form data (application/x-www-form-urlencoded)": _FORM.match(head) is not None,
        "it looks like JSON Lines, which take the header `content-type: application/x-ndjson`": _LINES.match(head) is not None,
        'it has single quotes, where JSON has double ones (")': head.startswith(b"'") or re.match(rb"[\[{]\s*'", head) is not None,
    }
    return next((sign for sign, seen in signs.items() if seen), None)
