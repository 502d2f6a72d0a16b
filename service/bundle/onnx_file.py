"""Reads parts of an ONNX file without the package onnx: protobuf fields, the names of further files with weights, and lookup tables.

The service opens a graph only if the manifest has the digest of each file that it loads. Sessions of a graph share its lookup tables, such
as word embeddings: onnxruntime copies the weights of a file into each session. It repacks matrices for the processor, so they cannot be
shared; a table that is only used for lookups stays unchanged, and is up to half of a small model.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.errors import BundleError

LONGEST_VARINT = 63  # bits before the last byte
_VARINT, _FIXED64, _BYTES, _GROUP, _END_OF_GROUP, _FIXED32 = range(6)


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the number and value of each field of a message; it skips numbers of fixed size.

    ONNX has no groups. Fields of a group would be returned as the message's own.

    Raises:
        ValueError: The bytes are not a message.
        IndexError: The message ends within a field.
    """
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        number, form = (key & 0xFFFFFFFF) >> 3, key & 7  # protobuf reads keys of 32 bits
        if form == _VARINT:
            value, at = read_varint(message, at)
            yield number, value
        elif form == _BYTES:
            length, at = read_varint(message, at)
            if at + length > len(message):
                raise ValueError("a field ends after its message")
            yield number, message[at : at + length]
            at += length
        elif form in (_FIXED32, _FIXED64):
            at += 4 if form == _FIXED32 else 8
        elif form not in (_GROUP, _END_OF_GROUP):
            raise ValueError(f"a field of wire type {form}")


def read_varints(packed: memoryview) -> Iterator[int]:
    """Yields the numbers of a packed field.

    Raises:
        ValueError: A number is too long.
        IndexError: The field ends within a number.
    """
    at = 0
    while at < len(packed):
        value, at = read_varint(packed, at)
        yield value


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Returns a number of variable length, and the position after it.

    Raises:
        ValueError: The number is too long.
        IndexError: The data ends within the number.
    """
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > LONGEST_VARINT:
            raise ValueError("a number with more than ten bytes")


# For each message of onnx.proto that contains tensors: numbers of the fields that lead to them, and the messages of these fields.
MESSAGES: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: "StringStringEntryProto"},
}
_ENTRY, _KEY, _VALUE, _LOCATION = "StringStringEntryProto", 1, 2, b"location"


def refuse_unlisted_data(path: Path, graph: GraphSpec) -> None:
    """Refuses a graph in a bundle's folder that would load weights from a file without a verified digest.

    Raises:
        BundleError: The graph loads a file that is not in its `data`, or a link that leads out of the bundle.
    """
    if graph.file.lower().endswith(".ort"):  # onnxruntime's own format
        raise BundleError(f"cannot load `{path / graph.file}`: it is in onnxruntime's own format; export the bundle again.")
    listed = {file.file for file in graph.data}
    for location in external_locations(path / graph.file):
        if location not in listed:
            raise BundleError(
                f"cannot load `{path / graph.file}`: it reads weights from `{location[:256]}`, which the manifest does not list; copy or export "
                "the bundle again."
            )
        if not (path / location).resolve().is_relative_to(path.resolve()):
            raise BundleError(
                f"cannot load `{path / graph.file}`: its weights in `{location}` are a link to a file outside of the "
                "bundle; put the file itself there."
            )


def external_locations(path: Path) -> set[str]:
    """Returns the locations of external data in the tensors of an ONNX file, as written there.

    Args:
        path: The ONNX file. For a file that is not protobuf the result is empty, and onnxruntime does not load it.
    """
    try:
        with path.open("rb") as file:
            return _locations(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError, IndexError):
        return set()


def _locations(model: memoryview) -> set[str]:
    locations: set[str] = set()
    waiting = [("ModelProto", model)]
    while waiting:
        kind, message = waiting.pop()
        if kind == _ENTRY:
            entry = [(number, bytes(value)) for number, value in fields(message) if isinstance(value, memoryview)]
            if (_KEY, _LOCATION) in entry:
                locations |= {value.decode("utf-8", "replace") for number, value in entry if number == _VALUE} or {""}
            continue
        inner = MESSAGES[kind]
        waiting += ((inner[number], value) for number, value in fields(message) if number in inner and isinstance(value, memoryview))
    return locations


LEAST_BYTES = 2**20  # minimum size of a table that is worth sharing
LOOKUP = "Gather"

# Field numbers in onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_INPUT, _NODE_OPERATOR = 1, 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 8, 9
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.uint8), 3: np.dtype(np.int8), 10: np.dtype(np.float16)}


def read_tables(path: Path) -> dict[str, NDArray[Any]]:
    """Returns copies of a graph's large tables that only lookups read, by name.

    Weights in separate files are not included: onnxruntime maps these files, so sessions share their pages.

    Args:
        path: The ONNX file. For an incomplete file the result is empty, because onnxruntime reports a better error.
    """
    try:
        with path.open("rb") as file:  # the mapping outlives the file, and ends with its last view
            return _tables(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError, IndexError):
        return {}


def _tables(model: memoryview) -> dict[str, NDArray[Any]]:
    looked_up: set[str] = set()
    read_otherwise: set[str] = set()
    tensors: list[memoryview] = []
    graph = next((value for number, value in fields(model) if number == _MODEL_GRAPH and isinstance(value, memoryview)), memoryview(b""))
    for number, value in fields(graph):
        if number == _GRAPH_INITIALIZER and isinstance(value, memoryview) and len(value) >= LEAST_BYTES:
            tensors.append(value)
        elif number == _GRAPH_NODE and isinstance(value, memoryview):
            inputs, operator = _node(value)
            looked_up |= set(inputs[:1] if operator == LOOKUP else ())
            read_otherwise |= set(inputs[1:] if operator == LOOKUP else inputs)
    tables = (_tensor(tensor, looked_up - read_otherwise) for tensor in tensors)
    return dict(table for table in tables if table is not None)


def _node(node: memoryview) -> tuple[list[str], str]:
    """Returns a node's inputs and operator."""
    inputs, operator = [], ""
    for number, value in fields(node):
        if number == _NODE_INPUT and isinstance(value, memoryview):
            inputs.append(str(value, "utf-8"))
        elif number == _NODE_OPERATOR and isinstance(value, memoryview):
            operator = str(value, "utf-8")
    return inputs, operator


def _tensor(tensor: memoryview, names: set[str]) -> tuple[str, NDArray[Any]] | None:
    """Returns the name and a copy of the values of a tensor, if its name is one of `names` and it has its values as raw data."""
    name, type_, dims, raw = "", 0, [], memoryview(b"")
    for number, value in fields(tensor):
        if number == _TENSOR_NAME and isinstance(value, memoryview):
            name = str(value, "utf-8")
        elif number == _TENSOR_TYPE and isinstance(value, int):
            type_ = value
        elif number == _TENSOR_DIMS:
            dims += [value] if isinstance(value, int) else list(read_varints(value))
        elif number == _TENSOR_RAW and isinstance(value, memoryview):
            raw = value
    dtype = _DTYPES.get(type_)
    if name not in names or dtype is None or len(raw) != prod(dims) * dtype.itemsize:
        return None
    return name, np.frombuffer(raw, dtype).reshape(dims).copy()
