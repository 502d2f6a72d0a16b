"""Entities, answers and masks from checkpoint to bundle: the service answers as PyTorch does, and the manifest says what it needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper

import bertserve.service.cli
import tiny
from bertserve.export.int8 import graph_edits
from bertserve.export.validation.agreement import MAX_ROW_ERROR
from bertserve.service.backend.onnx_engine import OnnxEngine, Row
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.tasks import fill_mask, question_answering, token_classification
from bundles import Served, exported, refused
from checkpoints import POSITIONS, ROWS, bert, edit_json, few_texts

pytestmark = pytest.mark.torch

LONG = "the film was not very good , but the book is great ! " * 20
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ARCHITECTURES = {
    token_classification.TASK: "BertForTokenClassification",
    question_answering.TASK: "BertForQuestionAnswering",
    fill_mask.TASK: "BertForMaskedLM",
}
LABELS = {token_classification.TASK: ENTITIES, question_answering.TASK: ("LABEL_0", "LABEL_1"), fill_mask.TASK: tiny.LABELS}
# So long that no sample of the export is cut, and under the 1024 rows of a table that int8 quantizes; short ones have their own test.
LENGTHS = {token_classification.TASK: POSITIONS, question_answering.TASK: POSITIONS, fill_mask.TASK: 1000}
REQUESTS: dict[str, list[Any]] = {
    token_classification.TASK: [
        token_classification.Request("good"),
        token_classification.Request("Ünïcödé 看 😴 films, e\u0301x"),
        token_classification.Request(LONG),
        token_classification.Request(LONG, token_classification.NerParameters(aggregation_strategy="first", stride=20)),
        *(
            token_classification.Request(
                "the quick film was not very good", token_classification.NerParameters(aggregation_strategy=strategy)
            )
            for strategy in ("none", "average", "max")
        ),
    ],
    question_answering.TASK: [
        question_answering.Request("good?", "the film was not very good"),
        question_answering.Request("what is great ?", LONG),
        question_answering.Request(
            "what is great ?",
            LONG,
            question_answering.AnswerParameters(top_k=5, max_seq_len=40, doc_stride=10, handle_impossible_answer=True),
        ),
        question_answering.Request(
            "quick 看?", "zebras, e\u0301x 😴 and films", question_answering.AnswerParameters(top_k=3, align_to_words=False)
        ),
        question_answering.Request("what is great ?", LONG, question_answering.AnswerParameters(top_k=4, duplicates="sum")),
    ],
    fill_mask.TASK: [
        fill_mask.Request("[MASK]"),
        fill_mask.Request("the [MASK] was not very good"),
        fill_mask.Request("the [MASK] was [MASK] very [MASK] !", fill_mask.FillMaskParameters(top_k=3)),
        fill_mask.Request(f"{LONG * 3} [MASK] {LONG} [MASK]", fill_mask.FillMaskParameters(targets=["good", "bad", "film"])),
        fill_mask.Request("Ünïcödé 看 😴 [MASK], films", fill_mask.FillMaskParameters(top_k=50)),
    ],
}


def random_checkpoint(folder: Path, task: str, *, positions: int | None = None, **options: Any) -> Path:
    length = LENGTHS[task] if positions is None else positions
    options = {"positions": length, "model_max_length": length, **options}
    return bert(folder, f"tiny-{task}", labels=LABELS[task], architecture=ARCHITECTURES[task], **options)


class PyTorch:
    """A checkpoint in transformers: its own tokenizer, windows and logits."""

    def __init__(self, path: Path, task: str) -> None:
        self.task = task
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = getattr(transformers, ARCHITECTURES[task]).from_pretrained(path, dtype=torch.float32).eval()

    def rows(self, request: Any) -> list[Row]:
        """Returns the outputs of each window of a request, as the service's engine names and shapes them."""
        return [self.row(window) for window in self.windows(request)]

    def windows(self, request: Any) -> list[dict[str, torch.Tensor]]:
        """Returns the inputs of each window, cut by the tokenizer of transformers; around masks, by hand."""
        if self.task == fill_mask.TASK:
            return self.masked_windows(request.text)
        if self.task == token_classification.TASK:
            texts, stride, length = (request.text,), request.parameters.stride, self.model.config.max_position_embeddings
            stride = min(128, (length - 2) // 2) if stride is None else stride
        else:
            texts, stride, length = (
                (request.question, request.context),
                request.parameters.doc_stride,
                request.parameters.max_seq_len or self.model.config.max_position_embeddings,
            )
            stride = min(128, length // 2) if stride is None else stride
        batch = self.tokenizer(
            *texts,
            truncation="only_first" if len(texts) == 1 else "only_second",
            max_length=length,
            stride=stride,
            return_overflowing_tokens=True,
        )
        names = ("input_ids", "token_type_ids", "attention_mask")
        return [{name: torch.tensor([batch[name][i]]) for name in names} for i in range(len(batch["input_ids"]))]

    def masked_windows(self, text: str) -> list[dict[str, torch.Tensor]]:
        """Returns one window with all masks, or of a long text one with each mask in its middle."""
        ids, room = self.tokenizer(text, add_special_tokens=False)["input_ids"], self.model.config.max_position_embeddings - 2
        masks = [i for i, id_ in enumerate(ids) if id_ == self.tokenizer.mask_token_id]
        parts = [(ids, masks)]
        if len(ids) > room:
            starts = [min(max(mask - room // 2, 0), len(ids) - room) for mask in masks]
            parts = [(ids[start : start + room], [mask - start]) for start, mask in zip(starts, masks, strict=True)]
        return [{"input_ids": torch.tensor([[2, *part, 3]]), "masks": torch.tensor(places) + 1} for part, places in parts]

    def row(self, window: dict[str, torch.Tensor]) -> Row:
        """Returns the outputs of one window, run alone and without padding."""
        masks = window.pop("masks", None)
        with torch.no_grad():
            outputs = self.model(**window)
        if self.task == question_answering.TASK:
            return {name: outputs[name][0].numpy() for name in ("start_logits", "end_logits")}
        logits = outputs["logits"][0].numpy()
        return {"logits": logits if masks is None else logits[masks.numpy()]}


@dataclass(frozen=True)
class Exported:
    """A checkpoint's bundle, and PyTorch's rows of the task's requests."""

    bundle: Bundle
    pytorch: PyTorch
    rows: list[list[Row]]

    @property
    def task(self) -> str:
        return self.bundle.manifest.task

    @property
    def requests(self) -> list[Any]:
        return REQUESTS[self.task]

    def graph(self, precision: Any) -> GraphSpec:
        return self.bundle.graph("cpu", precision)

    def model(self, precision: Any) -> onnx.GraphProto:
        return onnx.load(str(self.bundle.path / self.graph(precision).file)).graph


@pytest.fixture(name="all_exported", scope="module")
def all_exported_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """A checkpoint of each task, exported as fp32 and int8 into one models folder."""
    folder = tmp_path_factory.mktemp("tasks")
    made = {}
    for task in ARCHITECTURES:
        source = random_checkpoint(folder, task)
        pytorch = PyTorch(source, task)
        bundle = exported(source, precisions=("fp32", "int8"), calibration=few_texts(folder))
        made[task] = Exported(bundle, pytorch, [pytorch.rows(request) for request in REQUESTS[task]])
    return made


@pytest.fixture(name="each", params=list(ARCHITECTURES))
def exported_bundle(request: pytest.FixtureRequest, all_exported: dict[str, Exported]) -> Exported:
    return all_exported[request.param]


def assert_near(expected: list[Row], actual: list[Row], atol: float) -> None:
    """Asserts that rows have the same outputs, shapes and, within `atol`, values."""
    assert [{name: value.shape for name, value in row.items()} for row in expected] == [
        {name: value.shape for name, value in row.items()} for row in actual
    ]
    for a, b in zip(expected, actual, strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol)


def without_scores(result: Any) -> Any:
    """Returns a result with its scores taken out, at any depth."""
    if isinstance(result, list):
        return [without_scores(item) for item in result]
    return {key: value for key, value in result.items() if key != "score"}


def scores(result: Any) -> list[float]:
    return [score for item in result for score in scores(item)] if isinstance(result, list) else [result["score"]]


# ---- answers


def test_windows_are_answered_as_in_pytorch(each: Exported) -> None:
    """Short, long and unicode texts have PyTorch's logits, window by window and in one padded batch, and decode to the same answers."""
    served = Served(each.bundle)
    for request, expected in zip(each.requests, each.rows, strict=True):
        found = served.alone(request)
        assert_near(expected, found, 1e-4)
        wanted, got = served.decode(request, expected), served.decode(request, found)
        assert without_scores(wanted) == without_scores(got)
        assert pytest.approx(scores(wanted), abs=1e-4) == scores(got)
    encodings = served.encodings(*each.requests)
    expected = [row for rows in each.rows for row in rows]

    assert max(len(rows) for rows in each.rows) > 1  # the comparison is also one of windows
    assert_near(expected, served.engine.run(encodings), 1e-4)
    assert_near(expected[::-1], served.engine.run(encodings[::-1]), 1e-4)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_row_in_a_batch_is_the_row_alone(each: Exported, precision: Precision) -> None:
    """The neighbors of a window do not move its logits, and the manifest says so."""
    served = Served(each.bundle, precision)
    alone = [row for request in each.requests for row in served.alone(request)]

    assert_near(alone, served.engine.run(served.encodings(*each.requests)), MAX_ROW_ERROR)
    assert each.graph(precision).batch_invariant


def test_int8_is_near_pytorch(each: Exported) -> None:
    """The int8 graph's logits stay within the error that its validation report admits, times two for texts it has not seen."""
    served = Served(each.bundle, "int8")
    allowed = 2 * each.graph("int8").evidence.worst_abs_error
    spread = max(float(np.abs(value).max()) for rows in each.rows for row in rows for value in row.values())

    assert allowed < spread
    for request, expected in zip(each.requests, each.rows, strict=True):
        assert_near(expected, served.alone(request), allowed)


def test_entities_are_those_of_the_transformers_pipeline(all_exported: dict[str, Exported]) -> None:
    each = all_exported[token_classification.TASK]
    pipeline = transformers.TokenClassificationPipeline(model=each.pytorch.model, tokenizer=each.pytorch.tokenizer)
    served = Served(each.bundle)
    for strategy in ("none", "simple", "first", "average", "max"):
        request = token_classification.Request(
            "the quick film was not very good , but zebras", token_classification.NerParameters(aggregation_strategy=strategy)
        )  # type: ignore[arg-type]
        expected = [
            {key: value for key, value in item.items() if key != "word"}
            for item in pipeline(request.text, aggregation_strategy=strategy, ignore_labels=["O"])
        ]
        actual = [{key: value for key, value in item.items() if key != "word"} for item in served.decode(request, served.alone(request))]
        assert without_scores(expected) == without_scores(actual)
        assert pytest.approx([float(item["score"]) for item in expected], abs=1e-4) == scores(actual)


@pytest.mark.parametrize("text", ["the [MASK] was not very good", "a [MASK] [MASK] film"])
@pytest.mark.parametrize("targets", [None, ["good", "bad", "quick"]])
def test_fillings_are_those_of_the_transformers_pipeline(all_exported: dict[str, Exported], text: str, targets: list[str] | None) -> None:
    """Tokens, scores and sequences of one mask and of two are the pipeline's, padding rows of the vocabulary apart."""
    each = all_exported[fill_mask.TASK]
    pipeline = transformers.FillMaskPipeline(model=each.pytorch.model, tokenizer=each.pytorch.tokenizer)
    served = Served(each.bundle)
    expected = pipeline(text, top_k=20, **({} if targets is None else {"targets": targets}))
    request = fill_mask.Request(text, fill_mask.FillMaskParameters(top_k=20, targets=None if targets is None else list(targets)))
    actual = served.decode(request, served.alone(request))

    assert without_scores(expected) == without_scores(actual)
    assert pytest.approx(scores(expected), abs=1e-4) == scores(actual)


# ---- the manifest


def test_the_stored_examples_check(all_exported: dict[str, Exported], capsys: pytest.CaptureFixture[str]) -> None:
    """`bert-serve check` gets each task's stored result from the default graph: entities a list, the answer a dict, fillings a list."""
    ner, qa, mask = (all_exported[task].bundle.manifest.example for task in ARCHITECTURES)

    for item in ner.result:
        assert {"entity_group", "score", "word", "start", "end"} == set(item)
        assert item["word"] == ner.request["inputs"][item["start"] : item["end"]]
    assert {"answer", "score", "start", "end"} == set(qa.result)
    assert [{"score", "token", "token_str", "sequence"}] == [set(item) for item in mask.result]
    assert "[MASK]" in mask.request["inputs"]
    assert 0 == bertserve.service.cli.main(["check", "--models", str(all_exported[fill_mask.TASK].bundle.path.parent)])
    out = capsys.readouterr().out
    assert [True] * 3 == [f"tiny-{task}: {task}, cpu/int8: ok" in out for task in ARCHITECTURES]


def test_the_manifest_has_what_its_task_needs(each: Exported) -> None:
    """Labels for entities alone, the mask for fill-mask alone; [CLS] first, and BERT's prefix of pieces."""
    manifest, spec = each.bundle.manifest, each.bundle.manifest.tokenizer
    mask = {"token": "[MASK]", "id": 4} if each.task == fill_mask.TASK else None
    labels = ENTITIES if each.task == token_classification.TASK else ()

    assert (labels, "softmax") == (manifest.labels, manifest.activation)
    assert (0, "##", mask) == (spec.cls_index, spec.subword_prefix, spec.mask.model_dump() if spec.mask else None)


def test_only_the_mask_is_no_special_token_and_only_for_fill_mask(each: Exported) -> None:
    """`tokenizer.json` marks the mask as text where texts may hold it, and all five as special elsewhere, whose spelling in a text is text."""
    fills = each.task == fill_mask.TASK
    document = json.loads(each.bundle.tokenizer_path.read_text(encoding="utf-8"))
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tokens, masked) = Served(each.bundle).tokenizer.tokenize(["[SEP]", "[MASK]"])

    assert {name: name != "[MASK]" or not fills for name in names} == {
        token["content"]: token["special"] for token in document["added_tokens"]
    }
    assert ["[", "sep", "]"] == tokens.pieces
    assert (["[MASK]"] if fills else ["[", "mask", "]"]) == masked.pieces


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_inputs_and_outputs_have_their_kinds(each: Exported, precision: str) -> None:
    """BERT's three inputs, for fill-mask the masks' positions too; one row of outputs per token or per mask, computed for all tokens."""
    inputs = {"input_ids": "token_ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    if each.task == fill_mask.TASK:
        inputs["mask_index"] = "mask_index"
    outputs = {
        token_classification.TASK: [("logits", "per_token")],
        question_answering.TASK: [("start_logits", "per_token"), ("end_logits", "per_token")],
        fill_mask.TASK: [("logits", "per_mask")],
    }[each.task]
    graph, written = each.graph(precision), each.model(precision)

    assert inputs == {spec.name: spec.fill for spec in graph.inputs}
    assert outputs == [(spec.name, spec.kind) for spec in graph.outputs]
    assert (list(inputs), [name for name, _ in outputs]) == ([value.name for value in written.input], [v.name for v in written.output])
    assert "torchscript opset 17, packed MultiHeadAttention with key padding" == graph.form


def test_int8_reports_what_was_quantized(each: Exported) -> None:
    """Four products a layer, of fill-mask the two of its head too, and one embedding; narrow heads stay in float.

    No float32 tensor of the vocabulary's rows is left but for scales, biases and a projection's few outlying channels.
    """
    quantized, graph = each.graph("int8").evidence.quantized, each.model("int8")
    products = {token_classification.TASK: 8, question_answering.TASK: 8, fill_mask.TASK: 10}[each.task]
    floats = [tensor.dims for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT and ROWS in tensor.dims]

    assert (products, 1) == (quantized["MatMulIntegerToFloat"], quantized["PerRowEmbedding"])
    assert products == [node.op_type for node in graph.node].count("MatMulIntegerToFloat")
    assert [] == [list(dims) for dims in floats if np.prod(dims) > graph_edits.INPUT_CHANNELS * ROWS]


def test_int8_keeps_the_tied_projection(all_exported: dict[str, Exported]) -> None:
    """Embedding and projection of the int8 graph are both the checkpoint's one table, as near as their rounding keeps them.

    The embedding's rows are the nearest ones; of the projection a few channels are in float and exact, and the rest is rounded for
    its products, not weight by weight.
    """
    each = all_exported[fill_mask.TASK]
    graph, model = each.model("int8"), each.pytorch.model
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    table = model.get_input_embeddings().weight.detach().numpy()
    assert model.config.tie_word_embeddings
    [embedding] = [name for name, value in tensors.items() if value.dtype == np.int8 and value.shape == table.shape]
    [projection] = [name for name, value in tensors.items() if value.dtype == np.int8 and value.shape == table.T.shape]
    rows, columns = tensors[embedding.replace("/rows", "/row_scales")], tensors[projection.replace("/steps", "/scales")]
    [reader] = [node for node in graph.node if projection in node.input]
    [stored] = [node for node in graph.node if reader.input[0] in node.output]
    [multiplied] = [node for node in graph.node if stored.input[0] in node.output]
    spread = tensors[multiplied.input[1]][:, None]
    in_int8 = np.abs(tensors[projection]).max(axis=1) > 0
    outlying = [value for name, value in tensors.items() if name.endswith("/outlying") and value.shape[1:] == (ROWS,)]

    assert (np.abs(table - tensors[embedding] * rows) <= rows * 0.501).all()
    np.testing.assert_array_equal(table.T[~in_int8], np.concatenate([*outlying, np.empty((0, ROWS), dtype=np.float32)]))
    error = (tensors[projection].astype(np.float32) * columns * spread - table.T)[in_int8]
    assert error.std() < 0.02 * table.std()


def test_an_untied_projection_is_exported_too(tmp_path: Path) -> None:
    """A masked language model whose projection is a matrix of its own has PyTorch's logits."""
    source = random_checkpoint(tmp_path, fill_mask.TASK, tie_word_embeddings=False)
    pytorch, served = PyTorch(source, fill_mask.TASK), Served(exported(source))
    assert not torch.equal(pytorch.model.get_input_embeddings().weight, pytorch.model.get_output_embeddings().weight)
    for request in REQUESTS[fill_mask.TASK]:
        assert_near(pytorch.rows(request), served.alone(request), 1e-4)


def test_the_graph_projects_masks_only(all_exported: dict[str, Exported]) -> None:
    """A batch without a full logits tensor: the output has a row per mask, whatever the batch is padded to."""
    served = Served(all_exported[fill_mask.TASK].bundle)
    encodings = served.encodings(*(fill_mask.Request(text) for text in ("[MASK]", f"a [MASK] [MASK] {LONG[:300]}")))

    assert [(1, ROWS), (2, ROWS)] == [row["logits"].shape for row in served.engine.run(encodings)]


def test_padding_on_the_left_leaves_the_longest_row(each: Exported) -> None:
    """The longest row of a batch is the row alone; the others have position ids of their own, which BERT counts from the left."""
    graph, served = each.graph("fp32"), Served(each.bundle)
    left = OnnxEngine(each.bundle.path / graph.file, graph, pad_id=0, padding_side="left")
    encodings = served.encodings(*each.requests)
    longest = max(range(len(encodings)), key=lambda i: len(encodings[i]))

    assert_near(served.engine.run([encodings[longest]]), [left.run(encodings)[longest]], 1e-5)


@pytest.mark.parametrize(
    "task", [task if task == "question-answering" else pytest.param(task, marks=pytest.mark.full_grid) for task in ARCHITECTURES]
)
def test_a_short_checkpoint_is_answered_as_in_pytorch(tmp_path: Path, task: str) -> None:
    """A model of 64 tokens is exported, although samples are longer, and has PyTorch's logits of them."""
    source = random_checkpoint(tmp_path, task, positions=64)
    pytorch, served = PyTorch(source, task), Served(exported(source))

    assert 64 == served.manifest.tokenizer.max_length
    for request in REQUESTS[task]:
        assert_near(pytorch.rows(request), served.alone(request), 1e-4)


def test_a_checkpoint_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    """A masked language model whose tokenizer names no mask ends with an error that says where it is set."""
    source = random_checkpoint(tmp_path, fill_mask.TASK)
    edit_json(source / "tokenizer_config.json", mask_token=None, tokenizer_class="PreTrainedTokenizerFast")

    assert "no mask token" in refused(source)


def test_a_question_answering_checkpoint_without_cls_has_no_null_answer(tmp_path: Path) -> None:
    """Where no [CLS] leads the pair there is nothing to read "no answer" from, and the manifest says so."""
    source = random_checkpoint(tmp_path, question_answering.TASK)
    edit_json(source / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    document = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    for template in ("single", "pair"):
        pieces = document["post_processor"][template]
        document["post_processor"][template] = [piece for piece in pieces if piece.get("SpecialToken", {}).get("id") != "[CLS]"]
    (source / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")

    assert exported(source).manifest.tokenizer.cls_index is None


@pytest.mark.parametrize("task", list(ARCHITECTURES))
def test_a_checkpoint_of_another_task_is_refused(tmp_path: Path, task: str) -> None:
    other = question_answering.TASK if task == token_classification.TASK else token_classification.TASK
    message = refused(random_checkpoint(tmp_path, task), task=other)

    assert all(fact in message for fact in (ARCHITECTURES[task], f"made for {task}", f"--task {other}"))
