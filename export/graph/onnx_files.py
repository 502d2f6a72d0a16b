"""Writes models with onnx_ir to one file, or to two if the constants are too large for one.

A protobuf has at most 2 GiB. For larger models, the constants of `model.onnx` are in `model.onnx.data` (ONNX's external data). ONNX
Runtime and `onnx_ir.load` find this file by its name and map it, so constants need memory only while they are used.
"""

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

MAX_BYTES = 2**31 - 2**26  # limit of the constants in one file of a bundle; the rest of 2 GiB is for nodes and names
WORK_BYTES = 2**26  # the limit between stages, where mapped weights save several times the model's size in memory


def data_file(path: Path) -> Path:
    """Returns the path of a model's constants, if they are not in the model's file."""
    return path.with_name(f"{path.name}.data")


def files(path: Path) -> list[Path]:
    """Returns the files of a model, its own first."""
    return [path, *(file for file in [data_file(path)] if file.exists())]


def remove(path: Path) -> None:
    """Removes a model with its constants, if it exists."""
    if data_file(path).exists():
        gc.collect()  # nodes and values refer to each other; until they are collected, their mappings keep the disk space
    for file in (path, data_file(path)):
        file.unlink(missing_ok=True)


def save(model: ir.Model, path: Path, *, max_bytes: int | None = None) -> None:
    """Writes a model to one file, or to two if its constants have more than `max_bytes` (by default `WORK_BYTES`).

    Types and shapes of intermediate values are not written: ONNX Runtime infers them, and they would be wrong after rewriting. A model that
    was loaded from `path` must not be used afterwards.

    Raises:
        OSError: The files cannot be written.
    """
    constants = list(model.graph.initializers.values())
    for value in (*constants, *(value for node in model.graph for value in node.outputs)):
        if not value.is_graph_output():
            value.type = value.shape = None
    try:
        if _bytes(model) > (WORK_BYTES if max_bytes is None else max_bytes):
            # constants below 1 KiB, such as shapes, stay in the graph, where shape inference reads them; each larger one starts at a page,
            # so that it can be mapped separately
            small = 1023
            ir.save(model, path, external_data=data_file(path).name, size_threshold_bytes=small, alignment=4096, align_threshold=small)
        else:
            for value in constants:
                if isinstance(value.const_value, ir.ExternalTensor):
                    value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)  # a view of the mapped file
            ir.save(model, path)
            data_file(path).unlink(missing_ok=True)
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy's error about a failed write only gives the number of written bytes
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def finalize(path: Path) -> None:
    """Converts a finished model to the form of a bundle: one file, or two if it has more than `MAX_BYTES` of constants."""
    model = ir.load(path)
    if data_file(path).exists() != (_bytes(model) > MAX_BYTES):
        save(model, path, max_bytes=MAX_BYTES)


@contextlib.contextmanager
def lazy_weights(path: Path) -> Iterator[onnx.ModelProto]:
    """Yields a model for onnx's own tools, whose large constants are read from their file on demand.

    onnx looks for this file in the working directory, so the working directory is changed in the block.
    """
    proto = onnx.load(str(path), load_external_data=False)
    with contextlib.chdir(path.parent):
        yield proto


def save_proto(proto: onnx.ModelProto, path: Path, *, folder: Path | None = None) -> None:
    """Writes a model from one of onnx's own tools, like `save`; `folder` contains the constants that `lazy_weights` left in their file."""
    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, folder or path.parent)
    save(model, path)


def _bytes(model: ir.Model) -> int:
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
