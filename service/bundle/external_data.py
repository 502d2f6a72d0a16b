"""Finds the files that an ONNX graph loads its weights from: the service opens a graph only if the manifest has the digest of each."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.protobuf import fields
from bertserve.service.errors import BundleError

# Of each message of onnx.proto that has tensors in it: numbers of the fields that lead to them, and the messages of these fields.
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
    """Refuses a graph that would load weights from a file whose digest was not verified.

    Args:
        path: The bundle's folder.
        graph: A graph of its manifest.

    Raises:
        BundleError: The graph names a file that is not among its `data`, or one that is a link out of the bundle.
    """
    if graph.file.lower().endswith(".ort"):  # what onnxruntime reads in its own format
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
                f"cannot load `{path / graph.file}`: its weights in `{location}` are a link out of the bundle; put the file itself there."
            )


def external_locations(path: Path) -> set[str]:
    """Returns what the tensors of an ONNX file name as the places of their values, as it is written there.

    Args:
        path: The ONNX file. Of one that is not protobuf there are none; onnxruntime does not load it.
    """
    try:
        with path.open("rb") as file:
            return _locations(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError, IndexError):
        return set()


def _locations(model: memoryview) -> set[str]:
    found: set[str] = set()
    waiting = [("ModelProto", model)]
    while waiting:
        kind, message = waiting.pop()
        if kind == _ENTRY:
            entry = [(number, bytes(value)) for number, value in fields(message) if isinstance(value, memoryview)]
            if (_KEY, _LOCATION) in entry:
                found |= {value.decode("utf-8", "replace") for number, value in entry if number == _VALUE} or {""}
            continue
        inner = MESSAGES[kind]
        waiting += ((inner[number], value) for number, value in fields(message) if number in inner and isinstance(value, memoryview))
    return found
