"""Writes tiny, deterministic random checkpoints with transformers, and computes their logits in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import BertConfig, PreTrainedTokenizerFast

import tiny
from bertserve.export.calibration import BUILT_IN

# with tiny matrices on two shared cores, more threads only wait for each other
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

CLASSIFICATION = "BertForSequenceClassification"
ROWS = 1100  # the int8 stage quantizes only embeddings with at least 1024 rows
POSITIONS = 160
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def bert(
    folder: Path,
    name: str = "tiny-bert",
    *,
    labels: tuple[str, ...] = tiny.LABELS,
    positions: int = POSITIONS,
    model_max_length: int = 512,
    architecture: str = CLASSIFICATION,
    rows: int = ROWS,
    **config: Any,
) -> Path:
    """Writes a BERT checkpoint with these rows of the position table and of the word embedding to `folder/name`, and returns its path."""
    return save(
        folder / name,
        architecture,
        BertConfig(vocab_size=rows, max_position_embeddings=positions, **SIZES, **naming(labels), **config),
        model_max_length=model_max_length,
    )


def naming(labels: tuple[str, ...]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def save(path: Path, architecture: str, config: Any, *, model_max_length: int = 512, tokenizer_class: str = "BertTokenizer") -> Path:
    """Writes a random model with this configuration and its tokenizer, and returns the path."""
    torch.manual_seed(0)
    # the weight spread of a trained model, so that logits differ between texts
    config.initializer_range = 0.3
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                # initial biases are 0 and initial norms are 1; with these values, a test would not notice their loss
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    _save_tokenizer(path, model_max_length, tokenizer_class)
    return path


def _save_tokenizer(path: Path, model_max_length: int, tokenizer_class: str) -> None:
    """Writes the files of a fast tokenizer, which still contain the truncation and padding of training."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer(),
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        model_max_length=model_max_length,
    )
    fast.save_pretrained(path)
    edit_json(path / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    edit_json(
        path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
    )


def few_texts(folder: Path, count: int = 20) -> Path:
    """Writes the first `count` built-in calibration texts to a file and returns its path; they are enough for most tiny models."""
    path = folder / "texts.txt"
    path.write_text("".join(BUILT_IN.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
    return path


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def prune_heads(path: Path, pruned: Mapping[int, Sequence[int]], *, heads: int) -> None:
    """Removes heads, by layer, from a checkpoint with `heads` per layer in place, in the format of transformers 4."""
    tensors = load_file(path / "model.safetensors")
    for layer, gone in pruned.items():
        prefix = f"bert.encoder.layer.{layer}.attention"
        output = tensors[f"{prefix}.output.dense.weight"]
        kept = torch.ones(heads, output.shape[1] // heads, dtype=torch.bool)
        kept[list(gone)] = False
        rows = kept.flatten()
        tensors[f"{prefix}.output.dense.weight"] = output[:, rows].contiguous()
        for part in ("query", "key", "value"):
            for kind in ("weight", "bias"):
                tensors[f"{prefix}.self.{part}.{kind}"] = tensors[f"{prefix}.self.{part}.{kind}"][rows].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", pruned_heads={str(layer): list(gone) for layer, gone in pruned.items()})


def silence_heads(model: torch.nn.Module, pruned: Mapping[int, Sequence[int]], *, heads: int) -> None:
    """Zeroes the output weights of some heads, so that the model computes the same as a model without these heads."""
    with torch.no_grad():
        for layer, gone in pruned.items():
            weight = model.get_parameter(f"bert.encoder.layer.{layer}.attention.output.dense.weight")
            weight.view(weight.shape[0], heads, -1)[:, list(gone)] = 0


class PyTorch:
    """Runs a checkpoint in transformers as its user does, without the exporter."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()

    def logits(self, text: str, pair: str | None = None, *, max_length: int = POSITIONS) -> NDArray[np.float32]:
        feed = self.tokenizer(text, pair, truncation=True, max_length=max_length, padding=False, return_tensors="pt")
        with torch.no_grad():
            return np.asarray(self.model(**feed).logits[0])
