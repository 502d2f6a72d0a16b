"""Models on disk, written by onnx_ir: one file, or two where the constants are too large for one.

A protobuf has at most 2 GiB. Beyond, the constants of `model.onnx` stand one after the other in `model.onnx.data` (ONNX's external
data). ONNX Runtime finds that file by its name and maps it, and so does `onnx_ir.load`: constants take memory only while they are
in use.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

MAX_BYTES = 2**31 - 2**26  # of the constants of a bundle's graph in one file; what is left of 2 GiB is for nodes and names
WORK_BYTES = 2**26  # the same between stages, where mapped weights save memory, several times the model's
SMALL = 1024  # bytes; smaller constants, shapes and the like, stay in the graph, where shape inference reads them
PAGE = 4096  # bytes; each larger constant begins at a page, so that it can be mapped alone


def data_file(path: Path) -> Path:
    """Returns where the constants of a model are, if they are not within it."""
    return path.with_name(f"{path.name}.data")


def files(path: Path) -> list[Path]:
    """Returns the files of a model, its own first."""
    return [path, *(other for other in [data_file(path)] if other.exists())]


def remove(path: Path) -> None:
    """Removes a model with its constants, if it is there."""
    if data_file(path).exists():
        gc.collect()  # nodes and values refer to each other: until they are collected, what they have mapped keeps its disk space
    for file in (path, data_file(path)):
        file.unlink(missing_ok=True)


def save(model: ir.Model, path: Path, *, max_bytes: int | None = None) -> None:
    """Writes a model to one file, or to two where its constants are too large for one.

    Types and shapes of intermediate values are not written. ONNX Runtime infers them, and rewriting a graph makes them wrong.

    Args:
        model: Of no more use where `path` is what it was loaded from.
        path: The file; what is there is replaced.
        max_bytes: Bytes of constants in one file; `WORK_BYTES` by default.

    Raises:
        OSError: The files cannot be written.
    """
    constants = list(model.graph.initializers.values())
    for value in (*constants, *(value for node in model.graph for value in node.outputs)):
        if not value.is_graph_output():
            value.type = value.shape = None
    try:
        if _bytes(model) > (WORK_BYTES if max_bytes is None else max_bytes):
            name, last = data_file(path).name, SMALL - 1
            ir.save(model, path, external_data=name, size_threshold_bytes=last, alignment=PAGE, align_threshold=last)
        else:
            for value in constants:
                if isinstance(value.const_value, ir.ExternalTensor):
                    value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name)  # a view of the mapped file
            ir.save(model, path)
            data_file(path).unlink(missing_ok=True)
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy says of a failed write only how much was written
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def copy(source: Path, target: Path) -> None:
    """Copies a model with its constants, wherever they are, to a new file, or to two."""
    save(ir.load(source), target)


def finalize(path: Path) -> None:
    """Brings a finished model into the form of a bundle: one file, or two where it has more than `MAX_BYTES` of constants."""
    model = ir.load(path)
    if data_file(path).exists() != (_bytes(model) > MAX_BYTES):
        save(model, path, max_bytes=MAX_BYTES)


@contextlib.contextmanager
def lazy_weights(path: Path) -> Iterator[onnx.ModelProto]:
    """Gives out a model for onnx's own tools; its large constants are read from their file when their values are asked for.

    onnx looks for that file in the working directory, so the working directory is changed meanwhile.
    """
    proto = onnx.load(str(path), load_external_data=False)
    with contextlib.chdir(path.parent):
        yield proto


def save_proto(proto: onnx.ModelProto, path: Path, *, folder: Path | None = None) -> None:
    """Writes what one of onnx's own tools has made, as `save` does.

    Args:
        proto: The model.
        path: The file.
        folder: Where the constants are that `lazy_weights` left in their file.
    """
    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, folder or path.parent)
    save(model, path)


def _bytes(model: ir.Model) -> int:
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
