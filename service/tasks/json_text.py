"""Parses JSON in limited time, because it runs on the event loop, and writes results as JSON. It depends neither on tasks nor on HTTP.

A vector stays a numpy array until here: orjson writes it without creating a Python float per number.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import orjson
from pydantic_core import from_json

from bertserve.service.errors import TooLargeError
from bertserve.service.text.filling import FilledText

# Limits of a body outside of its strings. 16,384 texts or pairs, and 256 texts of 512 token ids in two tensors, are below them.
MAX_CONTAINERS = 2**16
MAX_KEYS = 2**16
MAX_VALUES = 2**18
MAX_DIGITS = 5 * 2**18  # five for each value, as token ids have
_LIMITS = (
    (b"[{", MAX_CONTAINERS, "lists and objects"),
    (b":", MAX_KEYS, "keys"),
    (b",", MAX_VALUES, "values"),
    (b"0123456789", MAX_DIGITS, "digits"),
)
# A smaller body creates too few objects for garbage collection to matter.
_COLLECTED_BYTES = 4096
# Counting needs about twelve times the memory of a block.
_BLOCK_BYTES = 2**19


def parse(raw: bytes, *, finite: bool = False) -> Any:
    """Parses a JSON document.

    With `finite`, `NaN` and `Infinity`, which are not valid JSON, are errors; otherwise they become numbers, which no field accepts.

    Raises:
        ValueError: The document is not JSON.
        TooLargeError: It has more lists, objects, keys, values or digits than are allowed.
    """
    if len(raw) > MAX_CONTAINERS:
        _check_size(raw)
    if len(raw) <= _COLLECTED_BYTES:
        return from_json(raw, allow_inf_nan=not finite)
    is_enabled = gc.isenabled()
    gc.disable()  # it would find nothing during parsing, and traverse each new object several times
    try:
        return from_json(raw, allow_inf_nan=not finite)
    finally:
        if is_enabled:
            gc.enable()


def _check_size(raw: bytes) -> None:
    """Refuses a document that would take long to parse, by the number of its structural characters and digits."""
    codes = np.frombuffer(raw, np.uint8)  # numpy counts in a third of the time of `bytes.count`
    over = [limit for limit in _LIMITS if sum(np.count_nonzero(codes == byte) for byte in limit[0]) > limit[1]]
    if not over:
        return
    counts = _outside_texts(raw)
    for structure, limit, unit in over:
        if (count := int(sum(counts[byte] for byte in structure))) > limit:
            raise TooLargeError(
                "the body has {count} {what} and {most} are allowed; split the request.", count=count, what=unit, most=limit
            )


def _outside_texts(raw: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the count of each byte outside of strings, int64 [256]. It is vectorized, so its time does not depend on the content."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    counts, inside = np.zeros(256, np.int64), 0
    for start in range(0, len(plain), _BLOCK_BYTES):
        codes = np.frombuffer(plain, np.uint8, min(_BLOCK_BYTES, len(plain) - start), start)
        quotes = np.cumsum(codes == ord('"'), dtype=np.uint8) + np.uint8(inside)  # modulo 256, which preserves the parity
        counts += np.bincount(codes[quotes & 1 == 0], minlength=256)
        inside = int(quotes[-1] & 1)
    return counts


def to_json(value: Any) -> bytes:
    """Returns a value as JSON: dicts, lists, strings, numbers and numpy arrays; float32 numbers have as many digits as they need.

    Raises:
        TypeError: It has an integer of more than 64 bits.
    """
    return orjson.dumps(value, default=_to_known, option=orjson.OPT_SERIALIZE_NUMPY)


def _to_known(value: Any) -> str:
    """Returns a value of a type that orjson does not know as one that it does."""
    if isinstance(value, FilledText):
        return str(value)
    raise TypeError


def to_plain(value: Any) -> Any:
    """Returns a value as a client reads it, with lists instead of arrays."""
    return orjson.loads(to_json(value))
