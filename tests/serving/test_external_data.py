"""External weights: a graph that reads a file which the manifest does not list is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

import tiny
from application import classify
from bertserve.service.bundle.files import MANIFEST_FILE, digest, load_bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.bundle.onnx_file import MESSAGES, external_locations
from bertserve.service.errors import BundleError

GRAPH, DATA = "model.cpu.fp32.onnx", "weights.data"


def moved_weights(path: Path, location: str = DATA, *, listed: bool = True, outside: bool = False) -> None:
    """Moves a matrix of a bundle's graph to a file and updates the manifest."""
    model = tiny.graph()
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "dense")
    file = path.parent.parent / DATA if outside else path / DATA
    file.write_bytes(tensor.raw_data)
    external_data_helper.set_external_data(tensor, location=location, offset=0, length=len(tensor.raw_data))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    (path / GRAPH).write_bytes(model.SerializeToString())
    manifest = Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes()).model_dump(mode="json")
    manifest["graphs"][0] |= {"sha256": digest(path / GRAPH), "size_bytes": (path / GRAPH).stat().st_size}
    manifest["graphs"][0]["data"] = [{"file": DATA, "sha256": digest(file), "size_bytes": file.stat().st_size}] if listed else []
    (path / MANIFEST_FILE).write_text(Manifest.model_validate(manifest).model_dump_json())


def test_a_listed_file_is_loaded(models: Path) -> None:
    whole = classify(models, {"inputs": "good"}).json()
    moved_weights(models / "tiny")
    assert {DATA} == external_locations(models / "tiny" / GRAPH)
    assert whole == classify(models, {"inputs": "good"}).json()


def linked(path: Path) -> None:
    """Replaces the listed file by a link to the same content outside the bundle."""
    moved_weights(path)
    (path / DATA).rename(path.parent.parent / DATA)
    (path / DATA).symlink_to(path.parent.parent / DATA)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: moved_weights(path, listed=False), DATA),
        (lambda path: moved_weights(path, f"./{DATA}"), f"./{DATA}"),
        (lambda path: moved_weights(path, f"../../{DATA}", listed=False, outside=True), f"../../{DATA}"),
        (lambda path: moved_weights(path, str(path / DATA)), DATA),
        (lambda path: moved_weights(path, ""), "``"),
        (lambda path: moved_weights(path, "*/_ORT_MEM_ADDR_/*", listed=False), "_ORT_MEM_ADDR_"),
        (linked, "a link"),
    ],
)
def test_an_unlisted_or_unsafe_file_is_refused(models: Path, damage: Callable[[Path], None], word: str) -> None:
    damage(models / "tiny")
    with pytest.raises(BundleError) as caught:
        load_bundle(models / "tiny")
    assert "cannot load" in caught.value.message
    assert word in caught.value.message


def external(name: str) -> onnx.TensorProto:
    """Returns a tensor whose values are in a file of the same name."""
    tensor = numpy_helper.from_array(np.zeros(2, np.float32), name)
    external_data_helper.set_external_data(tensor, location=name)
    return tensor


def test_external_tensors_are_found_anywhere_in_a_model(tmp_path: Path) -> None:
    graph = onnx.GraphProto(name="g", initializer=[external("initializer")])
    graph.sparse_initializer.add().values.CopyFrom(external("sparse"))
    inner = onnx.GraphProto(name="inner", initializer=[external("inner")])
    inner.node.append(helper.make_node("Constant", [], ["c"], value=external("constant")))
    for _ in range(20):
        inner = onnx.GraphProto(name="outer", node=[helper.make_node("If", ["x"], ["y"], then_branch=inner)])
    graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=inner))
    graph.node.append(helper.make_node("Own", [], ["z"], several=[external("several")]))
    model = helper.make_model(graph)
    model.functions.add(name="f").node.append(helper.make_node("Constant", [], ["c"], value=external("function")))
    model.training_info.add().initialization.initializer.append(external("training"))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert {"initializer", "sparse", "inner", "constant", "several", "function", "training"} == external_locations(path)


def test_every_onnx_message_that_can_contain_tensors_is_known() -> None:
    described: dict[str, Any] = {}
    waiting = [onnx.ModelProto.DESCRIPTOR]
    while waiting:
        message = waiting.pop()
        if message.name not in described:
            described[message.name] = {field.number: field.message_type for field in message.fields if field.message_type}
            waiting += described[message.name].values()
    leading = {"TensorProto"}
    while more := {name for name, inner in described.items() if leading & {kind.name for kind in inner.values()}} - leading:
        leading |= more
    expected = {
        name: {number: kind.name for number, kind in described[name].items() if kind.name in leading} for name in leading - {"TensorProto"}
    }
    assert expected | {"TensorProto": {13: "StringStringEntryProto"}} == MESSAGES


def test_protobuf_groups_hide_no_tensors(tmp_path: Path) -> None:
    graph = onnx.GraphProto(name="g", initializer=[external("hidden")])
    group = bytes([15 << 3 | 3, 1 << 3 | 0, 7, 15 << 3 | 4])
    path = tmp_path / "model.onnx"
    path.write_bytes(group + helper.make_model(graph).SerializeToString())
    assert ["hidden"] == [tensor.name for tensor in onnx.load(str(path), load_external_data=False).graph.initializer]
    assert {"hidden"} == external_locations(path)


@pytest.mark.parametrize("content", [b"", b"\x08\x07 no graph", b"\x3a\xff\xff\xff\xff\x0f", b"\xff" * 20])
def test_an_invalid_onnx_file_is_left_to_onnxruntime(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert set() == external_locations(path)
    with pytest.raises(Exception, match="model"):
        onnxruntime.InferenceSession(str(path))


def test_the_format_of_onnxruntime_is_refused(models: Path) -> None:
    path = models / "tiny"
    (path / GRAPH).rename(path / "model.ORT")
    manifest = json.loads((path / MANIFEST_FILE).read_bytes())
    manifest["graphs"][0]["file"] = "model.ORT"
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="own format"):
        load_bundle(path)
