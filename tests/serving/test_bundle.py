"""Bundles: their loading, the errors for broken and malicious ones, and the service of the other models."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from bertserve.service.bundle import files
from bertserve.service.bundle.files import MANIFEST_FILE, TOKENIZER_FILE, digest, load_bundle
from bertserve.service.errors import StartError
from bertserve.service.models import loading
from bertserve.service.models.model import Model
from bertserve.service.tasks import catalog
from support import raises_exactly, tiny
from support.app_client import error_of, post, serving, state_of

GRAPH, DATA = "model.cpu.fp32.onnx", "weights.data"


def move_weights(path: Path, location: str = DATA, *, is_listed: bool = True, outside: bool = False) -> None:
    """Moves a matrix of a bundle's graph to a file and updates the manifest."""
    model = tiny.graph()
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "dense")
    file = path.parent.parent / DATA if outside else path / DATA
    file.write_bytes(tensor.raw_data)
    external_data_helper.set_external_data(tensor, location=location, offset=0, length=len(tensor.raw_data))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    data = [{"file": DATA, "sha256": digest(file), "size_bytes": file.stat().st_size}] if is_listed else []
    tiny.replace_graph(path, model, data=data)


def hide_location(path: Path) -> None:
    """Writes the length of the key `location` with two bytes, as no writer does but every reader accepts."""
    move_weights(path, is_listed=False)
    content = (path / GRAPH).read_bytes()
    key, entry = b"\x0a\x08location\x12" + bytes([len(DATA)]), b"\x0a\x88\x00location\x12" + bytes([len(DATA)])
    assert key in content
    tiny.replace_graph(path, content.replace(key, entry))


def link_data(path: Path) -> None:
    """Replaces the listed file by a link to the same content outside the bundle."""
    move_weights(path)
    (path / DATA).rename(path.parent.parent / DATA)
    (path / DATA).symlink_to(path.parent.parent / DATA)


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda path: tiny.edit(path, change)


@pytest.mark.parametrize(
    ("damage", "value"),
    [
        (lambda path: (path / "manifest.json").unlink(), r"manifest\.json"),
        (lambda path: (path / "manifest.json").write_text("{"), r"manifest\.json` .* JSON: EOF"),
        (lambda path: (path / "tokenizer.json").unlink(), r"tokenizer\.json"),
        (lambda path: (path / "model.cpu.fp32.onnx").unlink(), r"model\.cpu\.fp32\.onnx"),
        (edit(lambda m: m.update(format_version=2)), "format 2,"),
        (edit(lambda m: m["graphs"][0].update(file="../tiny/model.cpu.fp32.onnx")), r"`graphs\.0\.file`"),
        (edit(lambda m: m["graphs"][0].update(file="model\0.onnx")), r"`graphs\.0\.file`"),
        (edit(lambda m: m.update(surprise=1)), "`surprise`"),
        (edit(lambda m: m.pop("task")), "`task`"),
        (edit(lambda m: m["tokenizer"].update(max_length="32")), r"`tokenizer\.max_length`"),
        (edit(lambda m: m.update(name="other")), "`other`"),
        (edit(lambda m: m["graphs"][0].update(default=False)), "`default: true`"),
        (edit(lambda m: m.update(attention_heads=[2])), r"`attention_heads` .*`per_map`.*`model\.cpu\.fp32\.onnx`"),
        (edit(lambda m: m["graphs"][0]["validation"].update(agreement={"measure": "set_f1", "value": 1, "decisions": 0})), "`decisions`"),
        (lambda path: tiny.calibrate(path, method="per-label", scale=[1.0, 1.0]), "1 or 3 values"),
        (lambda path: tiny.calibrate(path, method="per-label", bias=[0.0] * 4), "1 or 3 values"),
        (lambda path: tiny.calibrate(path, scale=[1.0] * 3), "1 value for the method `temperature`"),
        (lambda path: tiny.calibrate(path, score_counts=[]), r"`graphs\.0\.calibration\.score_counts`"),
        # a file that is not listed, or that can be changed from outside
        (lambda path: move_weights(path, is_listed=False), r"weights\.data"),
        (lambda path: move_weights(path, "./weights.data"), r"\./weights\.data"),
        (lambda path: move_weights(path, "../../weights.data", is_listed=False, outside=True), r"\.\./\.\./weights\.data"),
        (lambda path: move_weights(path, str(path / DATA)), r"weights\.data"),
        (lambda path: move_weights(path, ""), "``"),
        (lambda path: move_weights(path, "*/_ORT_MEM_ADDR_/*", is_listed=False), "_ORT_MEM_ADDR_"),
        (link_data, "a link"),
        (hide_location, r"weights\.data"),
    ],
)
def test_a_broken_bundle_is_named_with_its_fault(models: Path, damage: Callable[[Path], Any], value: str) -> None:
    damage(models / "tiny")

    with raises_exactly(StartError, match=value):
        files.load_bundle(models / "tiny")


