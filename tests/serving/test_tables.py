"""Lookup tables of ONNX files: which tables are found, and that the sessions of a graph share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import tiny
from bertserve.service.backend import sessions
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle import files, onnx_file
from bertserve.service.bundle.onnx_file import read_tables
from bertserve.service.text.tokenizer import Encoding
from embedded import ROOT


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "LEAST_BYTES", 1)


def graph_of(path: Path, tensors: dict[str, NDArray[Any]], nodes: list[tuple[str, list[str]]]) -> Path:
    """Writes a graph of nodes, each an operator and its inputs, and returns its path."""
    made = [helper.make_node(operator, inputs, [f"out{i}"], axis=0) for i, (operator, inputs) in enumerate(nodes)]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    graph = helper.make_graph(made, "g", [ids], [], [numpy_helper.from_array(values, name) for name, values in tensors.items()])
    onnx.save(helper.make_model(graph), str(path))
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint8])
def test_tables_that_are_only_looked_up_are_found(tmp_path: Path, dtype: type) -> None:
    """A tensor is not a table if another operator reads it, if it has indices, or if it is unused."""
    values = np.arange(6).reshape(3, 2).astype(dtype)
    tensors = {"table": values, "both": values, "matrix": values, "indices": np.array([1, 2]), "unused": values}
    nodes = [("Gather", ["table", "ids"]), ("Gather", ["both", "indices"]), ("MatMul", ["both", "matrix"])]

    found = read_tables(graph_of(tmp_path / "g.onnx", tensors, nodes))
    assert ["table"] == list(found)
    assert np.dtype(dtype) == found["table"].dtype
    np.testing.assert_array_equal(values, found["table"])


def test_small_tables_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "LEAST_BYTES", 1000)

    assert {} == read_tables(graph_of(tmp_path / "g.onnx", {"t": np.zeros((9, 9), dtype=np.float32)}, [("Gather", ["t", "ids"])]))


def test_a_damaged_file_has_no_tables_or_only_complete_ones(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.int8).reshape(4, 2)
    path = graph_of(tmp_path / "g.onnx", {"table": values}, [("Gather", ["table", "ids"])])
    whole = path.read_bytes()

    for content in [whole[:length] for length in range(len(whole))] + [
        whole[:place] + bytes([byte]) + whole[place + 1 :] for place in range(len(whole)) for byte in (0x00, 0x7F, 0xFF)
    ]:
        path.write_bytes(content)
        assert all(table.dtype == np.int8 and len(table) for table in read_tables(path).values())
    path.write_bytes(b"\xff" * 1000)
    assert {} == read_tables(path)
    assert {} == read_tables(tmp_path / "absent.onnx")


def test_sessions_read_the_shared_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = files.load_bundle(tiny.bundle(tmp_path))
    graph = loaded.manifest.graphs[0]
    encoding = Encoding(np.array([2, 7, 8, 3]), np.zeros(4, dtype=np.int64))

    def answers() -> list[NDArray[np.float32]]:
        engine = OnnxEngine(loaded.path / graph.file, graph, pad_id=0, padding_side="right")
        return [each.run([encoding])[0]["logits"] for each in (engine, engine.with_threads(2))]

    one, two = answers()
    np.testing.assert_array_equal(one, two)
    monkeypatch.setattr(sessions, "read_tables", lambda path: {name: -table for name, table in read_tables(path).items()})
    other_one, other_two = answers()
    np.testing.assert_array_equal(other_one, other_two)
    assert not np.array_equal(one, other_one)


@pytest.mark.parametrize("name", ["sentiment", "fill-mask"])
def test_the_embeddings_of_embedded_models_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    file = ROOT / "models" / name / "model.cpu.int8.onnx"
    (table,) = read_tables(file).values()

    assert (30522, 384) == table.shape
    assert table.nbytes > 0.3 * file.stat().st_size
