"""Tiny bundles built in code, without torch: a real tokenizer, a real ONNX graph, a valid manifest. Deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper

from service.bundle import MANIFEST_FILE, TOKENIZER_FILE, Manifest, digest

WORDS = "the a film book was is good bad fine dull great poor very not and but , . ! ? long short [ ] sep cls mask pad unk".split()
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789")]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *(c for c in LETTERS if c not in WORDS)]
LABELS = ("negative", "positive", "neutral")
HIDDEN = 8


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a WordPiece tokenizer over VOCABULARY, lower-casing, with BERT's special tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return made


def graph(*, labels: int = len(LABELS), seed: int = 0) -> onnx.ModelProto:
    """Returns a graph of masked mean over embeddings, then a linear layer: row-independent, any length."""
    rng = np.random.default_rng(seed)
    weights = {
        "words": rng.normal(size=(len(VOCABULARY), HIDDEN)),
        "types": rng.normal(size=(2, HIDDEN)),
        "dense": rng.normal(size=(HIDDEN, labels)),
        "bias": rng.normal(size=(labels,)),
    }
    axis, last = numpy_helper.from_array(np.array([1]), "axis"), numpy_helper.from_array(np.array([-1]), "last")
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
        helper.make_node("Gemm", ["mean", "dense", "bias"], ["logits"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "length"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", labels])]
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    made = helper.make_graph(nodes, "tiny", inputs, outputs, [*tensors, axis, last])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def bundle(folder: Path, name: str = "tiny", *, max_length: int = 32, seed: int = 0, **changes: Any) -> Path:
    """Writes a bundle to `folder/name` and returns its path.

    Args:
        folder: The models folder.
        name: The bundle's name.
        max_length: Usable length in tokens.
        seed: Of the weights.
        changes: Fields of the manifest to replace; `batch_invariant` is that of the graph.
    """
    path = folder / name
    path.mkdir(parents=True)
    tokenizer().save(str(path / TOKENIZER_FILE))
    labels = changes.get("labels", LABELS)
    file = path / "model.cpu.fp32.onnx"
    onnx.save(graph(labels=len(labels), seed=seed), str(file))
    evidence = {
        "samples": 0,
        "worst_abs_error": 0.0,
        "label_agreement": 1.0,
        "worst_row_error": 0.0,
        "nodes": 10,
        "fusions": {},
        "quantized": {},
    }
    cls, sep = {"special": "[CLS]", "id": 2, "type_id": 0}, {"special": "[SEP]", "id": 3, "type_id": 0}
    a, b = {"text": "a", "type_id": 0}, {"text": "b", "type_id": 1}
    fields: dict[str, Any] = {
        "format": "bertserve-bundle",
        "format_version": 1,
        "name": name,
        "task": "text-classification",
        "labels": labels,
        "activation": "softmax",
        "tokenizer": {
            "sha256": digest(path / TOKENIZER_FILE),
            "max_length": max_length,
            "pad_id": 0,
            "padding_side": "right",
            "single": [cls, a, sep],
            "pair": [cls, a, sep, b, {**sep, "type_id": 1}],
        },
        "flops": {"linear": 2.0 * HIDDEN * len(labels), "quadratic": 0.0},
        "graphs": [
            {
                "file": file.name,
                "sha256": digest(file),
                "provider": "cpu",
                "precision": "fp32",
                "form": "tiny",
                "default": True,
                "batch_invariant": changes.pop("batch_invariant", True),
                "inputs": [
                    {"name": "input_ids", "fill": "token_ids"},
                    {"name": "attention_mask", "fill": "attention_mask"},
                    {"name": "token_type_ids", "fill": "type_ids"},
                ],
                "outputs": [{"name": "logits", "kind": "per_text"}],
                "evidence": evidence,
            }
        ],
        "example": {"request": {"inputs": "a good film"}, "result": None},
        "figures": [],
        "source": {"checkpoint": "tiny", "revision": None, "weights_sha256": "", "versions": {"bertserve": "0"}},
    }
    manifest = Manifest.model_validate(fields | changes)
    (path / MANIFEST_FILE).write_text(manifest.model_dump_json(), encoding="utf-8")
    return path
