"""JSON: limits on documents, which are parsed on the event loop, and results as JSON. It depends neither on tasks nor on HTTP.

A vector stays a numpy array until here: orjson writes it without creating a Python float per number.
"""

from base64 import b64encode
from datetime import timedelta
from typing import Any

import numpy as np
import orjson

from bertserve.service.errors import TooLargeError

# Limits of a body outside of its strings. 16,384 texts or pairs, and 256 texts of 512 token ids, are below them.
JSON_LIMITS = ((b"[{", 2**16, "lists and objects"), (b":", 2**16, "keys"), (b",", 2**18, "values"), (b"0123456789", 5 * 2**18, "digits"))
MIN_CHECKED_BYTES = min(limit for _, limit, _ in JSON_LIMITS)  # a shorter body is below all limits


def check_size(raw: bytes) -> None:
    """Checks a JSON document, which can be invalid, before it is parsed.

    Raises:
        TooLargeError: It contains more lists, objects, keys, values or digits than are allowed.
    """
    if any(_count(raw, characters) > limit for characters, limit, _ in JSON_LIMITS):
        codes = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        quotes = np.cumsum(codes == ord('"'), dtype=np.uint8)  # modulo 256, which preserves the parity
        outside = codes[quotes & 1 == 0].tobytes()  # the text without the content of strings
        for characters, limit, unit in JSON_LIMITS:
            if (count := _count(outside, characters)) > limit:
                raise TooLargeError(
                    "the body has {count} {what} and {most} are allowed; split the request.", count=count, what=unit, most=limit
                )


def _count(raw: bytes, characters: bytes) -> int:
    return sum(raw.count(character) for character in characters)


def to_json(value: Any) -> bytes:
    """Returns a value as JSON: dicts, lists, strings, numbers and numpy arrays; float32 numbers get as many digits as they need.

    Times are in ISO 8601, and bytes in base64.

    Raises:
        TypeError: It contains an integer of more than 64 bits.
    """
    return orjson.dumps(value, default=_to_text, option=orjson.OPT_SERIALIZE_NUMPY)


def _to_text(value: Any) -> str:
    """Returns bytes in base64, and a duration in ISO 8601 as seconds. Parquet has both, and JSON lacks them."""
    if isinstance(value, timedelta):
        seconds = f"{abs(value).total_seconds():f}".rstrip("0").removesuffix(".")
        return f"{'-' if value < timedelta() else ''}PT{seconds}S"
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError


def to_plain(value: Any) -> Any:
    """Returns a value as a client reads it, with lists instead of arrays."""
    return orjson.loads(to_json(value))
