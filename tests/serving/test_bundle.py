"""Loading of bundles, and the errors for invalid bundles and for weights outside of their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, external_data_helper

import tiny
from application import classify
from bertserve.service.bundle import files
from bertserve.service.bundle.files import digest, load_bundle
from bertserve.service.errors import BundleError
from bertserve.service.tasks import catalog


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda path: tiny.edit(path, change)


@pytest.mark.parametrize(
    ("damage", "value"),
    [
        (lambda path: (path / "manifest.json").unlink(), r"manifest\.json"),
        (lambda path: (path / "manifest.json").write_text("{"), r"manifest\.json` .* JSON: EOF"),
        (lambda path: (path / "tokenizer.json").unlink(), r"tokenizer\.json"),
        (lambda path: (path / "model.cpu.fp32.onnx").unlink(), r"model\.cpu\.fp32\.onnx"),
        (lambda path: (path / "model.cpu.fp32.onnx").write_bytes(b"x"), r"model\.cpu\.fp32\.onnx` was altered"),
        (edit(lambda m: m.update(format_version=2)), "format 2,"),
        (edit(lambda m: m["graphs"][0].update(file="../tiny/model.cpu.fp32.onnx")), r"`graphs\.0\.file`"),
        (edit(lambda m: m["graphs"][0].update(file="model\0.onnx")), r"`graphs\.0\.file`"),
        (edit(lambda m: m.update(surprise=1)), "`surprise`"),
        (edit(lambda m: m.pop("task")), "`task`"),
        (edit(lambda m: m["tokenizer"].update(max_length="32")), r"`tokenizer\.max_length`"),
        (edit(lambda m: m.update(name="other")), "`other`"),
        (edit(lambda m: m["graphs"][0].update(default=False)), "`default: true`"),
    ],
)
def test_a_broken_bundle_is_named_with_its_fault(models: Path, damage: Callable[[Path], Any], value: str) -> None:
    damage(models / "tiny")

    with pytest.raises(BundleError, match=value):
        files.load_bundle(models / "tiny")


@pytest.mark.parametrize(
    ("task", "change", "named"),
    [
        ("text-classification", {"task": "poetry"}, "models/tiny` .*`poetry`"),
        ("text-classification", {"task": "text-ranking"}, "`text-ranking`"),
        ("text-classification", {"labels": []}, "models/tiny` .*`labels`"),
        ("token-classification", {"labels": []}, "`labels`"),
        ("feature-extraction", {"embedding": None}, "`embedding`"),
        ("fill-mask", {"tokenizer": {"mask": None}}, r"`tokenizer\.mask`"),
    ],
)
def test_a_bundle_must_have_the_fields_of_its_task(tmp_path: Path, task: str, change: dict[str, Any], named: str) -> None:
    """An unsupported task, or a bundle without a field of its task, is refused before a session is opened."""
    path = tiny.bundle(tmp_path / "models", task=task)
    for name, value in change.items():
        tiny.edit(path, lambda m, name=name, value=value: m.update({name: m[name] | value if isinstance(value, dict) else value}))  # type: ignore[misc]

    with pytest.raises(BundleError, match=named):
        catalog.spec_of(files.load_bundle(path))


def test_bundles_are_found_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", ".a.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("")

    assert ["a", "b"] == [path.name for path in files.find_bundles([tmp_path])]


@pytest.mark.parametrize("name", [None, "not a name"])
def test_a_folder_without_usable_bundles_is_an_error(tmp_path: Path, name: str | None) -> None:
    if name:
        (tmp_path / name).mkdir()

    with pytest.raises(BundleError, match=f"/{name or tmp_path.name}`"):
        files.find_bundles([tmp_path])


def test_one_bundle_is_found_by_its_name(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a manifest comes before a folder without one. The path for an unknown name does not exist."""
    other = tmp_path / "other"
    (models / "lost+found").mkdir()
    (other / "tiny").mkdir(parents=True)
    (other / "second").mkdir()
    folders = [tmp_path / "none", other, models]
    assert (models / "tiny", other / "second") == tuple(files.find_bundle(folders, name) for name in ("tiny", "second"))
    assert not files.find_bundle(folders, "third").exists()
    assert models / "tiny" == files.find_bundle([other, models / "tiny"], "tiny")
    monkeypatch.chdir(models / "tiny")
    assert models / "tiny" == files.find_bundle([Path()], "tiny")


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
