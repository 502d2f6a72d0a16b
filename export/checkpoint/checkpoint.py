"""A loaded checkpoint as one plain record: a PyTorch model, a clean `tokenizer.json`, and what the later stages need to know of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedModel

from export.checkpoint.flops import count_flops
from service.bundle.graph_spec import InputSpec, OutputSpec
from service.bundle.manifest import Activation, Embedding, Flops, MaskToken, Piece, Task, TokenizerSpec


@dataclass(frozen=True)
class Checkpoint:
    """Everything the later stages need of a checkpoint.

    Attributes:
        name: Name of the source's last path component.
        source: Name of a local folder, or the hub id.
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
        single: Special-token template of one text.
        pair: Special-token template of a pair.
        cls_index: Position of [CLS] in both templates: 0, -1 for the end, or None.
        subword_prefix: Prefix of a token that continues a word, or None.
        mask: The mask token, for fill-mask.
        card: The checkpoint's README.md, if it has one.
        embedding: How a text's vector is computed, for feature extraction.
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
        """Floating-point operations of a text, counted on first access by running the model."""
        return count_flops(self.model, self.inputs, max_length=self.max_length, pad_id=self.pad_id)
