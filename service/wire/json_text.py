"""Parses JSON in limited time, because it runs on the event loop, and writes results as JSON. It depends neither on tasks nor on HTTP.

A vector stays a numpy array until here: orjson writes it without creating a Python float per number.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
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
# Length of the pieces of a long document, and of its parts that orjson writes at once; a part keeps the GIL for less than a millisecond.
PIECE_BYTES = 2**16
_PART_BYTES = 2**15
# Typical length of a number, a short text or an orjson fragment.
_VALUE_BYTES = 16


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


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yields the bytes of `to_json` in pieces of at most PIECE_BYTES, or one long text: orjson keeps the GIL for 40 ms per 10 MB.

    Nothing joins the pieces: on busy cores, copying them into new memory takes about as long as writing them.
    """
    parts: list[bytes | memoryview] = []
    size = 0
    for part in _parts(value):
        if size + len(part) > PIECE_BYTES and parts:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    yield b"".join(parts)


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, dict) and value:
        start = b"{"
        for key, item in value.items():
            yield start + to_json(key) + b":"
            yield from _parts(item)
            start = b","
        yield b"}"
    elif isinstance(value, list | np.ndarray) and len(value) > 0:
        step = _PART_BYTES // max(_length(item) for item in value[:: 1 + len(value) // 2**10])
        for first in range(0, len(value), step or 1):
            yield b"," if first else b"["
            if step:
                yield memoryview(to_json(value[first : first + step]))[1:-1]
            else:
                yield from _parts(value[first])
        yield b"]"
    else:
        yield to_json(value)


def _length(value: Any) -> int:
    """Returns about how many bytes a value has as JSON. It looks only at some items of a list."""
    if isinstance(value, np.ndarray):
        return _VALUE_BYTES * max(value.size, 1)
    if isinstance(value, list):
        return len(value) * max(map(_length, value[:: 1 + len(value) // 8])) + 1 if value else 1
    if isinstance(value, dict):
        return sum(map(_length, value.values())) + _VALUE_BYTES * len(value) + 1
    return max(len(value), _VALUE_BYTES) if isinstance(value, str | FilledText) else _VALUE_BYTES


def fragment(data: bytes) -> Any:
    """Returns a JSON document as a value that `to_json` copies into its output."""
    return orjson.Fragment(data)


def to_plain(value: Any) -> Any:
    """Returns a value as a client reads it, with lists instead of arrays."""
    return orjson.loads(to_json(value))
