"""Exports of a checkpoint to a bundle: files, manifest, model card, and scores that match PyTorch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from huggingface_hub.repocard import metadata_load
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.torch import load_file

from bertserve.export import calibration, cli
from bertserve.export.bundle import model_card
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import ParityError
from bertserve.export.validation.comparison import MAX_ABS_ERROR, MAX_ROW_ERROR, Reference, compare
from bertserve.export.validation.pytorch import run
from bertserve.export.validation.served_graph import Answer, ServedGraph
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, Bundle, digest, load_bundle
from bertserve.service.check import check
from bertserve.service.settings import Settings
from bertserve.service.tasks import classify
from bertserve.service.text.tokenizer import Tokenizer
from bundles import Served, engine_of, exported, refused
from checkpoints import CLASSIFICATION, POSITIONS, PyTorch, bert, edit_json, few_texts
from playback import play_back

pytestmark = pytest.mark.torch

LONG = "the film was not very good , but the book is great ! " * 40


def words(tokens: int) -> str:
    """Returns a text that encodes to `tokens` tokens, including [CLS] and [SEP]."""
    some = "the a film book was is good bad fine dull great poor".split()
    return " ".join(some[i % len(some)] for i in range(tokens - 2))


@pytest.fixture(name="source", scope="module")
def default_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("exported"))


@pytest.fixture(name="usual", scope="module")
def usual_bundle(source: Path) -> Bundle:
    return exported(source, precisions=("fp32", "int8"), calibration=few_texts(source.parent))


# ---- the folder and the manifest


def test_a_bundle_holds_manifest_tokenizer_card_and_graphs(source: Path, usual: Bundle) -> None:
    """The output folder has only the bundle. Other users can read it, and no file contains a path of the exporting machine."""
    secrets = [str(source.parent).encode(), b"site-packages"]

    assert {CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, "model.cpu.fp32.onnx", "model.cpu.int8.onnx"} == {
        path.name for path in usual.path.iterdir()
    }
    assert [usual.path] == list(usual.path.parent.iterdir())
    assert 0o755 == usual.path.stat().st_mode & 0o777
    assert [] == [path.name for path in usual.path.iterdir() for secret in secrets if secret in path.read_bytes()]


def test_the_tokenizer_keeps_templates_but_not_truncation_and_padding(usual: Bundle) -> None:
    document = json.loads((usual.path / TOKENIZER_FILE).read_text(encoding="utf-8"))
    cls, sep = {"special": "[CLS]", "id": 2, "type_id": 0}, {"special": "[SEP]", "id": 3, "type_id": 0}
    a, b = {"text": "a", "type_id": 0}, {"text": "b", "type_id": 1}
    spec = usual.manifest.tokenizer

    assert (None, None) == (document["truncation"], document["padding"])
    assert [cls, a, sep] == [piece.model_dump() for piece in spec.single]
    assert [cls, a, sep, b, {**sep, "type_id": 1}] == [piece.model_dump() for piece in spec.pair]


def test_the_manifest_says_where_the_bundle_came_from(usual: Bundle) -> None:
    source = usual.manifest.source

    assert ("tiny-bert", None, 64) == (source.checkpoint, source.revision, len(source.weights_sha256))
    assert {"bertserve", "python", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers"} == set(source.versions)
    assert ((), None, ()) == (source.license, source.license_name, source.datasets)


@pytest.mark.full_grid
def test_int8_with_low_agreement_is_not_the_default(
    source: Path, usual: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play_back(monkeypatch, source)
    monkeypatch.setattr("bertserve.service.bundle.validation_policy.ENOUGH_AGREEMENT", 1.01)
    models = tmp_path / "models"
    assert 0 == cli.main([str(source), "--output", str(models), "--calibration", str(few_texts(tmp_path))])
    bundle = load_bundle(models / "tiny-bert")

    assert {"fp32": True, "int8": False} == {graph.precision: graph.default for graph in bundle.manifest.graphs}
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert any("cpu/int8" in line and "not the default" in line for line in warnings)
    assert "**Warning:** graph cpu/int8" in (bundle.path / CARD_FILE).read_text(encoding="utf-8")
    assert 0 == asyncio.run(check(Settings(models=(models,))))


BROKEN: dict[str, tuple[int, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "permuted columns": (1, lambda weight: np.random.default_rng(0).permutation(weight, axis=1)),
    "zero scales": (3, np.zeros_like),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_int8_with_one_broken_matrix_is_refused(source: Path, usual: Bundle, tmp_path: Path, kind: str) -> None:
    """Each of the ten matrices is broken in turn. The unbroken graph passes the same comparison."""
    graph = usual.graph("cpu", "int8")
    tokenizer = Tokenizer(usual.tokenizer_path, usual.manifest.tokenizer)
    checkpoint = replace(load_checkpoint(str(source)), inputs=graph.inputs)
    requests = [classify.ClassifyRequest(str(text)) for text in calibration.read_texts(calibration.BUILT_IN)[20:60:3]]
    reference = Reference("the checkpoint", requests, [Answer((), run(checkpoint, request), None) for request in requests], fixed=0)

    def check(path: Path) -> None:
        engine = engine_of(usual, graph, path)
        compare(ServedGraph(graph, engine, tokenizer, checkpoint), reference).check()

    check(usual.path / graph.file)
    model = onnx.load(str(usual.path / graph.file))
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    place, broken = BROKEN[kind]
    products = [node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat"]
    for node in products:
        tensor = constants[node.input[place]]
        whole = onnx.TensorProto.FromString(tensor.SerializeToString())
        tensor.CopyFrom(numpy_helper.from_array(broken(numpy_helper.to_array(whole)), whole.name))
        onnx.save(model, str(tmp_path / "broken.onnx"))
        with pytest.raises(ParityError, match=r"int8 .*--calibration"):
            check(tmp_path / "broken.onnx")
        tensor.CopyFrom(whole)
    assert 10 == len(products)


@pytest.mark.parametrize("precisions", [("int8", "fp32"), ("int8",)])
def test_the_last_precision_is_the_default_graph(
    source: Path, usual: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precisions: tuple[str, ...]
) -> None:
    play_back(monkeypatch, source)
    bundle = exported(source, tmp_path, precisions=precisions, calibration=few_texts(tmp_path))

    assert {name: name == precisions[-1] for name in precisions} == {graph.precision: graph.default for graph in bundle.manifest.graphs}
    assert {f"model.cpu.{name}.onnx" for name in precisions} == {path.name for path in bundle.path.glob("*.onnx")}
    assert {"fp32": False, "int8": True} == {graph.precision: graph.default for graph in usual.manifest.graphs}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_manifest_has_each_graph_with_its_validation(usual: Bundle, precision: str) -> None:
    graph = usual.graph("cpu", precision)
    validation, lengths = graph.validation, graph.validation.lengths
    opsets = {opset.domain: opset.version for opset in onnx.load(str(usual.path / graph.file)).opset_import}

    fills = {"input_ids": "token_ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    assert fills == {spec.name: spec.fill for spec in graph.inputs}
    assert [("logits", "per_text")] == [(spec.name, spec.kind) for spec in graph.outputs]
    assert (True, True) == (graph.batch_invariant, validation.worst_row_error <= MAX_ROW_ERROR)
    if precision == "fp32":
        assert (1.0, 2, {}) == (validation.agreement.value, validation.fusions["Attention"], validation.quantized)
        assert validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]
    assert opsets[""] == validation.opset
    # length ranges double up to the model's length; the worst range has the overall worst error
    assert [16, 32, 64, 128, 160] == [entry.up_to for entry in lengths]
    assert validation.worst_abs_error == max(entry.worst_abs_error for entry in lengths)
    assert validation.speed is not None
    assert [16, 64, 128, POSITIONS] == [timing.length for timing in validation.speed.timings]


def untimed(target: Path) -> dict[str, Any]:
    """Returns the manifest of a bundle without the timings of its graphs."""
    manifest = json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8"))
    for graph in manifest["graphs"]:
        del graph["validation"]["speed"]["timings"]
    return dict(manifest)


def test_the_same_checkpoint_gives_the_same_files(source: Path, usual: Bundle, tmp_path: Path) -> None:
    again = exported(source, tmp_path, precisions=("fp32", "int8"), calibration=few_texts(tmp_path)).path
    digests = [
        {path.name: path.name in (MANIFEST_FILE, CARD_FILE) or digest(path) for path in folder.iterdir()} for folder in (usual.path, again)
    ]

    assert digests[0] == digests[1]
    assert untimed(usual.path) == untimed(again)


# ---- other checkpoints


IDENTITY, SIGMOID, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize(
    ("labels", "fields", "expected"),
    [
        (("value",), {"sentence_transformers": {"activation_fn": IDENTITY}, "sbert_ce_default_activation_function": SIGMOID}, "none"),
        (("a", "b"), {"sbert_ce_default_activation_function": SIGMOID}, "sigmoid"),
        (("value",), {"sbert_ce_default_activation_function": TANH, "problem_type": "regression"}, None),
        (("no", "yes"), {"sbert_ce_default_activation_function": IDENTITY}, "softmax"),
        (("value",), {"sbert_ce_default_activation_function": TANH}, None),
        (("value",), {"sentence_transformers": {"activation_fn": "own.Identity"}}, None),
    ],
)
def test_a_cross_encoder_uses_its_declared_activation(
    tmp_path: Path, labels: tuple[str, ...], fields: dict[str, Any], expected: str | None
) -> None:
    source = bert(tmp_path, labels=labels)
    edit_json(source / "config.json", **fields)
    if expected is None:
        assert "`torch.nn`" in refused(source)
    else:
        assert expected == load_checkpoint(str(source)).activation


def pickle_weights(source: Path, *, shards: int = 1, zipped: bool = True, old_names: bool = False) -> None:
    """Replaces the weights by pickles as older versions of PyTorch and transformers wrote them."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    if old_names:  # of BERT's first port to PyTorch
        tensors = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
    names = sorted(tensors)
    files = {f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" if shards > 1 else "pytorch_model.bin": names[i::shards] for i in range(shards)}
    for file, of_file in files.items():
        torch.save({name: tensors[name] for name in of_file}, source / file, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, of_file in files.items() for name in of_file}}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize("options", [{}, {"shards": 3}, {"zipped": False}, {"old_names": True}], ids=str)
