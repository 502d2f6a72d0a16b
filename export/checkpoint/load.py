"""Loads a checkpoint: model, fast tokenizer, labels, lengths. What differs between checkpoints ends here, and in what this calls.

What leaves it is plain: a PyTorch model in float32 and evaluation mode, a clean `tokenizer.json`, a template of special
tokens. No pickle is ever loaded and no code of the checkpoint is ever run.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from export.checkpoint import flops, model_patches, self_modifying, sentence_transformers, task_head, weights
from export.checkpoint import source as sources
from export.checkpoint import tokenizer as fast_tokenizer
from export.checkpoint.sentence_transformers import Sentences
from export.checkpoint.source import Files
from export.errors import CheckpointError
from service.bundle.graph_spec import InputSpec, OutputSpec
from service.bundle.manifest import Activation, Embedding, Flops, Layers, MaskToken, Piece, Task, TokenizerSpec

FILLS: dict[str, InputSpec] = {
    "input_ids": InputSpec(name="input_ids", fill="token_ids"),
    "attention_mask": InputSpec(name="attention_mask", fill="attention_mask"),
    "token_type_ids": InputSpec(name="token_type_ids", fill="type_ids"),
}
MASK_INDEX = InputSpec(name="mask_index", fill="mask_index")

# of a model whose positions are all relative and whose tokenizer says nothing: what nearly all were trained with
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class Checkpoint:
    """Everything the later stages need of a checkpoint.

    Attributes:
        name: Name of the source's last path component.
        source: What the user gave.
        revision: Hub revision, if any.
        commit: The hub's commit that was loaded, or None for a local folder.
        weights_sha256: Digest over the weight files.
        model: In float32, evaluation mode, with eager attention.
        task: Hugging Face task name.
        inputs: The graph's inputs: what the model takes and the tokenizer fills, and for fill-mask the masks' positions.
        outputs: The graph's outputs.
        labels: Label names by id.
        activation: What turns logits into scores.
        tokenizer: The Hugging Face tokenizer, for the reference side of parity.
        tokenizer_json: Fast tokenizer without truncation and padding.
        max_length: Usable length in tokens, special tokens counted.
        pad_id: Padding token id.
        padding_side: `left` or `right`.
        single: Template of one text.
        pair: Template of a pair.
        cls_index: Where [CLS] stands in both templates: 0, -1 for the end, or None.
        subword_prefix: What begins a token that continues a word, or None.
        mask: The mask token, for fill-mask.
        card: The checkpoint's README.md, if it has one.
        embedding: What a text's vector is made of, for feature extraction.
    """

    name: str
    source: str
    revision: str | None
    commit: str | None
    weights_sha256: str
    model: PreTrainedModel
    task: Task
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    labels: tuple[str, ...]
    activation: Activation
    tokenizer: Any
    tokenizer_json: str
    max_length: int
    pad_id: int
    padding_side: Literal["left", "right"]
    single: tuple[Piece, ...]
    pair: tuple[Piece, ...]
    cls_index: int | None
    subword_prefix: str | None
    mask: MaskToken | None
    card: str | None
    embedding: Embedding | None = None

    def tokenizer_spec(self, sha256: str) -> TokenizerSpec:
        """Returns the manifest's entry of the tokenizer, given the digest of its file."""
        facts = ("max_length", "pad_id", "padding_side", "single", "pair", "cls_index", "subword_prefix", "mask")
        return TokenizerSpec.model_validate({"sha256": sha256} | {fact: getattr(self, fact) for fact in facts})

    @cached_property
    def flops(self) -> Flops:
        """Arithmetic of a text, counted when it is first asked for: the model runs."""
        return flops.measure(self.model, self.inputs, max_length=self.max_length, pad_id=self.pad_id)


def load_checkpoint(source: str, *, task: str = "auto", revision: str | None = None, layers: Layers = "last") -> Checkpoint:
    """Loads a checkpoint from a local folder or the hub.

    Args:
        source: A folder with `config.json` and `model.safetensors`, or a hub id.
        task: A Hugging Face task name, or `auto` to read it from the architecture.
        revision: Branch, tag or commit of a hub id.
        layers: What an embedding graph gives out: the last layer, or the last four side by side too.

    Raises:
        CheckpointError: Something is missing or not understood; the message says what.
    """
    # what it warns of is judged below, and said in one line
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    found = sources.find(source, revision)
    config = sources.read(f"the configuration of `{source}`", AutoConfig.from_pretrained, found.base)
    built, loader = task_head.choose(config, task, found.lora)
    embeds = built == "feature-extraction"
    if layers != "last" and not embeds:
        raise CheckpointError(f"--layers {layers} is for feature-extraction, and `{source}` is for {built}; leave it out.")
    tokenizer = fast_tokenizer.load(source, found.tokenizer)
    sentences = sentence_transformers.read(found.folder, found.own) if embeds else None
    model = weights.load(found, built, loader, config)
    sentence_transformers.give_layers(model, layers)
    return _described(found, built, config, model, tokenizer, sentences, layers)


