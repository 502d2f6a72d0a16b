"""Exports of a checkpoint to a bundle: files, manifest and model card."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
import transformers
from huggingface_hub.repocard import metadata_load

from bertserve.export import cli
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.model_card import model_card
from bertserve.export.onnx_trace import OPSETS
from bertserve.export.validation.comparison import MAX_ABS_ERROR, MAX_BATCH_ERROR
from bertserve.export.validation.served_graph import MAX_FULL_LENGTH, measure_latency
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, Bundle, digest, load_bundle
from bertserve.service.check import check
from bertserve.service.settings import Settings
from support import ROOT
from support.bundles import FEW_TEXTS, Service, exported, exported_by_default, left_in, refused
from support.checkpoints import POSITIONS, bert, edit_json, pickle_weights, rename_weights, shard

pytestmark = pytest.mark.torch


@pytest.fixture(name="source", scope="module")
def default_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("exported"))


@pytest.fixture(name="usual", scope="module")
def usual_bundle(source: Path) -> Bundle:
    return exported_by_default(source)


def test_a_bundle_holds_manifest_tokenizer_card_and_graphs(source: Path, usual: Bundle) -> None:
    secrets = [str(source.parent).encode(), b"site-packages"]

    assert set(left_in(usual.path)) == {CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, "model.cpu.fp32.onnx", "model.cpu.int8.onnx"}
    assert list(usual.path.parent.iterdir()) == [usual.path]
    assert usual.path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in usual.path.iterdir() for secret in secrets if secret in path.read_bytes()] == []


def test_the_tokenizer_keeps_templates_but_not_truncation_and_padding(usual: Bundle) -> None:
    document = json.loads((usual.path / TOKENIZER_FILE).read_text(encoding="utf-8"))
    cls, sep = {"special": "[CLS]", "id": 2, "type_id": 0}, {"special": "[SEP]", "id": 3, "type_id": 0}
    a, b = {"text": "a", "type_id": 0}, {"text": "b", "type_id": 1}
    spec = usual.manifest.tokenizer

    assert (document["truncation"], document["padding"]) == (None, None)
    assert [piece.model_dump() for piece in spec.single] == [cls, a, sep]
    assert [piece.model_dump() for piece in spec.pair] == [cls, a, sep, b, {**sep, "type_id": 1}]


def test_the_manifest_says_where_the_bundle_came_from(usual: Bundle) -> None:
    source = usual.manifest.source

    assert source.checkpoint == "tiny-bert"
    assert source.revision is None
    assert len(source.weights_sha256) == 64
    assert set(source.versions) == {"bertserve", "python", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers"}
    assert (source.license, source.license_name, source.datasets) == ((), None, ())


@pytest.mark.full_grid
def test_int8_with_low_agreement_is_not_the_default(
    source: Path, usual: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bertserve.service.bundle.validation_policy.LOW_AGREEMENT_THRESHOLD", 1.01)
    models = tmp_path / "models"
    assert cli.main([str(source), "--output", str(models), "--int8-texts", str(FEW_TEXTS)]) == 0
    bundle = load_bundle(models / "tiny-bert")

    assert {graph.precision: graph.default for graph in bundle.manifest.graphs} == {"fp32": True, "int8": False}
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert any("cpu/int8" in line and "not the default" in line for line in warnings)
    assert "**Warning:** graph cpu/int8" in (bundle.path / CARD_FILE).read_text(encoding="utf-8")
    assert asyncio.run(check(Settings(models=(models,)))) == 0


@pytest.mark.parametrize("precisions", [("int8", "fp32"), ("int8",)])
def test_the_last_precision_is_the_default_graph(source: Path, usual: Bundle, tmp_path: Path, precisions: tuple[str, ...]) -> None:
    bundle = exported(source, tmp_path, precisions=precisions)

    assert {graph.precision: graph.default for graph in bundle.manifest.graphs} == {name: name == precisions[-1] for name in precisions}
    assert {path.name for path in bundle.path.glob("*.onnx")} == {f"model.cpu.{name}.onnx" for name in precisions}
    assert {graph.precision: graph.default for graph in usual.manifest.graphs} == {"fp32": False, "int8": True}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_manifest_has_each_graph_with_its_validation(usual: Bundle, precision: str) -> None:
    graph = usual.graph("cpu", precision)
    validation, lengths = graph.validation, graph.validation.lengths
    opsets = {opset.domain: opset.version for opset in onnx.load(str(usual.path / graph.file)).opset_import}

    fills = {"input_ids": "token_ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    assert {spec.name: spec.fill for spec in graph.inputs} == fills
    assert [(spec.name, spec.kind) for spec in graph.outputs] == [("logits", "per_text")]
    assert graph.batch_invariant
    assert validation.worst_batch_error <= MAX_BATCH_ERROR
    if precision == "fp32":
        assert validation.agreement.value == 1.0
        assert validation.fusions["Attention"] == 2
        assert validation.quantized == {}
        assert validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]
    assert OPSETS["dynamo"] == opsets[""] == validation.opset
    # length ranges double up to the model's length; the worst range has the overall worst error
    assert [entry.up_to for entry in lengths] == [16, 32, 64, 128, 160]
    assert max(entry.worst_abs_error for entry in lengths) == validation.worst_abs_error
    assert [timing.length for timing in validation.speed.timings] == [16, 64, 128, POSITIONS]


def test_a_model_with_many_positions_is_timed_up_to_the_longest_sample() -> None:
    lengths: set[int] = set()
    engine: Any = SimpleNamespace(run=lambda batch: lengths.add(len(batch[0])))

    assert [timing.length for timing in measure_latency(engine, max_length=10**6, pad_id=0).timings] == [16, 64, 128, MAX_FULL_LENGTH]
    assert lengths == {16, 64, 128, MAX_FULL_LENGTH}


def untimed(target: Path) -> dict[str, Any]:
    """Returns the manifest of a bundle without the timings of its graphs."""
    manifest = json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8"))
    for graph in manifest["graphs"]:
        del graph["validation"]["speed"]["timings"]
    return dict(manifest)


def test_the_same_checkpoint_gives_the_same_files(source: Path, usual: Bundle, tmp_path: Path) -> None:
    again = exported_by_default(source, tmp_path).path
    digests = [
        {path.name: path.name in (MANIFEST_FILE, CARD_FILE) or digest(path) for path in folder.iterdir()} for folder in (usual.path, again)
    ]

    assert digests[1] == digests[0]
    assert untimed(again) == untimed(usual.path)


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
        assert load_checkpoint(str(source)).activation == expected


def old_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors with the names of BERT's first port to PyTorch."""
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensors[name] for name in tensors
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(pickle_weights, id="one file"),
        pytest.param(lambda source: shard(source, 3, pickled=True), id="several files"),
        pytest.param(
            lambda source: pickle_weights(source, _use_new_zipfile_serialization=False), id="the format of old versions of PyTorch"
        ),
        pytest.param(lambda source: pickle_weights(source, old_names), id="old names"),
    ],
)
def test_pickled_weights_are_read_like_safetensors(tmp_path: Path, change: Callable[[Path], object]) -> None:
    source = bert(tmp_path)
    expected = load_checkpoint(str(source))
    change(source)
    actual = load_checkpoint(str(source))
    tensors, copies = expected.model.state_dict(), actual.model.state_dict()

    assert copies.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], copies[name])] == []
    assert (expected.origin.weights_format, actual.origin.weights_format) == ("safetensors", "pickle")
    assert expected.origin.weights_sha256 != actual.origin.weights_sha256