def test_pickled_weights_are_read_like_safetensors(tmp_path: Path, options: dict[str, Any]) -> None:
    source = bert(tmp_path)
    expected = load_checkpoint(str(source))
    pickle_weights(source, **options)
    actual = load_checkpoint(str(source))
    tensors, found = expected.model.state_dict(), actual.model.state_dict()

    assert tensors.keys() == found.keys()
    assert [] == [name for name in tensors if not torch.equal(tensors[name], found[name])]
    assert ("safetensors", "pickle") == (expected.origin.weights_format, actual.origin.weights_format)
    assert expected.origin.weights_sha256 != actual.origin.weights_sha256


def test_a_given_task_replaces_missing_architectures(tmp_path: Path) -> None:
    source = bert(tmp_path)
    document = json.loads((source / "config.json").read_text())
    del document["architectures"]
    (source / "config.json").write_text(json.dumps(document))

    assert CLASSIFICATION == type(load_checkpoint(str(source), task="text-classification").model).__name__


# ---- answers


INPUTS: list[tuple[str, str | None]] = [
    *((words(tokens), None) for tokens in [*range(2, 65), POSITIONS - 1, POSITIONS]),
    ("", None),
    (" \t\n", None),
    ("good", None),
    ("zebra", None),
    ("Ünïcödé 看 😴", None),
    ("bad " * 7, None),
    ("good " + "the " * 62, None),
    ("the " * 62 + "good", None),
    (LONG, None),
    ("a film", "the book"),
    ("", "only the second"),
    ("good", LONG),
    (LONG, "bad"),
    (LONG, LONG),
    ("the first", "x " * 155),
]


