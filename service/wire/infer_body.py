"""Bodies of the Open Inference Protocol: JSON, and after it the binary tensors, which the JSON describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bertserve.service.errors import InvalidValueError, MalformedRequestError
from bertserve.service.tasks.body import Closed
from bertserve.service.wire.call import Content
from bertserve.service.wire.keys import unknown_name
from bertserve.service.wire.parsing import parse
from bertserve.service.wire.reading import where, wrong_value
from bertserve.service.wire.rendering import to_json
from bertserve.service.wire.tensors import Output, Tensor, shown_count

HEADER_LENGTH = "inference-header-content-length"
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES"
]  # fmt: skip
# No model here has as many inputs or outputs, with both forms of a request counted, or tensors of so many axes.
MAX_TENSORS = 16
MAX_AXES = 8
_EXAMPLE: dict[str, Any] = {"inputs": [{"name": "inputs", "shape": [2], "datatype": "BYTES", "data": ["A warm, funny film.", "Dull."]}]}


class InferInputParameters(Closed):
    """What a request says of one of its tensors."""

    binary_data_size: Annotated[int | None, Field(ge=0, description="Bytes of it after the JSON, in place of `data`.")] = None


class InferInput(Closed):
    """One tensor of a request."""

    name: Annotated[str, Field(max_length=256)]
    shape: Annotated[
        list[Annotated[int, Field(ge=0, le=2**63 - 1)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_AXES, description="Its axes, rows first."),
    ]
    datatype: Datatype
    parameters: InferInputParameters | None = None
    data: Annotated[list[Any] | None, Field(description="Its values, row by row, flat or nested.")] = None


class InferOutputParameters(Closed):
    """How a tensor is wanted."""

    binary_data: Annotated[bool | None, Field(description="Bytes after the JSON, in place of `data`.")] = None
    classification: Annotated[
        int | None, Field(ge=0, description="Of `scores`: the best so many as texts `score:index:label`, in place of the numbers.")
    ] = None


class InferOutput(Closed):
    """A tensor that is wanted."""

    name: Annotated[str, Field(max_length=256)]
    parameters: InferOutputParameters | None = None


class InferBody(Closed):
    """Body of a request of the Open Inference Protocol, or the JSON before its binary tensors."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: Annotated[str | None, Field(description="Comes back with the answer.")] = None
    inputs: Annotated[list[InferInput], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    outputs: Annotated[
        list[InferOutput] | None, Field(fail_fast=True, max_length=MAX_TENSORS, description="The tensors that are wanted; all when absent.")
    ] = None
    parameters: Annotated[
        dict[str, Any] | None, Field(description="Parameters of the task, and `binary_data_output`, `timeout` (microseconds).")
    ] = None


class InferTensor(BaseModel):
    """One tensor of an answer."""

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
    """Reads a request, and finds its tensors without reading them.

    Args:
        raw: The body: JSON, and after it the binary tensors.
        header: How long the JSON is, as the header `Inference-Header-Content-Length` says; None where the body is nothing else.

    Returns:
        The JSON, and the tensors by name.

    Raises:
        MalformedRequestError: It is not JSON, or the lengths do not fit.
        InvalidValueError: It is not the JSON of the protocol.
        TooLargeError: It has more lists, objects, keys or values than are allowed.
    """
    size = len(raw) if header is None else _json_size(header, len(raw))
    try:
        value = parse(memoryview(raw)[:size].tobytes() if size < len(raw) else raw)
    except ValueError as error:
        raise MalformedRequestError(
            "the body is not valid JSON: {detail}; send JSON, such as {example}.", detail=error, example=json.dumps(_EXAMPLE)
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
            header=header[:32],
            size=size,
        )
    return int(header)


def _placed(body: InferBody, rest: memoryview, *, binary: bool) -> dict[str, Tensor]:
    """Returns the tensors by name, each with its list or its part of the bytes after the JSON."""
    found: dict[str, Tensor] = {}
    at = 0
    for given in body.inputs:
        if given.name in found:
            raise InvalidValueError("`inputs` has `{name}` twice; send it once.", name=given.name)
        size = None if given.parameters is None else given.parameters.binary_data_size
        if (size is None) == (given.data is None):
            raise InvalidValueError("`{name}` must have either `data` or `parameters.binary_data_size`, and not both.", name=given.name)
        data: list[Any] | memoryview = given.data if given.data is not None else rest[:0]
        if size is not None:
            if not binary:
                raise MalformedRequestError(
                    "`{name}` is binary, but the header `Inference-Header-Content-Length`, which says where it begins, is missing.",
                    name=given.name,
                )
            if at + size > len(rest):
                raise MalformedRequestError(
                    "`{name}` has {size} bytes by its `binary_data_size`, and the body has {rest_count} left for it.",
                    name=given.name,
                    size=shown_count(size),
                    rest_count=len(rest) - at,
                )
            data = rest[at : at + size]
            at += size
        found[given.name] = Tensor(given.name, given.datatype, tuple(given.shape), data)
    if at != len(rest):
        raise MalformedRequestError(
            "the body has {rest_count} bytes after the last of its tensors; no input is of them.", rest_count=len(rest) - at
        )
    return found


def write_infer_answer(head: Mapping[str, Any], outputs: Mapping[str, Output]) -> dict[str, Any] | Content:
    """Returns an answer: a value for JSON, or, where an output is binary, JSON with the bytes after it."""
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
    return Content(b"".join([head_json, *parts]), "application/octet-stream", {HEADER_LENGTH: str(len(head_json))})
