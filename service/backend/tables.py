"""Reads the lookup tables of an ONNX file, such as the embeddings of words, so that the sessions of a graph can share them.

onnxruntime copies the weights of a file into each session. Matrices are packed for the processor on the way, which takes another form;
a table that is only looked up stays as it is, and is up to half of a small model. What is read here is what stands in the file:
protobuf's framing, and of ONNX's messages a few fields.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.protobuf import fields, read_varints

LEAST_BYTES = 2**20  # of a table that is worth sharing
LOOKUP = "Gather"

# Numbers of fields in onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_INPUT, _NODE_OPERATOR = 1, 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 8, 9
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.uint8), 3: np.dtype(np.int8), 10: np.dtype(np.float16)}


def read_tables(path: Path) -> dict[str, NDArray[Any]]:
    """Returns a graph's large tables that nothing but lookups read, by name, as arrays of their own.

    Weights that stand in files beside the graph are not among them: onnxruntime maps those, and sessions share the pages.

    Args:
        path: The ONNX file. Of one that is not whole there are no tables; onnxruntime says better what is wrong with it.
    """
    try:
        with path.open("rb") as file:  # the map outlasts it, and ends with the last view of it
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
    found = (_tensor(tensor, looked_up - read_otherwise) for tensor in tensors)
    return dict(table for table in found if table is not None)


def _node(node: memoryview) -> tuple[list[str], str]:
    """Returns a node's inputs and its operator."""
    inputs, operator = [], ""
    for number, value in fields(node):
        if number == _NODE_INPUT and isinstance(value, memoryview):
            inputs.append(str(value, "utf-8"))
        elif number == _NODE_OPERATOR and isinstance(value, memoryview):
            operator = str(value, "utf-8")
    return inputs, operator


def _tensor(tensor: memoryview, wanted: set[str]) -> tuple[str, NDArray[Any]] | None:
    """Returns the name and a copy of the values of a tensor, if it is wanted and its values stand in the file as memory has them."""
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
    if name not in wanted or dtype is None or len(raw) != prod(dims) * dtype.itemsize:
        return None
    return name, np.frombuffer(raw, dtype).reshape(dims).copy()
