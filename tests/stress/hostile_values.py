"""JSON values that are large, deeply nested, numerous or hard to parse. Each of them can replace the value of any field in a body."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from bertserve.service.settings import Settings
from bertserve.service.tasks.body import MAX_ITEMS

MAX_CHARS: int = Settings.model_fields["max_chars"].default
MAX_BODY: int = Settings.model_fields["max_body_bytes"].default
MAX_INPUTS: int = Settings.model_fields["max_inputs"].default
ROOM = MAX_BODY - 4096  # maximum bytes of a value; 4096 bytes are for the rest of the body
BATCH_CHARS = 3700  # of each text, in a body with MAX_INPUTS such texts and one text of MAX_CHARS
WORDS = "the river is long and wide but nobody has ever seen where it ends because fog lies on it all year".split()


def prose(chars: int) -> str:
    """Returns a text with this number of characters: words in random order."""
    words = random.Random(chars).choices(WORDS, k=chars // 3)
    return " ".join(words)[:chars]


def repeated(unit: str, chars: int = MAX_CHARS) -> str:
    """Returns a unit repeated up to this number of characters."""
    return unit * (chars // len(unit))


# name -> unit that is repeated to a text of MAX_CHARS; the text can be hard for a tokenizer, a regular expression or an encoder
TEXT_UNITS: dict[str, str] = {
    "one word": "a",
    "words of a letter": "a ",
    "masks": "[MASK] ",
    "masks without a space": "[MASK]",
    "special tokens": "[CLS][SEP][PAD][UNK]",
    "newlines": "\n",
    "spaces": " ",
    "punctuation": "?!.,",
    "half of a special token": "[MAS",
    "combining characters": "e\u0301\u0302\u0303\u0304",
    "one letter under accents": "\u0301",
    "families of emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "right to left": "\u202e\u05d0\u0628 ",
    "ideographs": "\u4e2d",
    "hangul that comes apart": "\uac01",
    "ligatures": "\ufdfa",
    "controls": "\u0001\u0000\u007f",
    "surrogates": "\ud800",
    "digits": "1",
    "hashes": "##a",
    "no word of any vocabulary": "\u2603\u0f3c ",
}


@functools.cache
def text_values() -> tuple[bytes, ...]:
    """Returns texts of the maximum length, one of each kind, and a text with one character more, all as JSON."""
    texts = [repeated(unit) for unit in TEXT_UNITS.values()]
    return tuple(json.dumps(text).encode() for text in [*texts, prose(MAX_CHARS), prose(MAX_CHARS + 1)])


def listed(item: bytes, size: int = ROOM) -> bytes:
    """Returns a JSON list that repeats an item as often as it fits into `size` bytes."""
    return b"[" + (item + b",") * (size // (len(item) + 1) - 1) + item + b"]"


def _many_keys() -> bytes:
    pairs = (b'"%x":0' % number for number in range(ROOM // 11))
    return b"{" + b",".join(pairs) + b"}"


# name -> function that returns a value that is invalid for any field; most have megabytes, so they are built on demand
ANY: dict[str, Callable[[], bytes]] = {
    "empty lists": lambda: listed(b"[]"),
    "lists of empty lists": lambda: listed(b"[[]]"),
    "empty objects": lambda: listed(b"{}"),
    "objects of a key": lambda: listed(b'{"":0}'),
    "numbers": lambda: listed(b"1"),
    "fractions": lambda: listed(b"1e-7"),
    "nulls": lambda: listed(b"null"),
    "empty texts": lambda: listed(b'""'),
    "an object of many keys": _many_keys,
    "one text of the whole body": lambda: b'"' + b"a" * ROOM + b'"',
    "one text of escapes": lambda: b'"' + rb"\u0000" * (ROOM // 6) + b'"',
    "one text of lone surrogates": lambda: b'"' + rb"\ud800" * (ROOM // 6) + b'"',
    "lists in lists": lambda: b"[" * (ROOM // 2) + b"]" * (ROOM // 2),
    "lists in lists to the parser's limit": lambda: listed(b"[" * 190 + b"]" * 190),
    "objects in objects": lambda: b'{"a":' * (ROOM // 6) + b"1" + b"}" * (ROOM // 6),
    "an integer of 4,001 digits": lambda: b"1" + b"0" * 4000,
    "an integer of a million digits": lambda: b"1" * 1_000_000,
    "a fraction of a million digits": lambda: b"0." + b"1" * 1_000_000,
    "an exponent": lambda: b"1e" + b"9" * 1000,
    "integers of 4,001 digits": lambda: listed(b"1" + b"0" * 4000),
}


@functools.lru_cache(maxsize=32)
def any_value(name: str) -> bytes:
    """Returns the value of ANY with this name."""
    return ANY[name]()


def values_of_schema(schema: dict[str, Any]) -> Iterator[bytes]:
    """Yields, as JSON, values at the limits of a JSON schema and one beyond them, and long texts if it accepts strings."""
    for kind in _kinds(schema):
        if kind.get("type") == "string" and "enum" not in kind:
            yield from text_values()
            if "maxLength" in kind:
                yield from (json.dumps(prose(kind["maxLength"] + more)).encode() for more in (0, 1))
        if kind.get("type") == "integer":
            edges = [
                2**31,
                2**63 - 1,
                2**64,
                -1,
                0,
                *(kind[name] + more for name in ("maximum", "minimum") if name in kind for more in (-1, 0, 1)),
            ]
            yield from (json.dumps(edge).encode() for edge in edges)
        if kind.get("type") == "array":
            most = kind.get("maxItems", MAX_ITEMS)
            for count in {most, most + 1, MAX_INPUTS, MAX_INPUTS + 1}:
                yield from (json.dumps([item] * count).encode() for item in ("good film", 1, {}))
            yield json.dumps([prose(ROOM // MAX_INPUTS)] * MAX_INPUTS).encode()


def _kinds(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    members = schema.get("anyOf") or schema.get("oneOf")
    if not members:
        yield schema
        return
    for member in members:
        yield from _kinds(member)
