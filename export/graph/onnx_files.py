"""ONNX files: in one piece, or, where that would be too large, a graph with its weights in a file beside it.

A protobuf has at most 2 GiB. Beyond, the constants of `model.onnx` stand one after the other in `model.onnx.data` (ONNX's external
data). ONNX Runtime finds that file by its name and maps it, and so does `read`: its arrays take memory only while they are in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

MAX_BYTES = 2**31 - 2**26  # of the constants of a bundle's graph in one piece; what is left of 2 GiB is for nodes and names
WORK_BYTES = 2**26  # the same between stages, where mapped weights save memory, several times the model's
SMALL = 1024  # bytes; shapes and the like stay in the graph, where shape inference reads them
PAGE = 4096  # bytes; each constant begins at one, so that it can be mapped alone


def data_file(path: Path) -> Path:
    """Returns where the weights of a graph are, if they are not within it."""
    return path.with_name(f"{path.name}.data")


def files(path: Path) -> list[Path]:
    """Returns the files of a graph, its own first."""
    return [path, *(other for other in [data_file(path)] if other.exists())]


def structure(path: Path) -> ModelProto:
    """Reads a graph without the weights that stand beside it."""
    return onnx.load(str(path), load_external_data=False)


def read(path: Path) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """Reads a graph; returns it without constants, and the constants by name, read-only."""
    model = structure(path)
    constants = {tensor.name: _value(tensor, path.parent) for tensor in model.graph.initializer}
    del model.graph.initializer[:]
    without = ModelProto()  # a message keeps the memory of what is deleted from it
    without.CopyFrom(model)
    return without, constants


def write(model: ModelProto, constants: Mapping[str, NDArray[Any]], path: Path, *, most: int | None = None) -> None:
    """Writes a graph to a new file, or to two where the constants are too large for one.

    Args:
        model: The graph; it gets these constants in place of its own.
        constants: By name.
        path: The file. What is there is replaced; who has it mapped, keeps it as it was.
        most: Bytes of constants in one piece; `WORK_BYTES` by default.
    """
    remove(path)
    del model.graph.initializer[:]
    if sum(value.nbytes for value in constants.values()) <= (WORK_BYTES if most is None else most):
        model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    else:
        with data_file(path).open("xb") as file:
            for name, value in constants.items():
                if value.nbytes < SMALL:
                    model.graph.initializer.append(numpy_helper.from_array(value, name))
                else:
                    model.graph.initializer.append(_written(name, value, file))
    onnx.save(model, str(path))


def save(model: ModelProto, path: Path, *, folder: Path | None = None) -> None:
    """Writes a model to a new file, or to two, as `write` does.

    Args:
        model: The model; its constants are taken out of it.
        path: The file.
        folder: Where those of its weights are that it does not hold, if there are any.
    """
    constants = {tensor.name: _value(tensor, folder or path.parent) for tensor in model.graph.initializer}
    write(model, constants, path)


def finalize(path: Path) -> None:
    """Brings a finished graph into the form of a bundle: one file, or two where it has more than `MAX_BYTES` of constants."""
    model, constants = read(path)
    if data_file(path).exists() != (sum(value.nbytes for value in constants.values()) > MAX_BYTES):
        write(model, constants, path, most=MAX_BYTES)


def copy(source: Path, target: Path) -> None:
    """Copies a graph with its weights to a new file."""
    write(*read(source), target)


@contextlib.contextmanager
def lazy_weights(path: Path) -> Iterator[ModelProto]:
    """Gives out a graph whose large weights are read from their file when, and if, their values are asked for.

    onnx looks for them in the working directory, so that this is changed meanwhile.
    """
    model = structure(path)
    with contextlib.chdir(path.parent):
        yield model


def remove(path: Path) -> None:
    """Removes a graph with its weights, if it is there."""
    for file in (path, data_file(path)):
        file.unlink(missing_ok=True)


def _value(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    """Returns a constant's value, mapped where it stands in another file."""
    if not uses_external_data(tensor):
        return numpy_helper.to_array(tensor)
    place = ExternalDataInfo(tensor)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.asarray(np.memmap(folder / place.location, dtype=kind, mode="r", offset=place.offset or 0, shape=tuple(tensor.dims)))


def _written(name: str, value: NDArray[Any], file: BinaryIO) -> TensorProto:
    """Writes a constant to the end of a data file and returns what the graph says of it."""
    file.write(bytes(-file.tell() % PAGE))
    tensor = TensorProto(name=name, dims=value.shape, data_type=helper.np_dtype_to_tensor_dtype(value.dtype))
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", Path(file.name).name), ("offset", file.tell()), ("length", value.nbytes)):
        tensor.external_data.add(key=key, value=str(entry))
    file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return tensor