@pytest.mark.parametrize(
    ("task", "change", "pattern"),
    [
        ("text-classification", {"task": "poetry"}, "models/tiny` .*`poetry`"),
        ("text-classification", {"task": "text-ranking"}, "`text-ranking`"),
        ("text-classification", {"labels": []}, "models/tiny` .*`labels`"),
        ("token-classification", {"labels": []}, "`labels`"),
        ("feature-extraction", {"embedding": None}, "`embedding`"),
        ("fill-mask", {"tokenizer": {"mask": None}}, r"`tokenizer\.mask`"),
    ],
)
def test_a_bundle_must_have_the_fields_of_its_task(tmp_path: Path, task: str, change: dict[str, Any], pattern: str) -> None:
    path = tiny.bundle(tmp_path / "models", task=task)
    [(name, value)] = change.items()
    tiny.edit(path, lambda m: m.update({name: m[name] | value if isinstance(value, dict) else value}))
    with raises_exactly(StartError, match=pattern):
        catalog.find_spec(files.load_bundle(path))


def test_bundles_are_found_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", ".a.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("")

    assert [path.name for path in files.find_bundles([tmp_path])] == ["a", "b"]


def test_one_bundle_is_found_by_its_name(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of other folders do not matter."""
    other = tmp_path / "other"
    (models / "lost+found").mkdir()
    (models / ".hidden").mkdir()
    (other / "second").mkdir(parents=True)
    folders = [tmp_path / "none", other, models]
    paths = [files.find_bundle(folders, name) for name in ("tiny", "second", "third", ".hidden", "models")]
    assert paths == [models / "tiny", other / "second", None, None, None]
    assert files.find_bundle([other, models / "tiny"], "tiny") == models / "tiny"
    monkeypatch.chdir(models / "tiny")
    assert files.find_bundle([Path()], "tiny") == models / "tiny"


def test_a_listed_file_is_loaded(models: Path) -> None:
    whole = post(models, {"inputs": "good"}).json()
    move_weights(models / "tiny")
    assert post(models, {"inputs": "good"}).json() == whole


def test_the_format_of_onnxruntime_is_refused(models: Path) -> None:
    path = models / "tiny"
    (path / GRAPH).rename(path / "model.ORT")
    tiny.edit(path, lambda fields: fields["graphs"][0].update(file="model.ORT"))
    with raises_exactly(StartError, match=r"model\.ORT`"):
        load_bundle(path)


def refusal(models: Path, **settings: Any) -> str:
    with pytest.raises(StartError) as error:
        state_of(models, **settings)
    return str(error.value)


@pytest.mark.parametrize("name", [MANIFEST_FILE, TOKENIZER_FILE, GRAPH])
def test_a_truncated_or_altered_file_is_refused(models: Path, name: str) -> None:
    path = models / "tiny" / name
    whole = path.read_bytes()
    places = random.Random(0).sample(range(len(whole)), 12)
    for length in {0, 1, len(whole) - 1, *places}:
        path.write_bytes(whole[:length])
        assert name in refusal(models)
    for place in places if name != MANIFEST_FILE else ():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert f"{name}`" in refusal(models)


def fewer_positions(path: Path) -> None:
    """Gives the graph only 16 positions, although texts can have 32 tokens."""
    model = tiny.graph()
    table = numpy_helper.from_array(np.zeros((16, tiny.HIDDEN), dtype=np.float32), "positions")
    steps = [
        helper.make_node("Shape", ["input_ids"], ["shape"], start=1),
        helper.make_node("Squeeze", ["shape"], ["size"]),
        helper.make_node("Range", ["zero", "size", "one"], ["order"]),
        helper.make_node("Gather", ["positions", "order"], ["position"]),
        helper.make_node("Add", ["words_only", "position"], ["word"]),
    ]
    model.graph.node[0].output[0] = "words_only"
    for step in reversed(steps):
        model.graph.node.insert(1, step)
    model.graph.initializer.extend([table, *(numpy_helper.from_array(np.array(v), n) for n, v in (("zero", 0), ("one", 1)))])
    tiny.replace_graph(path, model)


def larger_vocabulary(path: Path) -> None:
    """Gives the tokenizer a token for which the graph has no row."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path / TOKENIZER_FILE))
    tokenizer.add_tokens(["outside"])
    tokenizer.save(str(path / TOKENIZER_FILE))
    tiny.replace_graph(path, tiny.graph())


def another_domain(path: Path) -> None:
    """Gives the graph an operator of a library that is not installed."""
    model = tiny.graph()
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    tiny.replace_graph(path, model)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (fewer_positions, "32 tokens"),
        (larger_vocabulary, "32 tokens"),
        (lambda path: tiny.replace_graph(path, tiny.graph(labels=5)), "5 values as `logits`"),
        (another_domain, "com.example"),
        (lambda path: tiny.replace_graph(path, b"\x08\x07 no graph"), "cannot load"),
    ],
)
def test_a_graph_that_does_not_fit_its_bundle_is_refused(models: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(models / "tiny")
    message = refusal(models)
    assert words in message
    assert "tiny" in message


async def test_a_broken_model_can_be_skipped(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("altered", "mixed"):
        tiny.bundle(models, name)
    (models / "altered" / GRAPH).write_bytes(b"x")
    larger_vocabulary(models / "mixed")
    assert "altered" in refusal(models)
    async with serving(state_of(models, skip_broken=True)) as client:
        models_page, metrics = [await client.get(path) for path in ("/models", "/metrics")]
        broken, answer = [await client.post(path, json={"inputs": "good"}) for path in ("/models/altered", "/classify")]
    assert [(model["name"], "was altered" in model.get("broken", "")) for model in models_page.json()] == [
        ("tiny", False),
        ("altered", True),
        ("mixed", False),
    ]
    assert "32 tokens" in models_page.json()[2]["broken"]
    assert 'bertserve_broken_models{model="altered"} 1.0' in metrics.text
    assert "`altered`" in error_of(broken, 404, "not_found")
    assert answer.status_code == 200
    assert "the model altered cannot be loaded, it is not served: " in caplog.text


def test_a_folder_with_only_broken_models_is_always_an_error(models: Path) -> None:
    (models / "tiny" / GRAPH).write_bytes(b"x")
    assert GRAPH in refusal(models, skip_broken=True)


def test_models_of_several_folders_are_served(tmp_path: Path) -> None:
    """Models are sorted by name, not by folder. A name in two folders is an error."""
    first, second = tmp_path / "1", tmp_path / "2"
    tiny.bundle(first, "b")
    tiny.bundle(second, "a")
    assert list(state_of(f"{first},{second}", allow_implicit_default=True).registry.models) == ["a", "b"]
    tiny.bundle(second, "b")
    with raises_exactly(StartError, match="`b`"):
        state_of((first, second))


def test_models_are_loaded_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcd":
        tiny.bundle(tmp_path, name)
    real, two_loads = loading.load_model, threading.Barrier(2)

    def load(path: Path, served: None, **options: Any) -> Model:
        two_loads.wait(20)
        return real(path, served, **options)

    monkeypatch.setattr(loading, "load_model", load)
    assert list(state_of(tmp_path, threads=2, allow_implicit_default=True).registry.models) == ["a", "b", "c", "d"]
