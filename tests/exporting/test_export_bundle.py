"""From checkpoint to bundle: the files, what the manifest says, and that the service answers as PyTorch does."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers
from huggingface_hub.repocard import metadata_load
from numpy.typing import NDArray
from onnx import numpy_helper

import bertserve.service.cli
import tiny
from bertserve.export import calibration, cli
from bertserve.export.bundle import model_card
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import ParityError
from bertserve.export.pipeline import ExportSpec, export
from bertserve.export.validation.agreement import MAX_ROW_ERROR
from bertserve.export.validation.parity import INT8_SLACK, MAX_ABS_ERROR, measure_parity
from bertserve.export.validation.reference import Reference
from bertserve.export.validation.samples import text_requests
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, digest, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.check import check
from bertserve.service.settings import Settings
from bertserve.service.tasks import classify
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from checkpoints import CLASSIFICATION, POSITIONS, ROWS, SIZES, PyTorch, bert, few_texts, naming, save
from playback import play_back
from task_runs import decode, encode

pytestmark = pytest.mark.torch

LONG = "the film was not very good , but the book is great ! " * 40


class Served:
    """A bundle's graph behind the service's own tokenizer, engine and decoder."""

    def __init__(self, path: Path, precision: Precision = "fp32") -> None:
        bundle = load_bundle(path)
        graph = bundle.graph("cpu", precision)
        self.manifest = bundle.manifest
        spec = bundle.manifest.tokenizer
        self.tokenizer = Tokenizer(bundle.tokenizer_path, spec)
        self.engine = OnnxEngine(path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side)

    def encode(self, text: str, pair: str | None = None) -> Encoding:
        """Returns the one encoding of a text or pair, truncated to the model's length."""
        [encoding] = encode(classify, classify.Request(text, pair), self.tokenizer).encodings
        return encoding

    def logits(self, encodings: Sequence[Encoding]) -> list[NDArray[np.float32]]:
        """Returns the logits of one batch, float32 [labels] each."""
        return [row["logits"] for row in self.engine.run(encodings)]

    def classify(self, text: str) -> list[classify.LabelScore]:
        """Returns labels and scores, best first."""
        rows = self.engine.run([self.encode(text)])
        return list(decode(classify, classify.Request(text), rows, self.manifest, self.tokenizer))


def silent(line: str) -> None:
    """Takes a line of progress."""


def words(tokens: int) -> str:
    """Returns a text that encodes to `tokens` tokens with [CLS] and [SEP]."""
    some = "the a film book was is good bad fine dull great poor".split()
    return " ".join(some[i % len(some)] for i in range(tokens - 2))


@dataclass(frozen=True)
class Exported:
    """A checkpoint and its bundle."""

    source: Path
    target: Path
    manifest: Manifest

    def graph(self, precision: str) -> GraphSpec:
        """Returns the entry of a graph."""
        [graph] = [graph for graph in self.manifest.graphs if graph.precision == precision]
        return graph