@pytest.mark.parametrize(
    "labels", [(1, 0), *(pytest.param(x, marks=pytest.mark.full_grid) for x in ((False, True), (0, "other"), (0.5, 1e30)))], ids=str
)
def test_labels_can_be_numbers_and_truth_values(tmp_path: Path, labels: tuple[Any, ...]) -> None:
    """They are texts here, and equal to what `str` makes of the answers of the pipeline."""
    source = bert(tmp_path, labels=("a", "b"))
    edit_json(source / "config.json", id2label=dict(enumerate(labels)), label2id={str(label): i for i, label in enumerate(labels)})
    [expected] = transformers.pipeline("text-classification", model=str(source), device="cpu", top_k=None)(["a good film"])
    [answer] = Service(exported(source).path).answer({"inputs": "a good film"})
    assert [(item["label"], item["score"]) for item in answer] == [
        (str(item["label"]), pytest.approx(item["score"], abs=1e-5)) for item in expected
    ]


def test_the_digest_covers_only_the_loaded_files(tmp_path: Path) -> None:
    source = bert(tmp_path)
    before = load_checkpoint(str(source)).origin.weights_sha256
    shutil.copy(source / "model.safetensors", source / "optimizer.safetensors")
    assert load_checkpoint(str(source)).origin.weights_sha256 == before
    rename_weights(source, "part.safetensors")
    assert load_checkpoint(str(source)).origin.weights_sha256 == before


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

```python
# not a heading
```

## Data
"""


def test_the_checkpoints_own_card_is_kept(tmp_path: Path) -> None:
    source = bert(tmp_path)
    (source / "README.md").write_text(OWN_CARD, encoding="utf-8")
    target = exported(source).path
    card = (target / CARD_FILE).read_text(encoding="utf-8")
    metadata = {"license": "other", "license_name": "our-terms", "language": ["en", "no"], "datasets": ["stanfordnlp/sst2"]}

    assert metadata_load(target / CARD_FILE) == metadata
    stored = json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8"))["source"]
    assert {name: stored[name] for name in [*metadata, "license_link"]} == metadata | {"license": ["other"], "license_link": None}
    assert card.endswith(":\n\n## My model\n\n```python\n# not a heading\n```\n\n### Data\n")
    assert "\n---\n# tiny-bert\n" in card


@pytest.mark.parametrize("folder", sorted((ROOT / "models").glob("*/")), ids=lambda folder: folder.name)
def test_the_card_of_an_embedded_bundle_is_that_of_its_manifest(folder: Path) -> None:
    card = model_card(load_bundle(folder).manifest, folder)
    assert (folder / CARD_FILE).read_text(encoding="utf-8").partition("\nThe checkpoint has this card:\n")[0] == card
