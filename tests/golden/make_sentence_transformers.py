"""Creates the golden answers of one version of sentence-transformers: its `encode`, `similarity` and `predict` on tiny checkpoints.

    pip install torch==2.13.0 transformers==5.23.0 sentence-transformers==VERSION
    python tests/golden/make_sentence_transformers.py

The versions are 5.3.0, 5.7.0 and 6.2.0, each in an environment of its own; the files changed in 5.4 and in 6.0. The installed version saves
a checkpoint for each case, loads it again and answers. The script replaces the lines of this version in `sentence_transformers.jsonl`. Each
line has

- `id`: version and name of the case;
- `labels`: number of labels of a cross-encoder; 0 for an encoder;
- `files`: the files with settings that this version saves; `write_files` writes them, and the weights of Dense modules;
- `vectors` and `similarity` of `TEXTS` (the first one with the others), or `scores` of pairs of the first text with each of
  `SECOND_TEXTS`.

The weights are a pattern, so that every version of torch gives the same ones.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel

sys.path.insert(0, str(Path(__file__).parent))
import cases

FILE = "sentence_transformers"
TEXTS = [
    "which bridge was built in porto",
    "Porto",
    "",
    "the river and the old bridge was built in porto in which porto was built and built",
    "a b c",
]
SECOND_TEXTS = [text for text in TEXTS if text]  # transformers drops an empty second text of a single pair, but not in a batch
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Porto", *"which bridge was built in porto the river and old a".split()]
SPECIAL = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
WIDTH, LENGTH = 12, 32
IDENTITY, SIGMOID = torch.nn.Identity, torch.nn.Sigmoid


def fill(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of the same names and shapes with a pattern of values around 0, and of norms around 1."""
    tensors = {}
    for i, (name, weight) in enumerate(sorted(weights.items())):
        values = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * (i + 1.37) + i).float().reshape(weight.shape)
        tensors[name] = 1 + 0.1 * values if "LayerNorm.weight" in name else 0.3 * values
    return tensors


def write_base(folder: Path, labels: int = 0) -> Path:
    """Writes an encoder, or a classifier with this number of labels, with its tokenizer; returns the folder."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=LENGTH,
    )
    if labels:
        config.num_labels = labels
    model = (BertForSequenceClassification if labels else BertModel)(config)
    model.load_state_dict(fill({name: weight for name, weight in model.state_dict().items() if weight.is_floating_point()}), strict=False)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": False, "model_max_length": LENGTH, **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_files(folder: Path, files: dict[str, Any]) -> None:
    """Writes the files of a golden line over the files of `write_base`, and the weights of its Dense modules."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
        if "in_features" in content:
            inputs, outputs = content["in_features"], content["out_features"]
            shapes = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if content["bias"] else {})
            if content.get("use_residual") and inputs != outputs:
                shapes["residual.weight"] = (outputs, inputs)
            save_file(fill({name: torch.empty(shape) for name, shape in shapes.items()}), (folder / name).with_name("model.safetensors"))


def modules_of(folder: Path, *, pooling: Any = "mean", steps: tuple[Any, ...] = (), **options: Any) -> list[Any]:
    """Returns a Transformer, its pooling or poolings, and further steps: the arguments of a Dense module, or None for Normalize."""
    from sentence_transformers import models as modules

    flags = {f"pooling_mode_{name}": name in pooling for name in ("cls_token", "mean_tokens", "weightedmean_tokens", "lasttoken")}
    mode = flags if isinstance(pooling, set) else {"pooling_mode": pooling}
    further = [modules.Normalize() if step is None else modules.Dense(**step) for step in steps]
    return [modules.Transformer(str(folder), **options), modules.Pooling(WIDTH, **mode), *further]


def dense(inputs: int, outputs: int, function: Callable[[], Any] = torch.nn.Tanh, **options: Any) -> dict[str, Any]:
    return {"in_features": inputs, "out_features": outputs, "activation_function": function(), **options}


VECTORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name -> arguments of `modules_of` and of SentenceTransformer
    **{mode: ({"pooling": mode}, {}) for mode in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")},
    "several": ({"pooling": {"cls_token", "mean_tokens", "weightedmean_tokens", "lasttoken"}}, {}),
    "order": ({"pooling": ("lasttoken", "max")}, {}),
    "normalize": ({"steps": (None,)}, {}),
    "dense": ({"pooling": "cls", "steps": (dense(WIDTH, 8), None)}, {}),
    "dense-last": ({"steps": (None, dense(WIDTH, WIDTH, torch.nn.GELU, bias=False), dense(WIDTH, 20, IDENTITY))}, {}),
    "residual": ({"steps": (dense(WIDTH, WIDTH, use_residual=True), dense(WIDTH, 8, torch.nn.ReLU, use_residual=True))}, {}),
    "truncate": ({}, {"truncate_dim": 5}),
    "truncate-normalized": ({"steps": (None,)}, {"truncate_dim": 5}),
    "truncate-more": ({"steps": (dense(WIDTH, 8),)}, {"truncate_dim": 10}),
    "prompts": ({}, {"prompts": {"query": "which river ", "document": ""}, "default_prompt_name": "query"}),
    "length": ({"max_seq_length": 16}, {}),
    "lowercase": ({}, {}),
    **{name: ({"pooling": "lasttoken"}, {"similarity_fn_name": name}) for name in ("dot", "euclidean", "manhattan")},
}
SCORES: dict[str, tuple[int, dict[str, Any]]] = {
    # name -> labels and arguments of CrossEncoder
    "default": (1, {}),
    "identity": (1, {"activation_fn": IDENTITY()}),
    "sigmoid": (1, {"activation_fn": SIGMOID()}),
    "three-default": (3, {}),
    "three-sigmoid": (3, {"activation_fn": SIGMOID()}),
    "short": (1, {"max_length": 18, "activation_fn": IDENTITY()}),
}


def saved_files(folder: Path) -> dict[str, Any]:
    """Returns the JSON files of a saved checkpoint in which a version of sentence-transformers has settings."""
    files = {str(path.relative_to(folder)): json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))}
    if FILE not in files["config.json"]:
        del files["config.json"]
    del files["tokenizer.json"]
    return files


def vectors_line(name: str, folder: Path) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    arguments, options = VECTORS[name]
    base = write_base(folder / "base")
    SentenceTransformer(modules=modules_of(base, **arguments), device="cpu", **options).save(str(folder / "saved"))
    files = saved_files(folder / "saved")
    if name == "lowercase":  # newer versions read this setting, but write a tokenizer that transformers 5 does not read as written
        files["sentence_bert_config.json"]["do_lower_case"] = True
    write_files(folder / "saved", files)
    model = SentenceTransformer(str(folder / "saved"), device="cpu")
    vectors = model.encode(TEXTS, convert_to_tensor=True)
    return {"labels": 0, "files": files, "vectors": digits(vectors), "similarity": digits(model.similarity(vectors[:1], vectors[1:])[0])}


def scores_line(name: str, folder: Path) -> dict[str, Any]:
    from sentence_transformers import CrossEncoder

    labels, options = SCORES[name]
    base = write_base(folder / "base", labels)
    CrossEncoder(str(base), device="cpu", **options).save_pretrained(str(folder / "saved"))
    model = CrossEncoder(str(folder / "saved"), device="cpu")
    # for several labels without a function, the rule of transformers' pipeline
    softmax = labels > 1 and isinstance(model.activation_fn, IDENTITY)
    scores = model.predict([(TEXTS[0], text) for text in SECOND_TEXTS], convert_to_tensor=True, apply_softmax=softmax)
    return {"labels": labels, "files": saved_files(folder / "saved"), "scores": digits(scores.reshape(len(SECOND_TEXTS), -1))}


def digits(values: torch.Tensor) -> Any:
    return [digits(row) for row in values] if values.ndim > 1 else [round(float(value), 6) for value in values]


def main() -> None:
    """Writes the lines of the installed version."""
    import sentence_transformers

    version = sentence_transformers.__version__
    lines = [line for line in cases.load_cases(FILE) if not line["id"].startswith(f"{version}/")]
    for make, names in ((vectors_line, VECTORS), (scores_line, SCORES)):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    lines.append({"id": f"{version}/{name}", **make(name, Path(folder))})
                except (AttributeError, TypeError) as error:
                    print(f"{version} has no {name}: {error}", file=sys.stderr)
    cases.write(FILE, sorted(lines, key=lambda line: line["id"]), separators=(",", ":"))


if __name__ == "__main__":
    main()