def _described(
    found: Files, task: Task, config: Any, model: PreTrainedModel, tokenizer: Any, sentences: Sentences | None, layers: Layers
) -> Checkpoint:
    """Reads off model and tokenizer, which must fit, what the other stages need."""
    source = found.source
    _check_vocabulary(source, model, fast_tokenizer.vocabulary(tokenizer))
    inputs = _inputs(model, tokenizer)
    single, pair = fast_tokenizer.template(tokenizer, ("a",)), fast_tokenizer.template(tokenizer, ("a", "b"))
    _check_types(source, config, inputs, (*single, *pair))
    return Checkpoint(
        name=Path(source.rstrip("/")).name,
        source=Path(source).name if found.local else source,
        revision=found.revision,
        commit=found.commit,
        weights_sha256=found.weights_sha256,
        model=model,
        task=task,
        inputs=(*inputs, MASK_INDEX) if task == "fill-mask" else inputs,
        outputs=task_head.OUTPUTS[task] if sentences is None else sentence_transformers.OUTPUTS[layers],
        labels=task_head.labels(source, config) if task.endswith("-classification") else (),
        activation=task_head.activation(config) if task == "text-classification" else "softmax" if sentences is None else "none",
        tokenizer=tokenizer,
        tokenizer_json=fast_tokenizer.document(tokenizer, task),
        max_length=min(_usable_length(model, tokenizer), (sentences and sentences.max_length) or sys.maxsize),
        pad_id=tokenizer.pad_token_id,
        padding_side=_padding_side(source, model, tokenizer, inputs),
        single=single,
        pair=pair,
        cls_index=_cls_index(source, task, tokenizer, single, pair),
        subword_prefix=fast_tokenizer.subword_prefix(tokenizer),
        mask=fast_tokenizer.mask(source, tokenizer) if task == "fill-mask" else None,
        card=found.card,
        embedding=None if sentences is None else sentences.embedding(model, layers),
    )


def _check_vocabulary(source: str, model: PreTrainedModel, vocabulary: int) -> None:
    """Refuses token ids that the embedding has no row for."""
    try:
        embeddings: Any = model.get_input_embeddings()
    except NotImplementedError as error:
        raise CheckpointError(f"{type(model).__name__} of `{source}` has no embedding of token ids, which is not understood.") from error
    rows = embeddings.weight.shape[0]
    if vocabulary > rows:
        raise CheckpointError(
            f"the tokenizer of `{source}` has {vocabulary} tokens, the embedding only {rows} rows; they do not belong together. "
            "Save the tokenizer that the model was trained with beside it."
        )


def _check_types(source: str, config: Any, inputs: tuple[InputSpec, ...], pieces: tuple[Piece, ...]) -> None:
    """Refuses token types that the model has no row for: PyTorch would stop at the first pair."""
    rows = getattr(config, "type_vocab_size", None)
    highest = max(piece.type_id for piece in pieces)
    if rows and highest >= rows and any(spec.fill == "type_ids" for spec in inputs):
        raise CheckpointError(
            f"the tokenizer of `{source}` gives token types up to {highest}, and the model has {rows}; they do not belong together."
        )


def _cls_index(source: str, task: Task, tokenizer: Any, single: tuple[Piece, ...], pair: tuple[Piece, ...]) -> int | None:
    """Returns where [CLS] stands; a question's answers need it, for none is there."""
    index = fast_tokenizer.cls_index(tokenizer, single, pair)
    if task == "question-answering" and index is None:
        raise CheckpointError(
            f"the tokenizer of `{source}` neither begins nor ends its inputs with a [CLS] token, which question answering needs."
        )
    return index


def _inputs(model: PreTrainedModel, tokenizer: Any) -> tuple[InputSpec, ...]:
    taken = inspect.signature(model.forward).parameters
    if model.main_input_name not in FILLS:
        raise CheckpointError(f"{type(model).__name__} reads `{model.main_input_name}`, not token ids; only models of text are exported.")
    needed = [
        n for n, p in taken.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n not in FILLS
    ]
    if needed:
        raise CheckpointError(
            f"{type(model).__name__} needs inputs that are not understood: {', '.join(needed)}; known are {', '.join(FILLS)}."
        )
    unknown = [name for name in tokenizer.model_input_names if name not in FILLS]
    if unknown:
        raise CheckpointError(f"the tokenizer gives inputs that are not understood: {', '.join(unknown)}.")
    # in the model's own order, which the tracer goes by
    return tuple(FILLS[name] for name in taken if name in FILLS and name in tokenizer.model_input_names)


def _padding_side(source: str, model: PreTrainedModel, tokenizer: Any, inputs: tuple[InputSpec, ...]) -> model_patches.Side:
    """Returns where padding goes; finds out by running the model, which is the first time that it runs."""
    try:
        with self_modifying.checked(source, model):
            return model_patches.padding_side(model, tokenizer, [spec.name for spec in inputs])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{type(model).__name__} of `{source}` does not run on what its tokenizer gives: {type(error).__name__}: {error}; "
            "mend the checkpoint, or it is of a kind that is not understood."
        ) from error


def _usable_length(model: PreTrainedModel, tokenizer: Any) -> int:
    """The position table, less the rows that RoBERTa's family keeps for padding, and what the tokenizer admits."""
    tables = [
        m
        for name, m in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(getattr(m, "weight", None), torch.Tensor)
    ]
    # by what a table holds, since some models have a class of their own for it
    rows = [m.weight.shape[0] - (0 if m.padding_idx is None else m.padding_idx + 1) for m in tables if hasattr(m, "padding_idx")]
    lengths = [*rows, getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
    # transformers writes "no limit" as -1 or as 10^30
    return int(min((length for length in lengths if length and 0 < length < 10**9), default=DEFAULT_LENGTH))
