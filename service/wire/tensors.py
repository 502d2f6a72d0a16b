"""Tensors of the Open Inference Protocol, in JSON and in its binary form: those of a request, and those of an answer.

A tensor of a request is a description at first. Its values are read by who has looked at its shape, so that a shape costs nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.errors import InvalidValueError
from bertserve.service.wire.reading import show

_INTEGERS: dict[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4"), "BOOL": np.dtype("?")}
_LENGTH_BYTES = 4  # before each element of a binary BYTES tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a request, of which the values were not read yet.

    Attributes:
        name: Its name.
        datatype: Its datatype.
        shape: Its axes.
        data: A list, flat or nested, or the bytes of the binary form.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | memoryview

    @property
    def count(self) -> int:
        """How many values the shape says that there are."""
        return math.prod(self.shape)

    def texts(self) -> list[str]:
        """Returns the texts of a BYTES tensor, flat.

        Raises:
            InvalidValueError: It is of another datatype, there are more or fewer than the shape says, or one is no UTF-8.
        """
        if self.datatype != "BYTES":
            raise InvalidValueError(
                "`{name}` is {datatype}, and texts are BYTES; send it as BYTES.", name=self.name, datatype=self.datatype
            )
        if isinstance(self.data, memoryview):
            return self._decoded(self.data)
        flat = self._flat(self.data)
        wrong = next((value for value in flat if not isinstance(value, str)), None)
        if wrong is not None or None in flat:
            raise InvalidValueError(
                "`{name}` is BYTES, so each value in its `data` is a text; one is {wrong}.", name=self.name, wrong=show(wrong)
            )
        return flat

    def integers(self, *datatypes: str) -> NDArray[np.int64]:
        """Returns the values of a tensor of integers or booleans, in its shape.

        Args:
            datatypes: Those that it may be of: INT64, INT32, BOOL.

        Raises:
            InvalidValueError: It is of another datatype, or there are more or fewer than the shape says.
        """
        if self.datatype not in datatypes:
            raise InvalidValueError(
                "`{name}` is {datatype}; it may be {names}.", name=self.name, datatype=self.datatype, names=" or ".join(datatypes)
            )
        dtype = _INTEGERS[self.datatype]
        if isinstance(self.data, memoryview):
            if len(self.data) != self.count * dtype.itemsize:
                raise InvalidValueError(
                    "`{name}` has {data_count} bytes, and {datatype} of the shape {shape} has {count}.",
                    name=self.name,
                    data_count=len(self.data),
                    datatype=self.datatype,
                    shape=list(self.shape),
                    count=self.count * dtype.itemsize,
                )
            found: NDArray[np.int64] = np.frombuffer(self.data, dtype).reshape(self.shape).astype(np.int64)
            return found
        flat = self._flat(self.data)
        kinds = (bool, int) if self.datatype == "BOOL" else (int,)
        wrong = next((value for value in flat if type(value) not in kinds), 0)
        if wrong or wrong is None or type(wrong) not in kinds:
            raise InvalidValueError(
                "`{name}` is {datatype}, and a value in its `data` is {wrong}.", name=self.name, datatype=self.datatype, wrong=show(wrong)
            )
        try:
            return np.array(flat, np.int64).reshape(self.shape)
        except OverflowError:
            raise InvalidValueError(
                "`{name}` is {datatype}, and a value in its `data` is greater than that holds.", name=self.name, datatype=self.datatype
            ) from None

    def _flat(self, data: list[Any]) -> list[Any]:
        """Returns the values of `data`, which may be nested as the shape is."""
        nested = len(self.shape) == 2 and bool(data) and isinstance(data[0], list)
        if nested and not (len(data) == self.shape[0] and all(isinstance(row, list) and len(row) == self.shape[1] for row in data)):
            raise InvalidValueError(
                "`data` of `{name}` is nested otherwise than its shape {shape} says.", name=self.name, shape=list(self.shape)
            )
        flat = list(itertools.chain.from_iterable(data)) if nested else data
        if len(flat) != self.count:
            raise InvalidValueError(
                "`data` of `{name}` has {flat_count} values, and its shape {shape} is of {count}.",
                name=self.name,
                flat_count=len(flat),
                shape=list(self.shape),
                count=shown_count(self.count),
            )
        return flat

    def _decoded(self, data: memoryview) -> list[str]:
        """Returns the texts of the binary form: each after its length, 4 bytes little-endian."""
        texts, at = [], 0
        if self.count * _LENGTH_BYTES > len(data):  # before the loop: a shape is cheap to write
            raise self._misfit(len(data))
        for _ in range(self.count):
            start = at + _LENGTH_BYTES
            at = start + int.from_bytes(data[at:start], "little")
            if start > len(data) or at > len(data):
                raise self._misfit(len(data))
            try:
                texts.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                raise InvalidValueError("`{name}` has a text that is no UTF-8; encode it so.", name=self.name) from None
        if at != len(data):
            raise self._misfit(len(data))
        return texts

    def _misfit(self, size: int) -> InvalidValueError:
        return InvalidValueError(
            "the {size} bytes of `{name}` are not {count} texts, each after its length in 4 bytes, little-endian, as its shape {shape} says.",
            size=size,
            name=self.name,
            count=shown_count(self.count),
            shape=list(self.shape),
        )


def shown_count(count: int) -> str:
    """Returns a count of values for a message; that of a shape may have a hundred digits."""
    return str(count) if count < 10**12 else "more than 10^12"


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of an answer.

    Attributes:
        values: Float32, int64, or texts as objects.
        binary: Whether it goes after the JSON.
    """

    values: NDArray[Any]
    binary: bool

    @property
    def datatype(self) -> str:
        """The name of its datatype."""
        return {"f": "FP32", "i": "INT64", "O": "BYTES"}[self.values.dtype.kind]

    def packed(self) -> bytes:
        """Returns its binary form."""
        if self.datatype == "BYTES":
            encoded = [text.encode() for text in self.values.reshape(-1)]
            return b"".join(part for text in encoded for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))
        return self.values.astype("<f4" if self.datatype == "FP32" else "<i8", copy=False).tobytes()

    def listed(self) -> Any:
        """Returns its values for JSON, flat."""
        flat = np.ascontiguousarray(self.values).reshape(-1)
        return flat.tolist() if self.datatype == "BYTES" else flat
