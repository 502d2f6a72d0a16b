"""External weights: a graph that reads a file which the manifest does not list is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import TensorProto, external_data_helper

import tiny
from application import classify
from bertserve.service.bundle.files import digest, load_bundle
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
    data = [{"file": DATA, "sha256": digest(file), "size_bytes": file.stat().st_size}] if listed else []
    tiny.replace_graph(path, model, data=data)


def test_a_listed_file_is_loaded(models: Path) -> None:
    whole = classify(models, {"inputs": "good"}).json()
    moved_weights(models / "tiny")
    assert whole == classify(models, {"inputs": "good"}).json()


def hidden(path: Path) -> None:
    """Writes the length of the key `location` with two bytes, as no writer does but every reader accepts."""
    moved_weights(path, listed=False)
    content = (path / GRAPH).read_bytes()
    key, entry = b"\x0a\x08location\x12" + bytes([len(DATA)]), b"\x0a\x88\x00location\x12" + bytes([len(DATA)])
    assert key in content
    tiny.replace_graph(path, content.replace(key, entry))


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
        (hidden, DATA),
    ],
)
def test_an_unlisted_or_unsafe_file_is_refused(models: Path, damage: Callable[[Path], None], word: str) -> None:
    damage(models / "tiny")
    with pytest.raises(BundleError) as caught:
        load_bundle(models / "tiny")
    assert "cannot load" in caught.value.message
    assert word in caught.value.message


def test_the_format_of_onnxruntime_is_refused(models: Path) -> None:
    path = models / "tiny"
    (path / GRAPH).rename(path / "model.ORT")
    tiny.edit(path, lambda fields: fields["graphs"][0].update(file="model.ORT"))
    with pytest.raises(BundleError, match="own format"):
        load_bundle(path)
