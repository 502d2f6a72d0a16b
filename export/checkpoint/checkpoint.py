"""A loaded checkpoint as a plain record: a PyTorch model, its tokenizer, and the facts that later stages need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from bertserve.export.checkpoint.signature import MASK_INDEX, read_output
from bertserve.export.tasks.tags import read_tags
from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec
from bertserve.service.bundle.manifest import Activation, Embedding, Flops, Source, SpecialPart, Task, TokenizerSpec
from bertserve.service.tasks import token_classification


@dataclass(frozen=True)
class Checkpoint:
    """All facts about a checkpoint that later stages need.

    Attributes:
        origin: The manifest's entry for the checkpoint, without the versions of packages.
        model: The model in float32 and evaluation mode, with eager attention.
        inputs: The graph's inputs: the model's inputs that the tokenizer provides, and for fill-mask the masks' positions.
        activation: The function from logits to scores.
        hf_tokenizer: The Hugging Face tokenizer, for the reference of parity.
        tokenizer: Its entry in the manifest, without the digest of its file.
        card: The checkpoint's README.md, if any.
        embedding: The settings of a text's vector, for feature extraction.
        attention_heads: Number of heads of each layer if the graph returns attention maps, otherwise empty.
    """

    origin: Source
    model: PreTrainedModel
    task: Task
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    labels: tuple[str, ...]
    activation: Activation
    hf_tokenizer: Any
    tokenizer: TokenizerSpec
    card: str | None = None
    embedding: Embedding | None = None
    attention_heads: tuple[int, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """The tag of each label, for token classification; empty if the labels are the tags."""
        return read_tags(self.labels) if self.task == token_classification.TASK else ()

    @property
    def heads_and_hidden_size(self) -> tuple[int, int]:
        """Number of heads of an attention, and of values that they divide, before pruning; zeros if the configuration lacks them."""
        heads, hidden = (getattr(self.model.config, name, None) for name in ("num_attention_heads", "hidden_size"))
        if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1 or hidden % heads:
            return 0, 0
        return heads, hidden

    @property
    def attention_count(self) -> int:
        """Number of attentions that a text passes: one per layer, and two in a decoder that reads an encoder."""
        config: Any = self.model.config
        reads_encoder = config.is_encoder_decoder and any(name.endswith("decoder") for name, _ in self.model.named_modules())
        counts: list[int] = [getattr(config, name, None) or 0 for name in ("num_decoder_layers", "decoder_layers")]
        encoder_layers: int = config.num_hidden_layers
        return encoder_layers + (2 * max(counts) if reads_encoder else 0)

    def example_ids(self, length: int) -> list[int]:
        """Returns ids of a text of `length` tokens with special tokens, because the heads of some models look for the last of them."""
        word, single = 0 if self.tokenizer.pad_id else 1, self.tokenizer.single
        position = next((i for i, part in enumerate(single) if not isinstance(part, SpecialPart)), 0)
        before, after = ([part.id for part in side if isinstance(part, SpecialPart)] for side in (single[:position], single[position:]))
        return [*before, *[word] * (length - len(before) - len(after)), *after][-length:]

    def count_operations(self, length: int) -> int:
        """Returns the floating-point operations of a text of `length` tokens, with one mask for fill-mask."""
        ids = self.example_ids(length)
        values = {"token_ids": [ids], "attention_mask": [[1] * length], "type_ids": [[0] * length], "mask_index": [0]}
        feed = {spec.name: torch.tensor(values[spec.fill]) for spec in self.inputs if spec.fill in values}
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            GraphModel(self.model, list(feed), ())(*feed.values())
        return int(counter.get_total_flops())


def count_flops(checkpoint: Checkpoint) -> Flops:
    """Counts the floating-point operations of a text in three runs of the model: a term linear in its tokens, and a quadratic one.

    They are counted while the model runs, because layers can be shared, and any kind of product can use weights. Matrix products and
    convolutions count, with two operations per multiplication and addition. Constant costs are left out: layers for [CLS] only, and tables
    of relative positions, which a batch needs once. For a masked language model, a text has one mask.
    """
    # FlopCounterMode fails on a view of a trainable parameter that a module gets as its input
    checkpoint.model.requires_grad_(False)
    longest = min(checkpoint.tokenizer.max_length, 32)  # counts are exact at any length, and short texts are fast for large models
    lengths = s, t, u = max(longest // 4, 1), max(longest // 2, 2), max(longest, 3)
    x, y, z = (checkpoint.count_operations(length) for length in lengths)
    # constant + linear * S + quadratic * S**2 through three points
    first, second = (y - x) / (t - s), (z - y) / (u - t)
    quadratic = max((second - first) / (u - s), 0.0)
    linear = first - quadratic * (s + t) if quadratic else (z - x) / (u - s)
    return Flops(linear=max(linear, 1.0), quadratic=quadratic)


class GraphModel(torch.nn.Module):
    """The model with positional inputs in a fixed order, and only with the outputs that a graph needs.

    Full logits of a masked language model have the shape rows x length x vocabulary. So the encoder's output is reduced to the positions of
    the masks, as one row, before the model's own head reads it. This works without knowledge of the head's modules.
    """

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the outputs; `tensors` are the inputs in order."""
        inputs = dict(zip(self.inputs, tensors, strict=True))
        mask_index = inputs.pop(MASK_INDEX.name, None)
        if mask_index is None:
            outputs = self.model(**inputs)
            return tuple(read_output(outputs, name) for name in self.outputs)

        def gather(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
            hidden = output["last_hidden_state"]
            output["last_hidden_state"] = hidden.reshape(-1, hidden.shape[-1])[mask_index].unsqueeze(0)
            return output

        with self.model.base_model.register_forward_hook(gather):
            outputs = self.model(**inputs)
        return tuple(outputs["logits"][0] if name == "logits" else read_output(outputs, name) for name in self.outputs)