def test_logits_of_texts_and_pairs_match_pytorch(source: Path, usual: Bundle) -> None:
    """Inputs include empty, unknown, Unicode and truncated texts. Each runs alone, and in a padded batch in both orders."""
    served, pytorch = Served(usual), PyTorch(source)
    encodings = served.encodings(*(classify.ClassifyRequest(*texts) for texts in INPUTS))
    expected = [pytorch.logits(*texts) for texts in INPUTS]
    alone = [served.engine.run([encoding])[0]["logits"] for encoding in encodings]

    assert [*range(2, 65), POSITIONS - 1, POSITIONS] == [len(encoding) for encoding in encodings[:65]]
    np.testing.assert_allclose(expected, alone, rtol=0, atol=1e-4)
    for step in (1, -1):
        together = [row["logits"] for row in served.engine.run(encodings[::step])][::step]
        np.testing.assert_allclose(expected, together, rtol=0, atol=1e-4)
        np.testing.assert_allclose(alone, together, rtol=0, atol=MAX_ROW_ERROR)


# ---- the card


OWN_CARD = """---
license: other
license_name: our-terms
language:
- en
- 'no'
datasets: stanfordnlp/sst2
tags: [films]
---
# My model

Trained on films.
"""


def test_the_checkpoints_own_card_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifest and new card have its license, languages and datasets. Its text is quoted, with headings one level lower."""
    play_back(monkeypatch, source := bert(tmp_path))
    (source / "README.md").write_text(OWN_CARD, encoding="utf-8")
    target = exported(source).path
    card = (target / CARD_FILE).read_text(encoding="utf-8")
    said = {"license": "other", "license_name": "our-terms", "language": ["en", "no"], "datasets": ["stanfordnlp/sst2"]}

    assert said == metadata_load(target / CARD_FILE)
    stored = json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8"))["source"]
    assert said | {"license": ["other"], "license_link": None} == {name: stored[name] for name in [*said, "license_link"]}
    assert card.endswith(":\n\n## My model\n\nTrained on films.\n")
    assert "\n---\n# tiny-bert\n" in card


@pytest.mark.parametrize("folder", sorted(Path("models").glob("*/")), ids=lambda folder: folder.name)
def test_the_card_of_an_embedded_bundle_is_that_of_its_manifest(folder: Path) -> None:
    card = model_card(load_bundle(folder).manifest, folder, None)
    assert card == (folder / CARD_FILE).read_text(encoding="utf-8").partition("\nThe checkpoint has this card:\n")[0]
