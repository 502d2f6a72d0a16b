"""Truncated, altered, inconsistent and malicious bundles: each is refused by name, and the other models can still be served."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from onnx import helper, numpy_helper

import tiny
from application import play, rejected
from bertserve.service.bundle.files import MANIFEST_FILE, TOKENIZER_FILE
from bertserve.service.errors import BundleError, StartError
from bertserve.service.models import loading
from bertserve.service.models.build import build
from bertserve.service.models.model import Model
from bertserve.service.settings import Settings

GRAPH = "model.cpu.fp32.onnx"


def refusal(models: Path, **settings: Any) -> str:
    with pytest.raises(StartError) as caught:
        build(Settings(models=models, **settings))
    return str(caught.value)


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
        assert f"{name}` was altered" in refusal(models)


def test_an_altered_manifest_is_refused_or_read(models: Path) -> None:
    """The manifest has no digest. With an altered byte, the start either fails with a message that names the bundle, or succeeds."""
    path = models / "tiny" / MANIFEST_FILE
    whole = path.read_bytes()
    refused = 0
    for place in random.Random(0).sample(range(len(whole)), 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        try:
            build(Settings(models=models))
        except StartError as error:
            refused += 1
            assert "tiny" in str(error)
    assert 20 < refused < 60


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
    made = tokenizers.Tokenizer.from_file(str(path / TOKENIZER_FILE))
    made.add_tokens(["outside"])
    made.save(str(path / TOKENIZER_FILE))
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


# ---- the other models are served


def test_a_broken_model_can_be_skipped(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("altered", "mixed"):
        tiny.bundle(models, name)
    (models / "altered" / GRAPH).write_bytes(b"x")
    larger_vocabulary(models / "mixed")
    assert "altered" in refusal(models)

    async def check(client: Any) -> tuple[Any, ...]:
        answers = [await client.get("/models"), await client.get("/metrics"), await client.post("/models/altered", json={"inputs": "good"})]
        return (*answers, await client.post("/classify", json={"inputs": "good"}))

    listed, metrics, broken, served = play(build(Settings(models=models, skip_broken=True)), check)
    assert [(model["name"], "was altered" in model.get("broken", "")) for model in listed.json()] == [
        ("tiny", False),
        ("altered", True),
        ("mixed", False),
    ]
    assert "32 tokens" in listed.json()[2]["broken"]
    assert 'bertserve_broken_models{model="altered"} 1.0' in metrics.text
    assert "`altered`" in rejected(broken, 404, "not_found")
    assert served.status_code == 200
    assert "`altered`" in caplog.text


def test_a_folder_with_only_broken_models_is_always_an_error(models: Path) -> None:
    (models / "tiny" / GRAPH).write_bytes(b"x")
    assert "was altered" in refusal(models, skip_broken=True)


# ---- several folders


def test_models_of_several_folders_are_served(tmp_path: Path) -> None:
    """Models are sorted by name, not by folder. A name in two folders is an error."""
    first, second = tmp_path / "1", tmp_path / "2"
    tiny.bundle(first, "b")
    tiny.bundle(second, "a")
    assert list(build(Settings(models=f"{first},{second}", allow_implicit_default=True)).registry.models) == ["a", "b"]  # type: ignore[arg-type]
    tiny.bundle(second, "b")
    with pytest.raises(BundleError, match="`b`"):
        build(Settings(models=(first, second)))


def test_models_are_loaded_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread loads a model at the same time. The registry is sorted by name."""
    for name in "abcd":
        tiny.bundle(tmp_path, name)
    real, beside = loading.load_model, threading.Barrier(2)

    def load(path: Path, **options: Any) -> Model:
        beside.wait(20)
        return real(path, **options)

    monkeypatch.setattr(loading, "load_model", load)
    assert ["a", "b", "c", "d"] == list(build(Settings(models=tmp_path, threads=2, allow_implicit_default=True)).registry.models)


def test_the_error_of_the_first_model_by_name_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that is found earlier does not come first. With `--skip-broken`, all errors are reported in order of names."""
    for name in "abc":
        tiny.bundle(tmp_path, name)
    second = threading.Event()

    def load(path: Path, **options: Any) -> Model:
        if path.name == "a":
            assert second.wait(20)
        if path.name == "b":
            second.set()
        raise BundleError(f"no {path.name}")

    monkeypatch.setattr(loading, "load_model", load)
    assert refusal(tmp_path, threads=2) == "no a"
    second.clear()
    assert refusal(tmp_path, threads=2, skip_broken=True).endswith(": no a; no b; no c")
    assert ["`a`", "`b`", "`c`"] == [record.message.split()[1] for record in caplog.records]
