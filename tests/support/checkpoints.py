"""Writes tiny, deterministic random checkpoints with transformers, and computes their logits in PyTorch."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, PreTrainedTokenizerFast

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.fast_tokenizer import tokenizer_json
from bertserve.export.tasks.sample_texts import LONG_TEXT
from bertserve.service.bundle.files import TOKENIZER_FILE
from bertserve.service.text.tokenizer import Tokenizer
from support import tiny

# with tiny matrices on two shared cores, more threads only wait for each other
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

CLASSIFICATION = "BertForSequenceClassification"
ROWS = 1100  # the int8 stage quantizes only embeddings with at least 1024 rows
POSITIONS = 160
# With only the letters of most words, the samples of an export would have a hundred windows.
VOCABULARY = list(dict.fromkeys([*tiny.VOCABULARY, *re.findall(r"\w+", LONG_TEXT.lower())]))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PROMPTS = {"query": "the book was ", "passage": ""}


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
        BertConfig(vocab_size=rows, max_position_embeddings=positions, **SIZES | naming(labels) | config),
        model_max_length=model_max_length,
    )


def naming(labels: tuple[str, ...]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def save(path: Path, architecture: str, config: Any, *, model_max_length: int = 512, tokenizer_class: str = "BertTokenizer") -> Path:
    """Writes a random model with this configuration and its tokenizer, and returns the path."""
    save_random(path, architecture, config)
    _save_tokenizer(path, model_max_length, tokenizer_class)
    return path


def save_random(path: Path, architecture: str, config: Any, *, initializer_range: float = 0.3, word_scale: float = 1) -> Path:
    """Writes a random model and returns the path; `word_scale` multiplies the word embeddings."""
    torch.manual_seed(0)
    # by default, the standard deviation of a trained model's weights, so that logits differ between texts
    config.initializer_range = initializer_range
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "bias" in name:
                # initial biases are 0 and initial norms are 1; with these values, a test would not notice their loss
                parameter.add_(0.1 * torch.randn_like(parameter))
        if word_scale != 1:
            model.get_input_embeddings().weight.mul_(word_scale)
    model.save_pretrained(path)
    return path


def _save_tokenizer(path: Path, model_max_length: int, tokenizer_class: str) -> None:
    """Writes the files of a fast tokenizer, which still contain the truncation and padding of training."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer(VOCABULARY),
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


def save_adapter(model: Any, folder: Path, **config: Any) -> Any:
    """Saves a random LoRA adapter to a folder, as peft does after training; returns the adapted model."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**config)).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
    adapted.save_pretrained(folder)
    return adapted


def service_tokenizer(checkpoint: Checkpoint, folder: Path) -> Tokenizer:
    """Returns the service's tokenizer of a loaded checkpoint; writes its file to the folder."""
    (folder / TOKENIZER_FILE).write_text(tokenizer_json(checkpoint.hf_tokenizer, checkpoint.tokenizer), encoding="utf-8")
    return Tokenizer(folder / TOKENIZER_FILE, checkpoint.tokenizer)


def encoder(folder: Path, *, layers: int = 4, architecture: str = "BertModel", **labels: Any) -> Path:
    config = getattr(transformers, architecture).config_class
    sizes = SIZES | {"num_hidden_layers": layers}
    return save(folder / "vectors", architecture, config(vocab_size=ROWS, max_position_embeddings=POSITIONS, **sizes, **labels))


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def write_modules(path: Path, *kinds: str) -> None:
    """Writes the `modules.json` of sentence-transformers: a Transformer in the checkpoint's folder, then modules of these kinds."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(("Transformer", *kinds))
    ]
    write_json(path / "modules.json", modules)


def sentence_transformers(path: Path, *kinds: str, pooling: str = "mean_tokens", max_length: int | None = 64) -> Path:
    """Adds the files of sentence-transformers to a checkpoint: a pooling, modules of these kinds, and settings; returns its path."""
    write_modules(path, "Pooling", *kinds)
    write_json(path / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    write_json(path / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    write_json(path / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    return path


def numbered_texts(path: Path, numbers: Iterable[int]) -> Path:
    """Writes a short text for each number to a file, and returns its path."""
    path.write_text("".join(f"text {i}\n" for i in numbers), encoding="utf-8")
    return path


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(path: Path, convert: Callable[[dict[str, torch.Tensor]], Any] = dict, **options: Any) -> None:
    """Replaces the weights file by a pickle of what `make` returns for the weights; `options` are for `torch.save`."""
    torch.save(convert(load_file(path / "model.safetensors")), path / "pytorch_model.bin", **options)
    (path / "model.safetensors").unlink()


def rename_weights(path: Path, name: str) -> None:
    """Renames the weights file and adds an index that names it."""
    weight_map = dict.fromkeys(load_file(path / "model.safetensors"), name)
    (path / "model.safetensors").rename(path / name)
    write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def shard(path: Path, count: int, *, pickled: bool = False) -> None:
    """Distributes the weights among `count` files, which an index lists."""
    tensors, weight_map = load_file(path / "model.safetensors"), {}
    (path / "model.safetensors").unlink()
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    for i in range(count):
        file = f"{stem}-{i + 1:05}-of-{count:05}.{suffix}"
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        if pickled:
            torch.save(part, path / file)
        else:
            save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(path / f"{stem}.{suffix}.index.json", {"metadata": {}, "weight_map": weight_map})


def prune_heads(
    path: Path,
    pruned: Mapping[int, Sequence[int]],
    *,
    heads: int,
    layer: str = "bert.encoder.layer.{}.attention",
    inputs: Sequence[str] = ("self.query", "self.key", "self.value"),
    output: str = "output.dense",
) -> None:
    """Removes heads, by layer, from a checkpoint with `heads` per layer in place, in the format of transformers 4."""

    def prune(tensors: dict[str, torch.Tensor]) -> None:
        for number, gone in pruned.items():
            prefix = layer.format(number)
            weight = tensors[f"{prefix}.{output}.weight"]
            mask = torch.ones(heads, weight.shape[1] // heads, dtype=torch.bool)
            mask[list(gone)] = False
            rows = mask.flatten()
            tensors[f"{prefix}.{output}.weight"] = weight[:, rows].contiguous()
            for name in (f"{prefix}.{part}.{kind}" for part in inputs for kind in ("weight", "bias")):
                tensors[name] = tensors[name][rows].contiguous()

    edit_weights(path, prune)
    edit_json(path / "config.json", pruned_heads={str(number): list(gone) for number, gone in pruned.items()})


def silence_heads(model: torch.nn.Module, pruned: Mapping[int, Sequence[int]], *, heads: int) -> None:
    """Zeroes the output weights of some heads, so that the model computes the same as a model without these heads."""
    with torch.no_grad():
        for layer, gone in pruned.items():
            weight = model.get_parameter(f"bert.encoder.layer.{layer}.attention.output.dense.weight")
            weight.view(weight.shape[0], heads, -1)[:, list(gone)] = 0
