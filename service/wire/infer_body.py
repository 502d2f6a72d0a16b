"""Bodies of the Open Inference Protocol: JSON, followed by the binary tensors that the JSON describes.

A tensor is first only a description. Its values are read after a check of its shape, so that a large shape costs nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bertserve.service.errors import InvalidValueError, MalformedRequestError, Sent
from bertserve.service.tasks.body import Closed
from bertserve.service.wire.call import Content
from bertserve.service.wire.json_text import parse, to_json
from bertserve.service.wire.reading import show, where, wrong_value
from bertserve.service.wire.unknown_fields import unknown_name

_INTEGERS: dict[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4"), "BOOL": np.dtype("?")}
_LENGTH_BYTES = 4  # the length before each element of a binary BYTES tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a request whose values have not been read: they are a flat or nested list, or the bytes of the binary format."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | memoryview

    @property
    def count(self) -> int:
        """Number of values according to the shape."""
        return math.prod(self.shape)

    def texts(self) -> list[str]:
        """Returns the texts of a BYTES tensor as a flat list.

        Raises:
            InvalidValueError: It has another datatype, its number of texts does not match its shape, or a text is not UTF-8.
        """
        if self.datatype != "BYTES":
            raise InvalidValueError(
                "`{name}` is {datatype}, but it has texts; send it as BYTES.", name=Sent(self.name), datatype=Sent(self.datatype)
            )
        if isinstance(self.data, memoryview):
            return self._decoded(self.data)
        flat = self._flat(self.data)
        invalid = next((value for value in flat if not isinstance(value, str)), None)
        if invalid is not None or None in flat:
            raise InvalidValueError(
                "`{name}` is BYTES, so each value in its `data` must be a text; one is {wrong}.", name=Sent(self.name), wrong=show(invalid)
            )
        return flat

    def integers(self, *datatypes: str) -> NDArray[np.int64]:
        """Returns the values of a tensor of the allowed datatypes, of INT64, INT32 and BOOL, with its shape.

        Raises:
            InvalidValueError: It has another datatype, or its number of values does not match its shape.
        """
        if self.datatype not in datatypes:
            raise InvalidValueError(
                "`{name}` is {datatype}; it must be {names}.",
                name=Sent(self.name),
                datatype=Sent(self.datatype),
                names=" or ".join(datatypes),
            )
        dtype = _INTEGERS[self.datatype]
        if isinstance(self.data, memoryview):
            if len(self.data) != self.count * dtype.itemsize:
                raise InvalidValueError(
                    "`{name}` has {data_count} bytes, but {datatype} of the shape {shape} needs {count}.",
                    name=Sent(self.name),
                    data_count=len(self.data),
                    datatype=Sent(self.datatype),
                    shape=Sent(list(self.shape)),
                    count=Sent(self.count * dtype.itemsize),
                )
            numbers: NDArray[np.int64] = np.frombuffer(self.data, dtype).reshape(self.shape).astype(np.int64)
            return numbers
        flat = self._flat(self.data)
        kinds = (bool, int) if self.datatype == "BOOL" else (int,)
        invalid = next((value for value in flat if type(value) not in kinds), 0)
        if type(invalid) not in kinds:
            raise InvalidValueError(
                "`{name}` is {datatype}, but a value in its `data` is {wrong}.",
                name=Sent(self.name),
                datatype=Sent(self.datatype),
                wrong=show(invalid),
            )
        try:
            return np.array(flat, np.int64).reshape(self.shape)
        except OverflowError:
            raise InvalidValueError(
                "`{name}` is {datatype}, but a value in its `data` is too large for this type.",
                name=Sent(self.name),
                datatype=Sent(self.datatype),
            ) from None

    def _flat(self, data: list[Any]) -> list[Any]:
        """Returns the values of `data`, which may be flat or nested like the shape."""
        nested = len(self.shape) == 2 and bool(data) and isinstance(data[0], list)
        if nested and not (len(data) == self.shape[0] and all(isinstance(row, list) and len(row) == self.shape[1] for row in data)):
            raise InvalidValueError(
                "the nesting of `data` of `{name}` does not match its shape {shape}.", name=Sent(self.name), shape=Sent(list(self.shape))
            )
        flat = list(itertools.chain.from_iterable(data)) if nested else data
        if len(flat) != self.count:
            raise InvalidValueError(
                "`data` of `{name}` has {flat_count} values, but its shape {shape} needs {count}.",
                name=Sent(self.name),
                flat_count=len(flat),
                shape=Sent(list(self.shape)),
                count=Sent(shown_count(self.count)),
            )
        return flat

    def _decoded(self, data: memoryview) -> list[str]:
        """Returns the texts of the binary format: each text follows its length, 4 bytes little-endian."""
        texts, at = [], 0
        if self.count * _LENGTH_BYTES > len(data):  # checked first, because a request can declare any shape
            raise self._misfit(len(data))
        for _ in range(self.count):
            start = at + _LENGTH_BYTES
            at = start + int.from_bytes(data[at:start], "little")
            if start > len(data) or at > len(data):
                raise self._misfit(len(data))
            try:
                texts.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                raise InvalidValueError("`{name}` has a text that is not UTF-8; encode it as UTF-8.", name=Sent(self.name)) from None
        if at != len(data):
            raise self._misfit(len(data))
        return texts

    def _misfit(self, size: int) -> InvalidValueError:
        return InvalidValueError(
            "the {size} bytes of `{name}` are not the {count} texts of its shape {shape}; send each text after "
            "its length in 4 bytes, little-endian.",
            size=size,
            name=Sent(self.name),
            count=Sent(shown_count(self.count)),
            shape=Sent(list(self.shape)),
        )


def shown_count(count: int) -> str:
    """Returns a number of values for a message; the number from a shape may have a hundred digits."""
    return str(count) if count < 10**12 else "more than 10^12"


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of an answer, with values of float32, int64, or texts as objects; if `binary`, it follows the JSON as bytes."""

    values: NDArray[Any]
    binary: bool

    @property
    def datatype(self) -> str:
        """Name of the datatype."""
        return {"f": "FP32", "i": "INT64", "O": "BYTES"}[self.values.dtype.kind]

    def packed(self) -> bytes:
        """Returns the binary format."""
        if self.datatype == "BYTES":
            encoded = [text.encode() for text in self.values.reshape(-1)]
            return b"".join(part for text in encoded for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))
        return self.values.astype("<f4" if self.datatype == "FP32" else "<i8", copy=False).tobytes()

    def listed(self) -> Any:
        """Returns the values as a flat list for JSON."""
        flat = np.ascontiguousarray(self.values).reshape(-1)
        return flat.tolist() if self.datatype == "BYTES" else flat