@pytest.fixture(name="exported", scope="module")
def exported_bundle(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The usual checkpoint, exported as fp32 and int8."""
    folder = tmp_path_factory.mktemp("exported")
    source = bert(folder)
    spec = ExportSpec(str(source), folder / "models", precisions=("fp32", "int8"), calibration=few_texts(folder))
    target, manifest = export(spec, silent)
    return Exported(source, target, manifest)


@pytest.fixture(name="served", scope="module")
def served_bundle(exported: Exported) -> Served:
    """The usual bundle's fp32 graph in the service's hands."""
    return Served(exported.target)


@pytest.fixture(name="pytorch", scope="module")
def pytorch_checkpoint(exported: Exported) -> PyTorch:
    """The usual checkpoint in transformers."""
    return PyTorch(exported.source)


# ---- the folder and the manifest


def test_a_bundle_holds_manifest_tokenizer_card_and_graphs(exported: Exported) -> None:
    """The folder has these five files and nothing else."""
    expected = {CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, "model.cpu.fp32.onnx", "model.cpu.int8.onnx"}

    assert expected == {path.name for path in exported.target.iterdir()}


def test_nothing_but_the_bundle_is_left_in_the_output_folder(exported: Exported) -> None:
    """No temporary folder stays behind."""
    assert [exported.target] == list(exported.target.parent.iterdir())


def test_the_service_verifies_what_was_exported(exported: Exported) -> None:
    """`bertserve.service.bundle.load` accepts the folder and reads the manifest that the export returned."""
    assert exported.manifest == load_bundle(exported.target).manifest


def test_another_user_may_read_the_bundle(exported: Exported) -> None:
    """The folder does not keep the private mode of a temporary one."""
    assert 0o755 == exported.target.stat().st_mode & 0o777


def test_the_stored_example_checks(exported: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    """`bert-serve check` gets the stored result from the default graph."""
    assert 0 == bertserve.service.cli.main(["check", "--models", str(exported.target.parent)])
    assert "tiny-bert: text-classification, cpu/int8: ok" in capsys.readouterr().out


def test_truncation_and_padding_of_the_training_are_gone(exported: Exported) -> None:
    """`tokenizer.json` comes without both, although the checkpoint's has both."""
    document = json.loads((exported.target / TOKENIZER_FILE).read_text(encoding="utf-8"))

    assert (None, None) == (document["truncation"], document["padding"])


def test_the_graph_names_no_path_of_the_exporting_machine(exported: Exported) -> None:
    """No file of the bundle holds a path of the machine that it was made on."""
    secrets = [str(exported.source.parent).encode(), b"site-packages"]

    assert [] == [path.name for path in exported.target.iterdir() for secret in secrets if secret in path.read_bytes()]


def test_templates_say_where_special_tokens_and_segments_are(exported: Exported) -> None:
    """BERT's templates are read off the tokenizer, for one text and for two."""
    cls, sep = {"special": "[CLS]", "id": 2, "type_id": 0}, {"special": "[SEP]", "id": 3, "type_id": 0}
    a, b = {"text": "a", "type_id": 0}, {"text": "b", "type_id": 1}
    spec = exported.manifest.tokenizer

    assert [cls, a, sep] == [piece.model_dump() for piece in spec.single]
    assert [cls, a, sep, b, {**sep, "type_id": 1}] == [piece.model_dump() for piece in spec.pair]


def test_inputs_are_named_with_what_fills_them(exported: Exported) -> None:
    """Each of BERT's three inputs has its fill, and the output is one row of logits per text."""
    expected = {"input_ids": "token_ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    graph = exported.graph("fp32")

    assert expected == {spec.name: spec.fill for spec in graph.inputs}
    assert [("logits", "per_text")] == [(spec.name, spec.kind) for spec in graph.outputs]


def test_the_manifest_says_where_the_bundle_came_from(exported: Exported) -> None:
    """Name of the checkpoint without its path, no revision, and the versions that made it."""
    source = exported.manifest.source

    assert ("tiny-bert", None, 64) == (source.checkpoint, source.revision, len(source.weights_sha256))
    assert {"bertserve", "python", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers"} == set(source.versions)


def test_the_last_precision_is_the_default_graph(exported: Exported) -> None:
    """`fp32,int8` makes int8 the default."""
    assert ["int8"] == [graph.precision for graph in exported.manifest.graphs if graph.default]


@pytest.mark.full_grid
def test_int8_that_answers_otherwise_is_no_default_unless_asked_for(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then fp32 is; its answer is the stored example, and command and card warn of int8, which is there for those who name it."""
    play_back(monkeypatch, exported.source)
    monkeypatch.setattr("bertserve.service.bundle.validation_policy.ENOUGH_AGREEMENT", 1.01)
    models, texts = tmp_path / "models", str(few_texts(tmp_path))
    assert 0 == cli.main([str(exported.source), "--output", str(models), "--calibration", texts])
    manifest = load_bundle(models / "tiny-bert").manifest

    assert {"fp32": True, "int8": False} == {graph.precision: graph.default for graph in manifest.graphs}
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert any("graph cpu/int8: answers agree on" in line and "it is not the default graph" in line for line in warnings)
    assert "**Warning:** graph cpu/int8: answers agree on" in (models / "tiny-bert" / CARD_FILE).read_text(encoding="utf-8")
    assert 0 == asyncio.run(check(Settings(models=(models,))))


def test_int8_is_compared_on_ordinary_texts_too(exported: Exported, tmp_path: Path) -> None:
    """On those that it was not calibrated on alone; its answers may differ, where those of fp32 may not."""
    split = calibration.read_split(few_texts(tmp_path)).with_passages(
        Tokenizer(exported.target / TOKENIZER_FILE, exported.manifest.tokenizer)
    )
    requests = text_requests("text-classification", split.report, exported.manifest.tokenizer)

    assert 3 == len(split.report.lines)
    assert 3 + 1 <= len(requests)  # every second text as a pair too
    assert [19, 19 + len(requests)] == [exported.graph(precision).evidence.samples for precision in ("fp32", "int8")]


BROKEN: dict[str, tuple[int, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "permuted columns": (1, lambda weight: np.random.default_rng(0).permutation(weight, axis=1)),
    "zero scales": (3, np.zeros_like),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_int8_with_one_broken_matrix_is_refused(exported: Exported, tmp_path: Path, kind: str) -> None:
    """Whichever of the ten it is; the graph as it was made is within the bound, which is relative to the spread of the outputs."""
    graph, spec = exported.graph("int8"), exported.manifest.tokenizer
    tokenizer = Tokenizer(exported.target / TOKENIZER_FILE, spec)
    checkpoint = replace(load_checkpoint(str(exported.source)), inputs=graph.inputs)
    requests = [classify.Request(str(text)) for text in calibration.read_texts(calibration.BUILT_IN)[20:60:3]]
    reference = Reference(checkpoint, [], requests)

    def compare(path: Path) -> None:
        engine = OnnxEngine(path, graph, pad_id=spec.pad_id, padding_side=spec.padding_side)
        measure_parity(engine, tokenizer, reference, checkpoint, "int8", INT8_SLACK * graph.evidence.quantization_error)

    compare(exported.target / graph.file)
    model = onnx.load(str(exported.target / graph.file))
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    place, broken = BROKEN[kind]
    products = [node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat"]
    for node in products:
        tensor = constants[node.input[place]]
        whole = onnx.TensorProto.FromString(tensor.SerializeToString())
        tensor.CopyFrom(numpy_helper.from_array(broken(numpy_helper.to_array(whole)), whole.name))
        onnx.save(model, str(tmp_path / "broken.onnx"))
        with pytest.raises(ParityError, match=r"int8 logits differ from the checkpoint's by .* of their spread.*--calibration"):
            compare(tmp_path / "broken.onnx")
        tensor.CopyFrom(whole)
    assert 10 == len(products)


def test_the_order_of_precisions_decides_the_default(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`int8,fp32` makes fp32 the default."""
    play_back(monkeypatch, exported.source)
    _, manifest = export(ExportSpec(str(exported.source), tmp_path, precisions=("int8", "fp32"), calibration=few_texts(tmp_path)), silent)

    assert ["fp32"] == [graph.precision for graph in manifest.graphs if graph.default]


def test_one_precision_alone_is_the_only_graph(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `int8` alone the fp32 graph is compared but not kept."""
    play_back(monkeypatch, exported.source)
    target, _ = export(ExportSpec(str(exported.source), tmp_path, precisions=("int8",), calibration=few_texts(tmp_path)), silent)

    assert ["model.cpu.int8.onnx"] == [path.name for path in target.glob("*.onnx")]


def test_fp32_is_batch_invariant(exported: Exported) -> None:
    """The measured difference of a row in a batch is within the bound, and the manifest says so."""
    graph = exported.graph("fp32")

    assert (True, True) == (graph.batch_invariant, graph.evidence.worst_row_error <= MAX_ROW_ERROR)


def test_int8_is_batch_invariant(exported: Exported) -> None:
    """Scales are fixed, so int8 is as independent of a row's neighbors as fp32, and the manifest says so."""
    graph = exported.graph("int8")

    assert (True, True) == (graph.batch_invariant, graph.evidence.worst_row_error <= MAX_ROW_ERROR)


def test_the_form_says_that_the_last_layer_is_narrowed(exported: Exported) -> None:
    """A classifier's graphs compute the last layer for the first token only, and both entries say so."""
    forms = [graph.form for graph in exported.manifest.graphs]

    assert ["torchscript opset 17, packed MultiHeadAttention with key padding, last layer for the first token only"] * 2 == forms


def test_validation_of_fp32_is_complete(exported: Exported) -> None:
    """All samples within the bound, all labels agreeing, attention fused in both layers, nothing quantized."""
    validation = exported.graph("fp32").evidence

    assert (19, 1.0, 2, {}) == (validation.samples, validation.label_agreement, validation.fusions["Attention"], validation.quantized)
    assert 0 <= validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]
    assert validation.nodes > 0


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_errors_stand_by_length(exported: Exported, precision: str) -> None:
    """Ranges double up to the model's length, hold all rows, and the worst of them is the worst of all."""
    validation = exported.graph(precision).evidence
    lengths = validation.lengths

    assert [16, 32, 64, 128, 160] == [entry.up_to for entry in lengths]
    assert sum(entry.rows for entry in lengths) > validation.samples  # some samples have several windows
    assert validation.worst_abs_error == max(entry.worst_abs_error for entry in lengths)
    assert validation.worst_rel_error == max(entry.worst_rel_error for entry in lengths)
    assert all(entry.worst_abs_error > 0 for entry in lengths)


def test_speed_is_of_the_usual_lengths_and_the_models_own(exported: Exported) -> None:
    """Milliseconds of one text, with the processor's name."""
    speed = exported.graph("int8").evidence.speed
    assert speed is not None

    assert [16, 64, 128, POSITIONS] == [timing.length for timing in speed.timings]
    assert all(timing.median_ms > 0 for timing in speed.timings)
    assert (True, 1) == (speed.cpu != "", speed.threads)


def test_the_opset_stands_in_the_validation(exported: Exported) -> None:
    """Of ONNX's own operators, as in the file."""
    graph = exported.graph("fp32")
    opsets = {opset.domain: opset.version for opset in onnx.load(str(exported.target / graph.file)).opset_import}

    assert opsets[""] == graph.evidence.opset


def test_validation_of_int8_counts_what_was_quantized(exported: Exported) -> None:
    """Four products in the first layer, five in the last, where the query stands alone, the pooler, and the word embedding."""
    quantized = exported.graph("int8").evidence.quantized

    assert {"MatMulIntegerToFloat", "PerRowEmbedding", "FloatUnits", "FloatInputs"} <= set(quantized)
    assert (10, 1) == (quantized["MatMulIntegerToFloat"], quantized["PerRowEmbedding"])


def untimed(target: Path) -> dict[str, Any]:
    """Returns the manifest of a bundle without the times of its graphs."""
    manifest = json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8"))
    for graph in manifest["graphs"]:
        del graph["evidence"]["speed"]["timings"]
    return dict(manifest)


def test_the_same_checkpoint_gives_the_same_files(exported: Exported, tmp_path: Path) -> None:
    """An export is repeatable to the byte, but for the times that it measured."""
    again, _ = export(ExportSpec(str(exported.source), tmp_path, precisions=("fp32", "int8"), calibration=few_texts(tmp_path)), silent)
    timed = {MANIFEST_FILE, CARD_FILE}

    assert {p.name: p.name in timed or digest(p) for p in exported.target.iterdir()} == {
        p.name: p.name in timed or digest(p) for p in again.iterdir()
    }
    assert untimed(exported.target) == untimed(again)


def test_every_stage_reports_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress has one line for each finished stage, and the built-in texts are what int8 is calibrated and judged on."""
    lines: list[str] = []
    play_back(monkeypatch, source := bert(tmp_path))
    export(ExportSpec(str(source), tmp_path / "models"), lines.append)

    stages = ["load", "trace", "optimize", "reference", "parity", "quantize", "parity", "package"]
    assert stages == [line.split()[0] for line in lines]
    assert re.match(r"quantize  int8, calibrated on 479 texts, judged on 70 others  \(", lines[5])


# ---- checkpoints that differ


@pytest.mark.parametrize(
    ("labels", "problem_type", "expected"),
    [
        (("negative", "positive"), None, "softmax"),
        (("negative", "positive"), "single_label_classification", "softmax"),
        (("toxic", "spam", "rude"), "multi_label_classification", "sigmoid"),
        (("relevance",), None, "sigmoid"),
        (("stars",), "regression", "none"),
        (("valence", "arousal"), "regression", "none"),
    ],
)
def test_the_activation_follows_the_problem_type(tmp_path: Path, labels: tuple[str, ...], problem_type: str | None, expected: str) -> None:
    """Regression has none, multi-label and a single label have sigmoid, the rest softmax; labels keep their order."""
    loaded = load_checkpoint(str(bert(tmp_path, labels=labels, problem_type=problem_type)))

    assert (expected, labels) == (loaded.activation, loaded.labels)


@pytest.mark.parametrize(
    ("labels", "problem_type"),
    [(("negative", "positive"), None), (("toxic", "spam", "rude"), "multi_label_classification"), (("stars",), "regression")],
)
def test_scores_are_those_of_the_transformers_pipeline(tmp_path: Path, labels: tuple[str, ...], problem_type: str | None) -> None:
    """Softmax, sigmoid and no activation give the pipeline's labels, scores and order."""
    source = bert(tmp_path, labels=labels, problem_type=problem_type)
    target, _ = export(ExportSpec(str(source), tmp_path / "models", precisions=("fp32",)), silent)
    pipeline = transformers.pipeline("text-classification", model=str(source), top_k=None, device="cpu")
    [expected] = pipeline(["the film was not very good"])
    actual = Served(target).classify("the film was not very good")

    assert [item["label"] for item in expected] == [item["label"] for item in actual]
    assert [item["score"] for item in expected] == pytest.approx([item["score"] for item in actual], abs=1e-5)


@pytest.mark.parametrize(
    ("positions", "model_max_length", "expected"), [(160, 512, 160), (160, 140, 140), (160, 160, 160), (512, int(1e30), 512)]
)
def test_the_usable_length_is_the_smaller_of_positions_and_tokenizer(
    tmp_path: Path, positions: int, model_max_length: int, expected: int
) -> None:
    """Neither the position table nor the tokenizer's own limit is exceeded."""
    source = bert(tmp_path, positions=positions, model_max_length=model_max_length)

    assert expected == load_checkpoint(str(source)).tokenizer_spec.max_length


@pytest.mark.parametrize("positions", [64, pytest.param(128, marks=pytest.mark.full_grid), pytest.param(130, marks=pytest.mark.full_grid)])
def test_a_short_checkpoint_is_exported(tmp_path: Path, positions: int) -> None:
    """A length with no room for the usual stride of windows is no obstacle."""
    source = bert(tmp_path, positions=positions)
    _, manifest = export(ExportSpec(str(source), tmp_path / "models", precisions=("fp32",)), silent)

    assert positions == manifest.tokenizer.max_length


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    """A checkpoint stored in float16 is exported from, and compared with, its weights in float32."""
    source = bert(tmp_path)
    transformers.AutoModelForSequenceClassification.from_pretrained(source).half().save_pretrained(source)
    target, _ = export(ExportSpec(str(source), tmp_path / "models", precisions=("fp32",)), silent)
    served = Served(target)
    [actual] = served.logits([served.encode("a good film")])

    np.testing.assert_allclose(PyTorch(source).logits("a good film"), actual, rtol=0, atol=1e-4)


@pytest.mark.full_grid
def test_sharded_weights_are_read(tmp_path: Path) -> None:
    """A checkpoint of several safetensors files gives the graph of the same checkpoint in one."""
    source = bert(tmp_path)
    whole, _ = export(ExportSpec(str(source), tmp_path / "whole", precisions=("fp32",)), silent)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    shards, _ = export(ExportSpec(str(source), tmp_path / "shards", precisions=("fp32",)), silent)

    assert digest(whole / "model.cpu.fp32.onnx") == digest(shards / "model.cpu.fp32.onnx")


def test_a_vocabulary_file_is_tokenizer_enough(exported: Exported, tmp_path: Path) -> None:
    """An old checkpoint with `vocab.txt` in place of `tokenizer.json` tokenizes as the same one with it."""
    source = bert(tmp_path)
    (source / "tokenizer.json").unlink()
    (source / "vocab.txt").write_text("\n".join(tiny.VOCABULARY) + "\n", encoding="utf-8")
    target, manifest = export(ExportSpec(str(source), tmp_path / "models", precisions=("fp32",)), silent)
    text = "The film wasn't [bad], ünknown 看 words"

    assert exported.manifest.tokenizer.pair == manifest.tokenizer.pair
    assert Served(exported.target).encode(text).ids.tolist() == Served(target).encode(text).ids.tolist()


FAMILIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "roberta": (
        "RobertaForSequenceClassification",
        transformers.RobertaConfig,
        {**SIZES, "max_position_embeddings": POSITIONS + 1, "pad_token_id": 0},
    ),
    "electra": (
        "ElectraForSequenceClassification",
        transformers.ElectraConfig,
        {**SIZES, "max_position_embeddings": POSITIONS, "embedding_size": 16},
    ),
    "distilbert": (
        "DistilBertForSequenceClassification",
        transformers.DistilBertConfig,
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": POSITIONS},
    ),
}


@pytest.mark.full_grid
@pytest.mark.parametrize("family", FAMILIES)
def test_bert_relatives_answer_as_in_pytorch(tmp_path: Path, family: str) -> None:
    """Relatives without token types, or with an offset of positions, answer a text of full length and a short one padded to it."""
    architecture, config, fields = FAMILIES[family]
    made = config(vocab_size=ROWS, **fields, **naming(tiny.LABELS))
    source = save(tmp_path / family, architecture, made, tokenizer_class="PreTrainedTokenizerFast")
    target, manifest = export(ExportSpec(str(source), tmp_path / "models", precisions=("fp32",)), silent)
    served, pytorch = Served(target), PyTorch(source)
    actual = served.logits([served.encode(LONG), served.encode("a good film")])

    assert manifest.tokenizer.max_length == POSITIONS
    np.testing.assert_allclose([pytorch.logits(LONG), pytorch.logits("a good film")], actual, rtol=0, atol=1e-4)


# ---- answers


@pytest.mark.parametrize("tokens", [*range(2, 65), POSITIONS - 1, POSITIONS])
def test_a_text_of_each_length_is_answered_as_in_pytorch(served: Served, pytorch: PyTorch, tokens: int) -> None:
    """From the empty text to the last position the logits are PyTorch's."""
    encoding = served.encode(words(tokens))
    [actual] = served.logits([encoding])

    assert tokens == len(encoding)
    np.testing.assert_allclose(pytorch.logits(words(tokens)), actual, rtol=0, atol=1e-4)


TEXTS = [
    "",
    " \t\n",
    "good",
    "zebra",
    "Ünïcödé 看 😴",
    "bad " * 7,
    "good " + "the " * 62,
    "the " * 62 + "good",
    words(POSITIONS),
    LONG,
]
PAIRS = [("a film", "the book"), ("", "only the second"), ("good", LONG), (LONG, "bad"), (LONG, LONG), ("the first", "x " * 155)]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_answered_as_in_pytorch(served: Served, pytorch: PyTorch, text: str) -> None:
    """Empty, unknown, unicode and truncated texts have PyTorch's logits."""
    [actual] = served.logits([served.encode(text)])

    np.testing.assert_allclose(pytorch.logits(text), actual, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_is_answered_as_in_pytorch(served: Served, pytorch: PyTorch, pair: tuple[str, str]) -> None:
    """Two texts, either of them long or empty, have PyTorch's logits."""
    [actual] = served.logits([served.encode(*pair)])

    np.testing.assert_allclose(pytorch.logits(*pair), actual, rtol=0, atol=1e-4)


@pytest.mark.parametrize("text", ["good", "the " * 62 + "good", words(POSITIONS)])
def test_a_padded_text_is_answered_as_in_pytorch(served: Served, pytorch: PyTorch, text: str) -> None:
    """A text in a batch that is padded to the full length has PyTorch's logits of it alone."""
    batch = served.logits([served.encode(LONG), served.encode(text), served.encode("a", "b"), served.encode("")])

    np.testing.assert_allclose(pytorch.logits(text), batch[1], rtol=0, atol=1e-4)


def test_a_row_in_a_batch_is_the_row_alone(served: Served) -> None:
    """In fp32 the neighbors of a text do not move its logits, wherever it stands in the batch."""
    encodings = [served.encode(text) for text in TEXTS] + [served.encode(*pair) for pair in PAIRS]
    alone = [served.logits([encoding])[0] for encoding in encodings]

    np.testing.assert_allclose(alone, served.logits(encodings), rtol=0, atol=MAX_ROW_ERROR)
    np.testing.assert_allclose(alone[::-1], served.logits(encodings[::-1]), rtol=0, atol=MAX_ROW_ERROR)


def test_word_order_and_segments_matter(served: Served) -> None:
    """The comparison is not one of constants: positions and token types move the logits of the test model."""
    texts = [("good film", None), ("film good", None), ("good", "film"), ("film", "good")]
    logits = [served.logits([served.encode(*text)])[0].round(3).tolist() for text in texts]

    assert 4 == len({tuple(row) for row in logits})


def test_int8_is_near_pytorch(exported: Exported, pytorch: PyTorch) -> None:
    """The int8 graph's logits stay within an error that the validation report admits, times two for texts it has not seen."""
    served = Served(exported.target, "int8")
    actual = [served.logits([served.encode(text)])[0] for text in TEXTS]
    allowed = 2 * exported.graph("int8").evidence.worst_abs_error

    np.testing.assert_allclose([pytorch.logits(text) for text in TEXTS], actual, rtol=0, atol=allowed)


def test_the_task_can_be_given_where_the_architecture_does_not_say(tmp_path: Path) -> None:
    """A checkpoint without `architectures` is exported when --task names the task."""
    source = bert(tmp_path)
    document = json.loads((source / "config.json").read_text())
    del document["architectures"]
    (source / "config.json").write_text(json.dumps(document))

    assert CLASSIFICATION == type(load_checkpoint(str(source), task="text-classification").model).__name__


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


def test_what_the_checkpoints_own_card_says_is_kept(tmp_path: Path) -> None:
    """License, languages and data stand in the manifest, and in the new card as the hub reads them; the rest of it is quoted.

    In the quote, headings are a level lower.
    """
    source = bert(tmp_path)
    (source / "README.md").write_text(OWN_CARD, encoding="utf-8")
    target, manifest = export(ExportSpec(str(source), tmp_path / "models", precisions=("fp32",)), silent)
    card = (target / CARD_FILE).read_text(encoding="utf-8")
    said = {"license": "other", "license_name": "our-terms", "language": ["en", "no"], "datasets": ["stanfordnlp/sst2"]}

    assert said == metadata_load(target / CARD_FILE)
    stored = json.loads((target / MANIFEST_FILE).read_text(encoding="utf-8"))["source"]
    assert said | {"license": ["other"], "license_link": None} == {name: stored[name] for name in [*said, "license_link"]}
    assert manifest.source == load_bundle(target).manifest.source
    assert card.endswith("The checkpoint has this card:\n\n## My model\n\nTrained on films.\n")
    assert "\n---\n# tiny-bert\n" in card


def test_a_checkpoint_that_says_nothing_of_its_license_has_none(exported: Exported) -> None:
    """The card then begins with its title, and the manifest has empty fields."""
    assert ((), None, ()) == (exported.manifest.source.license, exported.manifest.source.license_name, exported.manifest.source.datasets)
    assert (exported.target / CARD_FILE).read_text(encoding="utf-8").startswith(f"# {exported.manifest.name}\n")


def test_the_card_has_a_row_of_validation_for_each_graph(exported: Exported) -> None:
    """The table names each graph and its measured error."""
    card = (exported.target / CARD_FILE).read_text(encoding="utf-8")
    rows = {graph.file: next(line for line in card.splitlines() if f"`{graph.file}`" in line) for graph in exported.manifest.graphs}

    assert {g.file: True for g in exported.manifest.graphs} == {
        g.file: f"{g.evidence.worst_abs_error:.1e}" in rows[g.file] for g in exported.manifest.graphs
    }


def test_the_card_has_the_tables_of_the_manifest(exported: Exported) -> None:
    """A row for each range of lengths and each timed length, the digests and versions."""
    card = (exported.target / CARD_FILE).read_text(encoding="utf-8")
    fp32, int8 = exported.graph("fp32").evidence, exported.graph("int8").evidence
    assert fp32.speed is not None
    assert int8.speed is not None

    for a, b in zip(fp32.lengths, int8.lengths, strict=True):
        cells = (
            f"up to {a.up_to}",
            f"{a.rows}" if a.rows == b.rows else f"{a.rows}, {b.rows}",
            *(f"{e.worst_abs_error:.1e}, {e.worst_rel_error:.1e}" for e in (a, b)),
        )
        assert f"| {' | '.join(cells)} |" in card
    for c, d in zip(fp32.speed.timings, int8.speed.timings, strict=True):
        assert f"| {c.length} | {c.median_ms:.1f} | {d.median_ms:.1f} |" in card
    assert fp32.speed.cpu in card
    assert [] == [graph.sha256 for graph in exported.manifest.graphs if graph.sha256 not in card]
    assert exported.manifest.source.weights_sha256 in card
    assert f"transformers {transformers.__version__}" in card


def test_a_card_of_a_manifest_without_the_later_fields_has_no_empty_tables(exported: Exported) -> None:
    """What was not recorded is left out."""
    bare = {"lengths": (), "speed": None, "span_agreement": None, "opset": None}
    graphs = tuple(g.model_copy(update={"evidence": g.evidence.model_copy(update=bare)}) for g in exported.manifest.graphs)
    card = model_card(exported.manifest.model_copy(update={"graphs": graphs}), exported.target, None)

    assert [] == [title for title in ("Errors by length", "Speed at export", "F1 of the spans", "ONNX opset") if title in card]
    assert "\n\n\n" not in card
