"""Results as JSON. A vector stays a numpy array up to here: orjson writes it without a Python float for each number."""

from __future__ import annotations

from typing import Any

import orjson


def to_json(value: Any) -> bytes:
    """Returns a value as JSON: dicts, lists, texts, numbers and numpy arrays of them, whose float32 are written with the digits they need."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def written(value: Any) -> Any:
    """Returns a value of JSON as what `to_json` puts into its output as it is.

    Raises:
        TypeError: It has an integer of more than 64 bits.
    """
    return orjson.Fragment(to_json(value))


def to_plain(value: Any) -> Any:
    """Returns a value as a client reads it: arrays are lists."""
    return orjson.loads(to_json(value))