HEADER_LENGTH = "inference-header-content-length"
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES"
]  # fmt: skip
# No model here has as many inputs or outputs, even with both formats of a request, or tensors with as many dimensions.
MAX_TENSORS = 16
MAX_AXES = 8
_EXAMPLE: dict[str, Any] = {"inputs": [{"name": "inputs", "shape": [2], "datatype": "BYTES", "data": ["A warm, funny film.", "Dull."]}]}


class InferInputParameters(Closed):
    """Parameters of an input tensor."""

    binary_data_size: Annotated[int | None, Field(ge=0, description="Bytes of this tensor after the JSON, instead of `data`.")] = None


class InferInput(Closed):
    """An input tensor of a request."""

    name: Annotated[str, Field(max_length=256)]
    shape: Annotated[
        list[Annotated[int, Field(ge=0, le=2**63 - 1)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_AXES, description="Dimensions of the tensor, rows first."),
    ]
    datatype: Datatype
    parameters: InferInputParameters | None = None
    data: Annotated[list[Any] | None, Field(description="Values of the tensor, row by row, flat or nested.")] = None


class InferOutputParameters(Closed):
    """Parameters of a requested output."""

    binary_data: Annotated[bool | None, Field(description="Send the values as bytes after the JSON, instead of `data`.")] = None
    classification: Annotated[
        int | None, Field(ge=0, description="For `scores`: return this many of the best as texts `score:index:label`, instead of numbers.")
    ] = None


class InferOutput(Closed):
    """A requested output tensor."""

    name: Annotated[str, Field(max_length=256)]
    parameters: InferOutputParameters | None = None


class InferBody(Closed):
    """Body of a request of the Open Inference Protocol, or the JSON before its binary tensors."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: Annotated[str | None, Field(description="Returned with the answer.")] = None
    inputs: Annotated[list[InferInput], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    outputs: Annotated[
        list[InferOutput] | None, Field(fail_fast=True, max_length=MAX_TENSORS, description="Tensors to return; by default all.")
    ] = None
    parameters: Annotated[
        dict[str, Any] | None, Field(description="Parameters of the task, and `binary_data_output`, `timeout` (microseconds).")
    ] = None


class InferTensor(BaseModel):
    """A tensor of an answer."""

    name: str
    shape: list[int]
    datatype: str
    data: list[float] | list[int] | list[str]


class InferAnswer(BaseModel):
    """Answer in the Open Inference Protocol."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferTensor]


def read_infer_body(raw: bytes, header: str | None) -> tuple[InferBody, dict[str, Tensor]]:
    """Reads a request and finds its tensors; it does not read their values.

    Args:
        raw: The body: JSON, followed by the binary tensors.
        header: The header `Inference-Header-Content-Length`, the length of the JSON; None if there are no binary tensors.

    Returns:
        The JSON, and the tensors by name.

    Raises:
        MalformedRequestError: The body is not JSON, or a length does not fit.
        InvalidValueError: The JSON does not match the protocol.
        TooLargeError: It has more lists, objects, keys, values or digits than are allowed.
    """
    size = len(raw) if header is None else _json_size(header, len(raw))
    try:
        value = parse(memoryview(raw)[:size].tobytes() if size < len(raw) else raw)
    except ValueError as error:
        raise MalformedRequestError(
            "the body is not valid JSON: {problem}; send JSON, such as {example}.", problem=error, example=json.dumps(_EXAMPLE)
        ) from error
    try:
        body = InferBody.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "unknown_name":
            raise unknown_name(first["ctx"]["name"], f"`{where(first['loc']) or 'the body'}`", first["ctx"]["known"]) from error
        raise wrong_value(first, _EXAMPLE) from error
    return body, _placed(body, memoryview(raw)[size:], binary=header is not None)


def _json_size(header: str, size: int) -> int:
    if not (header.isascii() and header.isdigit() and len(header) < 16 and 0 < int(header) <= size):
        raise MalformedRequestError(
            "the header `Inference-Header-Content-Length` is `{header}`; it must be the length of the JSON before the "
            "tensors, from 1 to the {size} bytes of the body.",
            header=Sent(header),
            size=size,
        )
    return int(header)


def _placed(body: InferBody, rest: memoryview, *, binary: bool) -> dict[str, Tensor]:
    """Returns the tensors by name, each with its list, or with its part of the bytes after the JSON."""
    placed: dict[str, Tensor] = {}
    at = 0
    for declared in body.inputs:
        if declared.name in placed:
            raise InvalidValueError("`inputs` has `{name}` twice; send it once.", name=Sent(declared.name))
        size = None if declared.parameters is None else declared.parameters.binary_data_size
        if (size is None) == (declared.data is None):
            raise InvalidValueError("`{name}` must have exactly one of `data` and `parameters.binary_data_size`.", name=Sent(declared.name))
        data: list[Any] | memoryview = declared.data if declared.data is not None else rest[:0]
        if size is not None:
            if not binary:
                raise MalformedRequestError(
                    "`{name}` is binary, but the header `Inference-Header-Content-Length` is missing; set it to the length of the JSON.",
                    name=Sent(declared.name),
                )
            if at + size > len(rest):
                raise MalformedRequestError(
                    "`binary_data_size` of `{name}` is {claimed}, but the body has only {rest_count} bytes left.",
                    name=Sent(declared.name),
                    claimed=Sent(shown_count(size)),
                    rest_count=len(rest) - at,
                )
            data = rest[at : at + size]
            at += size
        placed[declared.name] = Tensor(declared.name, declared.datatype, tuple(declared.shape), data)
    if at != len(rest):
        raise MalformedRequestError("the body has {rest_count} bytes after its last tensor; remove them.", rest_count=len(rest) - at)
    return placed


def write_infer_answer(head: Mapping[str, Any], outputs: Mapping[str, Output]) -> dict[str, Any] | Content:
    """Returns an answer: a value for JSON, or, if an output is binary, JSON followed by bytes."""
    described, parts = [], []
    for name, output in outputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": output.datatype, "shape": list(output.values.shape)}
        if output.binary:
            parts.append(output.packed())
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = output.listed()
        described.append(tensor)
    answer = {**head, "outputs": described}
    if not parts:
        return answer
    head_json = to_json(answer)
    return Content([head_json, *parts], "application/octet-stream", {HEADER_LENGTH: str(len(head_json))})
