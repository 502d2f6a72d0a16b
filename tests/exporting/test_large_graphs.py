"""Graphs too large for one file: their weights are in separate files between stages, in the bundle, and in the service.

The limit is small here; `test_real_sizes.py` has a model over the real limit.
"""

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import helper

import bertserve.service.cli
from bertserve.export import cli
from bertserve.export.graph import onnx_files
from bertserve.service.bundle import files
from support.bundles import exported, largest_file
from support.staged import graph_of, run

pytestmark = pytest.mark.torch

FP32 = "model.cpu.fp32.onnx"
BETWEEN = 150_000  # bytes; the graph of the tiny checkpoint is larger in fp32 and smaller in int8


def product(**constants: NDArray[Any]) -> ir.Model:
    """Returns a model of a product, a sum and a reshape; `constants` replace its constants, or add unused constants."""
    nodes = [
        helper.make_node("MatMul", ["x", "matrix"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["sum"]),
        helper.make_node("Reshape", ["sum", "shape"], ["y"]),
    ]
    return ir.from_proto(graph_of(nodes, CONSTANTS | constants, {"x": ("rows", SIZE)}))


SIZE = 64
CONSTANTS: dict[str, NDArray[Any]] = {
    "bias": np.random.default_rng(0).normal(size=SIZE).astype(np.float32),
    "matrix": np.random.default_rng(1).normal(size=(SIZE, SIZE)).astype(np.float32),
    "shape": np.array([-1, SIZE]),
}


def constants(model: ir.Model) -> dict[str, NDArray[Any]]:
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value is not None}


def assert_computes(path: Path) -> None:
    [y] = run(path, {"x": np.eye(SIZE, dtype=np.float32)})
    np.testing.assert_allclose(CONSTANTS["matrix"] + CONSTANTS["bias"], y, atol=1e-6)


def test_mapped_weights_stay_valid_when_their_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    onnx_files.save(product(), path, max_bytes=0)
    mapped = constants(ir.load(path))["matrix"]
    onnx_files.save(product(matrix=CONSTANTS["matrix"] * 2), path, max_bytes=0)

    assert np.array_equal(CONSTANTS["matrix"], mapped)
    assert np.array_equal(CONSTANTS["matrix"] * 2, constants(ir.load(path))["matrix"])


def test_weights_in_several_files_are_merged_into_one(tmp_path: Path) -> None:
    (tmp_path / "scattered").mkdir()
    scattered = tmp_path / "scattered" / "a.onnx"
    proto = ir.to_proto(product())
    onnx.save(proto, str(scattered), save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    assert {path.name for path in scattered.parent.iterdir()} == {"a.onnx", *CONSTANTS}

    onnx_files.save(ir.load(scattered), tmp_path / "b.onnx")
    onnx_files.save(ir.load(tmp_path / "b.onnx"), tmp_path / "c.onnx")
    shutil.rmtree(scattered.parent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.onnx", "c.onnx"]
    assert_computes(tmp_path / "c.onnx")


def test_a_finished_graph_takes_the_form_of_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between stages, weights over a low limit are external; in a bundle, they are external only if one file cannot hold them."""
    path = tmp_path / "a.onnx"
    onnx_files.save(product(), path, max_bytes=0)
    onnx_files.finalize(path)
    assert (onnx_files.files(path), len(list(tmp_path.iterdir()))) == ([path], 1)

    monkeypatch.setattr(onnx_files, "MAX_BYTES", 1000)
    onnx_files.finalize(path)
    assert [file.name for file in onnx_files.files(path)] == ["a.onnx", "a.onnx.data"]
    assert_computes(path)
    onnx_files.remove(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("max_bytes", [0, 10**6])
def test_a_full_disk_is_reported(tmp_path: Path, max_bytes: int) -> None:
    """Numpy writes the external weights, and its own error only has the number of written bytes."""
    model = product()
    model.graph.initializers["matrix"].const_value = ir.Tensor(CONSTANTS["matrix"], name="matrix")
    with largest_file(1000), pytest.raises(OSError) as caught:
        onnx_files.save(model, tmp_path / "a.onnx", max_bytes=max_bytes)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


@pytest.mark.full_grid
def test_the_manifest_has_every_file_with_digest_and_size(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "WORK_BYTES", 4096)
    monkeypatch.setattr(onnx_files, "MAX_BYTES", BETWEEN)
    large = exported(source, precisions=None, providers=("cpu", "cuda", "tensorrt")).path
    two, one = {f"model.{provider}.fp32.onnx" for provider in ("cpu", "cuda", "tensorrt")}, {"model.cpu.int8.onnx", "model.cuda.fp16.onnx"}
    others = {files.MANIFEST_FILE, files.TOKENIZER_FILE, files.CARD_FILE}
    assert {path.name for path in large.iterdir()} == two | one | others | {f"{name}.data" for name in two}
    manifest = files.load_bundle(large).manifest
    digests = {file.file: (file.sha256, file.size_bytes) for graph in manifest.graphs for file in graph.files}

    assert digests == {path.name: (files.digest(path), path.stat().st_size) for path in large.iterdir() if path.name.startswith("model.")}
    fp32, int8 = (next(graph for graph in manifest.graphs if graph.provider == "cpu" and graph.precision == p) for p in ("fp32", "int8"))
    assert (int8.identity, int8.data) == (int8.sha256, ())
    other = fp32.model_copy(update={"data": (fp32.data[0].model_copy(update={"sha256": "0" * 64}),)})
    assert len({fp32.identity, fp32.sha256, other.identity}) == 3


def test_the_command_prints_the_total_size_and_the_service_loads_the_bundle(
    source: Path, output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed size includes external weights; `bert-serve check` uses them to reproduce the stored result; `verify` checks their digest."""
    monkeypatch.setattr(onnx_files, "MAX_BYTES", BETWEEN)
    assert cli.main([str(source), "--output", str(output), "--precision", "fp32"]) == 0

    size = sum((output / source.name / name).stat().st_size for name in (FP32, f"{FP32}.data"))
    assert f"{FP32}  {size / 2**20:.1f} MiB" in capsys.readouterr().out
    assert bertserve.service.cli.main(["check", "--models", str(output)]) == 0
    data = output / source.name / f"{FP32}.data"
    data.write_bytes(b"\1" + data.read_bytes()[1:])
    assert cli.main(["verify", str(data.parent)]) == 1
    assert f"{data.name}`" in capsys.readouterr().out
