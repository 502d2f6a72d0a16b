"""Builds tiny, deterministic bundles without torch: each has a real tokenizer, a real ONNX graph and a valid manifest."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper

from bertserve.service.bundle.files import MANIFEST_FILE, TOKENIZER_FILE, digest
from bertserve.service.bundle.manifest import Manifest

WORDS = "the a film book was is good bad fine dull great poor very not and but , . ! ? long short [ ] sep cls mask pad unk".split()
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789")]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *(c for c in LETTERS if c not in WORDS)]
LABELS = ("negative", "positive", "neutral")
HIDDEN = 8


def tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> tokenizers.Tokenizer:
    """Returns a lower-casing WordPiece tokenizer with a vocabulary and BERT's special tokens."""
    result = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(vocabulary)}, unk_token="[UNK]"))
    result.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    result.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    result.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    result.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return result


def graph(task: str = "text-classification", *, labels: int = len(LABELS), seed: int = 0) -> onnx.ModelProto:
    """Returns a graph of a task: embeddings with their masked mean, then a linear layer. Rows are independent and have any length."""
    rng = np.random.default_rng(seed)
    counts = {"text-classification": labels, "token-classification": labels, "question-answering": 2, "fill-mask": len(VOCABULARY)}
    counts["multiple-choice"] = 1
    values = counts.get(task, HIDDEN)
    weights = {
        "words": rng.normal(size=(len(VOCABULARY), HIDDEN)),
        "types": rng.normal(size=(2, HIDDEN)),
        "dense": rng.normal(size=(HIDDEN, values)),
        "bias": rng.normal(size=(values,)),
    }
    shapes = {"axis": [1], "last": [-1], "flat": [-1, HIDDEN]}
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Gather", ["types", "token_type_ids"], ["type"]),
        helper.make_node("Add", ["word", "type"], ["token"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["token", "mask3"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "axis"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "axis"], ["count"], keepdims=1),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
    ]
    names = ["input_ids", "attention_mask", "token_type_ids"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "length"]) for name in names]
    if task in ("text-classification", "multiple-choice"):
        nodes.append(helper.make_node("Gemm", ["mean", "dense", "bias"], ["logits"]))
        outputs = {"logits": ["rows", values]}
    else:
        if task == "fill-mask":
            inputs.append(helper.make_tensor_value_info("mask_index", TensorProto.INT64, ["masks"]))
        per_token, outputs = per_token_nodes(task, values)
        nodes += per_token
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    tensors += [numpy_helper.from_array(np.array(value), name) for name, value in shapes.items()]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    tiny = helper.make_graph(nodes, "tiny", inputs, infos, tensors)
    return helper.make_model(tiny, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def per_token_nodes(task: str, values: int) -> tuple[list[onnx.NodeProto], dict[str, list[str | int]]]:
    """Returns the last nodes of a graph with outputs per token or mask, and the shapes of the outputs."""
    nodes = [helper.make_node("Unsqueeze", ["mean", "axis"], ["mean3"]), helper.make_node("Add", ["token", "mean3"], ["hidden"])]
    source = "hidden"
    if task == "fill-mask":
        nodes += [helper.make_node("Reshape", ["hidden", "flat"], ["rows"]), helper.make_node("Gather", ["rows", "mask_index"], ["picked"])]
        source = "picked"
    last = {"question-answering": "pairs", "feature-extraction": "last_hidden_state"}.get(task, "logits")
    nodes += [helper.make_node("MatMul", [source, "dense"], ["product"]), helper.make_node("Add", ["product", "bias"], [last])]
    if task == "question-answering":
        nodes += [
            helper.make_node("Split", ["pairs"], ["start", "end"], axis=-1),
            helper.make_node("Squeeze", ["start", "last"], ["start_logits"]),
            helper.make_node("Squeeze", ["end", "last"], ["end_logits"]),
        ]
        return nodes, {"start_logits": ["rows", "length"], "end_logits": ["rows", "length"]}
    if task == "feature-extraction":
        layers = ["token", "hidden", "unpadded", last]
        nodes += [
            helper.make_node("Mul", ["hidden", "mask3"], ["unpadded"]),
            helper.make_node("Concat", layers, ["last_four_hidden_states"], axis=-1),
        ]
        return nodes, {last: ["rows", "length", HIDDEN], "last_four_hidden_states": ["rows", "length", 4 * HIDDEN]}
    return nodes, {"logits": ["masks", values] if task == "fill-mask" else ["rows", "length", values]}


def give_attention(model: onnx.ModelProto, heads: tuple[int, ...], *, seed: int = 0) -> None:
    """Adds attention with `heads[i]` heads in layer i. A query is a token's vector times the head's matrix; a key is the vector."""
    rng, graph = np.random.default_rng(seed), model.graph
    constants = {"att/zero": np.array(0), "att/one": np.array([1]), "att/three": np.array([3]), "att/axes": np.array([1, 2])}
    constants |= {"att/full": np.array(1, np.float32), "att/low": np.array(-1e4, np.float32)}
    nodes = [
        helper.make_node("Gather", ["attention_index", "att/zero"], ["att/layers"], axis=1),
        helper.make_node("Slice", ["attention_index", "att/one", "att/three", "att/one"], ["att/places"]),
        helper.make_node("Unsqueeze", ["token", "att/one"], ["att/tokens"]),
        helper.make_node("Transpose", ["att/tokens"], ["att/keys"], perm=[0, 1, 3, 2]),
        helper.make_node("Sub", ["att/full", "mask"], ["att/padding"]),
        helper.make_node("Mul", ["att/padding", "att/low"], ["att/bias2"]),
        helper.make_node("Unsqueeze", ["att/bias2", "att/axes"], ["att/bias"]),
    ]
    for i, count in enumerate(heads):
        constants |= {f"att/{i}": rng.normal(size=(count, HIDDEN, HIDDEN)).astype(np.float32), f"att/number{i}": np.array(i)}
        nodes += [
            helper.make_node("MatMul", ["att/tokens", f"att/{i}"], [f"att/q{i}"]),
            helper.make_node("MatMul", [f"att/q{i}", "att/keys"], [f"att/s{i}"]),
            helper.make_node("Add", [f"att/s{i}", "att/bias"], [f"att/b{i}"]),
            helper.make_node("Softmax", [f"att/b{i}"], [f"att/w{i}"], axis=-1),
            helper.make_node("Equal", ["att/layers", f"att/number{i}"], [f"att/is{i}"]),
            helper.make_node("Compress", ["att/places", f"att/is{i}"], [f"att/of{i}"], axis=0),
            helper.make_node("GatherND", [f"att/w{i}", f"att/of{i}"], [f"att/m{i}"]),
        ]
    nodes.append(helper.make_node("Concat", [f"att/m{i}" for i in range(len(heads))], ["attentions"], axis=0))
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    graph.input.append(helper.make_tensor_value_info("attention_index", TensorProto.INT64, ["maps", 3]))
    graph.output.append(helper.make_tensor_value_info("attentions", TensorProto.FLOAT, ["maps", "length", "length"]))


OUTPUTS = {
    "text-classification": [{"name": "logits", "kind": "per_text"}],
    "token-classification": [{"name": "logits", "kind": "per_token"}],
    "question-answering": [{"name": "start_logits", "kind": "per_token"}, {"name": "end_logits", "kind": "per_token"}],
    "fill-mask": [{"name": "logits", "kind": "per_mask"}],
    "multiple-choice": [{"name": "logits", "kind": "per_text"}],
    "feature-extraction": [{"name": name, "kind": "per_token"} for name in ("last_hidden_state", "last_four_hidden_states")],
}
TASKS_OF = {"names": "token-classification", "passages": "question-answering", "masks": "fill-mask", "choices": "multiple-choice"}
EMBEDDING = {"pooling": "mean", "normalize": False, "dimensions": HIDDEN, "layers": "last_four"}
LABELS_OF = {"text-classification": LABELS, "token-classification": ("O", "B-PER", "I-PER", "B-LOC")}
EXAMPLES = {
    "question-answering": {"question": "good?", "context": "a good film"},
    "fill-mask": "a [MASK] film",
    "multiple-choice": {"prompt": "the film was", "choices": ["very good", "a book"]},
}


def tokenizer_fields(file: Path, task: str, max_length: int) -> dict[str, Any]:
    """Returns the field `tokenizer` of a manifest."""
    cls, sep = {"special": "[CLS]", "id": 2, "type_id": 0}, {"special": "[SEP]", "id": 3, "type_id": 0}
    a, b = {"text": "a", "type_id": 0}, {"text": "b", "type_id": 1}
    return {
        "sha256": digest(file),
        "max_length": max_length,
        "pad_id": 0,
        "padding_side": "right",
        "single": [cls, a, sep],
        "pair": [cls, a, sep, b, {**sep, "type_id": 1}],
        "cls_index": 0,
        "subword_prefix": "##",
        "mask": {"token": "[MASK]", "id": 4} if task == "fill-mask" else None,
    }


def graph_fields(file: Path, task: str, *, with_attention: bool, batch_invariant: bool) -> dict[str, Any]:
    """Returns one item of the field `graphs` of a manifest."""
    return {
        "file": file.name,
        "sha256": digest(file),
        "provider": "cpu",
        "precision": "fp32",
        "description": "tiny",
        "default": True,
        "batch_invariant": batch_invariant,
        "inputs": [
            {"name": "input_ids", "fill": "token_ids"},
            {"name": "attention_mask", "fill": "attention_mask"},
            {"name": "token_type_ids", "fill": "type_ids"},
            *([{"name": "mask_index", "fill": "mask_index"}] if task == "fill-mask" else []),
            *([{"name": "attention_index", "fill": "attention_index"}] if with_attention else []),
        ],
        "outputs": [*OUTPUTS[task], *([{"name": "attentions", "kind": "per_map"}] if with_attention else [])],
        "validation": {"samples": 0, "worst_abs_error": 0.0, "worst_batch_error": 0.0, "nodes": 10, "fusions": {}, "quantized": {}},
    }


def bundle(
    folder: Path, name: str = "tiny", *, task: str = "text-classification", max_length: int = 32, seed: int = 0, **changes: Any
) -> Path:
    """Writes a bundle to `folder/name` and returns its path. `changes` are fields of the manifest, and `batch_invariant` of its graph."""
    path = folder / name
    path.mkdir(parents=True)
    tokens = tokenizer()
    if task == "fill-mask":
        tokens.add_tokens([tokenizers.AddedToken("[MASK]", special=False, normalized=False)])
    tokens.save(str(path / TOKENIZER_FILE))
    labels = changes.setdefault("labels", LABELS_OF.get(task, ()))
    file = path / "model.cpu.fp32.onnx"
    model = graph(task, labels=len(labels), seed=seed)
    attention = changes.get("attention_heads", ())
    if attention:
        give_attention(model, attention, seed=seed)
    onnx.save(model, str(file))
    fields: dict[str, Any] = {
        "format": "bertserve-bundle",
        "format_version": 1,
        "name": name,
        "task": task,
        "labels": labels,
        "activation": "softmax",
        "embedding": EMBEDDING if task == "feature-extraction" else None,
        "tokenizer": tokenizer_fields(path / TOKENIZER_FILE, task, max_length),
        "flops": {"linear": 2.0 * HIDDEN * HIDDEN, "quadratic": 0.0},
        "graphs": [graph_fields(file, task, with_attention=bool(attention), batch_invariant=changes.pop("batch_invariant", True))],
        "example": {"request": {"inputs": EXAMPLES.get(task, "a good film")}, "result": None},
        "metrics": [],
        "source": {"checkpoint": "tiny", "revision": None, "weights_sha256": "", "versions": {"bertserve": "0"}},
    }
    manifest = Manifest.model_validate(fields | changes)
    (path / MANIFEST_FILE).write_text(manifest.model_dump_json(), encoding="utf-8")
    return path


def calibrate(path: Path, *thresholds: dict[str, Any], method: str = "temperature", **changes: Any) -> Path:
    """Adds a calibration to the graph of a bundle, by default the temperature 2; `changes` are its fields. Returns the bundle's path."""
    value = {"value": 0.5, "low": 0.4, "high": 0.6}
    quality = {"log_loss": value, "brier": value, "ece": value, "auroc": None, "bins": [{"score": 0.9, "correct": 0.7, "count": 5}]}
    values = {"target": 0.9, "decided": 0.8, "error": 0.05, "examples": 100}
    calibration = {
        "method": method,
        "scale": [0.5],
        "bias": [0.0],
        "fitted": 200,
        "tested": 200,
        "data_sha256": "0" * 64,
        "before": quality,
        "after": quality,
        "thresholds": [values | {"label": None, "aim": "precision"} | threshold for threshold in thresholds],
        "score_counts": [*[0] * 10, *[20] * 10],
        "label_counts": {"positive": 120, "negative": 80},
    }
    return edit(path, lambda fields: fields["graphs"][0].update(calibration=calibration | changes))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Changes the fields of a bundle's manifest, and returns the bundle's path."""
    fields = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    change(fields)
    (path / MANIFEST_FILE).write_text(json.dumps(fields), encoding="utf-8")
    return path


def replace_graph(path: Path, model: onnx.ModelProto | bytes, **changes: Any) -> Path:
    """Replaces a bundle's graph and fields of its entry, updates the digests of graph and tokenizer, and returns the bundle's path."""
    file = path / "model.cpu.fp32.onnx"
    file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())

    def update(fields: dict[str, Any]) -> None:
        fields["graphs"][0] |= {"sha256": digest(file), "size_bytes": file.stat().st_size} | changes
        fields["tokenizer"] |= {"sha256": digest(path / TOKENIZER_FILE)}

    return edit(path, update)


def every_kind(folder: Path, *, max_length: int = 32) -> Path:
    """Writes a bundle of every kind to a models folder and returns the folder."""
    for name, task in TASKS_OF.items():
        bundle(folder, name, task=task, max_length=max_length)
    bundle(folder, "vectors", task="feature-extraction", max_length=max_length, embedding=EMBEDDING | {"prompts": {"query": "the book "}})
    bundle(folder, "classifier", max_length=max_length)
    bundle(folder, "attentive", max_length=max_length, attention_heads=(2, 2))
    bundle(folder, "nli", max_length=max_length, labels=("contradiction", "neutral", "entailment"))
    bundle(folder, "ranker", max_length=max_length, labels=("LABEL_0",), activation="none")
    return folder
