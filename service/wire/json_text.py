"""JSON to values in bounded time, because the event loop waits for it, and results to JSON. It does not depend on tasks or HTTP.

A vector stays a numpy array up to here: orjson writes it without a Python float for each number.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
from pydantic_core import from_json

from bertserve.service.errors import TooLargeError

# Limits of a body, not counting the content of its texts. 16,384 inputs of any task stay below them.
MAX_CONTAINERS = 2**16
MAX_KEYS = 2**18
MAX_VALUES = 2**21
_LIMITS = ((b"[{", MAX_CONTAINERS, "lists and objects"), (b":", MAX_KEYS, "keys"), (b",", MAX_VALUES, "values"))
# A smaller body makes too few objects for garbage collection to matter.
_COLLECTED_BYTES = 4096
# Counting takes a dozen times the memory of a block.
_BLOCK_BYTES = 2**19


def parse(raw: bytes, *, finite: bool = False) -> Any:
    """Returns the value of a JSON document.

    Args:
        raw: The document.
        finite: Whether `NaN` and `Infinity`, which JSON does not have, are errors here; otherwise they are numbers, which no field takes.

    Raises:
        ValueError: It is not JSON.
        TooLargeError: It has more lists, objects, keys or values than are allowed.
    """
    if len(raw) > MAX_CONTAINERS:
        _check_size(raw)
    if len(raw) <= _COLLECTED_BYTES:
        return from_json(raw, allow_inf_nan=not finite)
    with _no_collection():
        return from_json(raw, allow_inf_nan=not finite)


def _check_size(raw: bytes) -> None:
    """Refuses a document that would take long to parse, by the bytes of its structure."""
    over = [limit for limit in _LIMITS if sum(raw.count(byte) for byte in limit[0]) > limit[1]]
    if not over:
        return
    counts = _outside_texts(raw)
    for structure, most, what in over:
        if (count := int(sum(counts[byte] for byte in structure))) > most:
            raise TooLargeError("the body has {count} {what} and {most} are allowed; split the request.", count=count, what=what, most=most)


def _outside_texts(raw: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns how often each byte occurs outside of texts, int64 [256]; in vectors, so that the time does not depend on the content."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    counts, inside = np.zeros(256, np.int64), 0
    for start in range(0, len(plain), _BLOCK_BYTES):
        codes = np.frombuffer(plain, np.uint8, min(_BLOCK_BYTES, len(plain) - start), start)
        quotes = np.cumsum(codes == ord('"'), dtype=np.uint8) + np.uint8(inside)  # modulo 256, which keeps it odd or even
        counts += np.bincount(codes[quotes & 1 == 0], minlength=256)
        inside = int(quotes[-1] & 1)
    return counts


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses the garbage collector: it finds nothing while a document is parsed, and traverses each new object several times."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


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
