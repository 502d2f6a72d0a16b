"""A loaded checkpoint as one plain record: a PyTorch model, a clean `tokenizer.json`, and what the later stages need to know of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from bertserve.export.checkpoint.card_metadata import CardMetadata
from bertserve.export.checkpoint.flops import count_flops
from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec
from bertserve.service.bundle.manifest import (
    Activation,
    AddedToken,
    Embedding,
    Flops,
    MaskToken,
    Piece,
    Side,
    SpecialPiece,
    Task,
    TokenizerSpec,
)


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
        added_tokens: Tokens that training added and that a text may spell.
        card: The checkpoint's README.md, if it has one.
        card_metadata: What it says of license, language and data.
        embedding: How a text's vector is computed, for feature extraction.
        pairs_only: Whether the model says how two texts go together, so that one alone means nothing to it.
        attention_heads: Heads of each layer, where the graph gives attention maps out; else none.
        ignored_weights: Patterns of the names of weights that the model may leave unused, because the user said so.
        truncation_side: At which end the tokenizer cuts a text over the length.
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
    padding_side: Side
    single: tuple[Piece, ...]
    pair: tuple[Piece, ...]
    cls_index: int | None
    subword_prefix: str | None
    mask: MaskToken | None
    added_tokens: tuple[AddedToken, ...]
    card: str | None
    card_metadata: CardMetadata
    embedding: Embedding | None = None
    pairs_only: bool = False
    attention_heads: tuple[int, ...] = ()
    ignored_weights: tuple[str, ...] = ()
    truncation_side: Side = "right"

    @property
    def attention_size(self) -> tuple[int, int]:
        """How many heads an attention has and how many values they share out, of whole heads; zeros where the configuration does not say."""
        heads, hidden = (getattr(self.model.config, name, None) for name in ("num_attention_heads", "hidden_size"))
        if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1 or hidden % heads:
            return 0, 0
        return heads, hidden

    @property
    def attentions(self) -> int:
        """How many attentions a text goes through: one a layer, and in a decoder that reads an encoder two."""
        config: Any = self.model.config
        reads_encoder = config.is_encoder_decoder and any(name.endswith("decoder") for name, _ in self.model.named_modules())
        counts: list[int] = [getattr(config, name, None) or 0 for name in ("num_decoder_layers", "decoder_layers")]
        encoder_layers: int = config.num_hidden_layers
        return encoder_layers + (2 * max(counts) if reads_encoder else 0)

    def example_ids(self, length: int) -> list[int]:
        """Returns token ids of a text of this many tokens, with its special tokens: the heads of some models look for the last of them.

        Args:
            length: Tokens, special tokens counted.
        """
        word = 0 if self.pad_id else 1
        place = next((i for i, piece in enumerate(self.single) if not isinstance(piece, SpecialPiece)), 0)
        before, after = (
            [piece.id for piece in side if isinstance(piece, SpecialPiece)] for side in (self.single[:place], self.single[place:])
        )
        return [*before, *[word] * (length - len(before) - len(after)), *after][-length:]

    def tokenizer_spec(self, sha256: str) -> TokenizerSpec:
        """Returns the manifest's entry of the tokenizer, given the digest of its file."""
        facts = (
            "max_length",
            "pad_id",
            "padding_side",
            "single",
            "pair",
            "cls_index",
            "subword_prefix",
            "mask",
            "pairs_only",
            "added_tokens",
            "truncation_side",
        )
        return TokenizerSpec.model_validate({"sha256": sha256} | {fact: getattr(self, fact) for fact in facts})

    @cached_property
    def flops(self) -> Flops:
        """Floating-point operations of a text, counted on first access by running the model."""
        return count_flops(self.model, self.inputs, self.example_ids, max_length=self.max_length)
