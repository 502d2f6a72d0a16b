"""Compares the attention that a graph gives out, through the service's own tokenizer and engine, with the checkpoint's in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bertserve.export import text_files
from bertserve.export.checkpoint.attention_heads import returning_attention
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import ParityError
from bertserve.export.evidence.samples import attention_texts
from bertserve.service.backend.onnx_engine import Engine
from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.tasks import attention
from bertserve.service.tasks.attention import MAX_VALUES
from bertserve.service.text.tokenizer import Tokenizer

MAX_ERROR = 1e-4  # of a weight, which is 0 to 1, in a graph of float32
MAX_TOKENS = 512  # of a text: PyTorch returns the maps of all layers and heads at once


@dataclass(frozen=True)
class AttentionSample:
    """A text, and PyTorch's attention maps of it.

    Attributes:
        request: The text, with the layers and heads that are compared.
        layers: Weights of each of these layers, float32 [heads, length, length].
    """

    request: attention.Request
    layers: Sequence[NDArray[np.float32]]


def sample_attention(checkpoint: Checkpoint) -> list[AttentionSample]:
    """Returns the checkpoint's attention for short and long texts, of as many heads as an answer may have; nothing where it gives none out."""
    counts, most = checkpoint.attention_heads, min(checkpoint.max_length, MAX_TOKENS)
    every = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    samples: list[AttentionSample] = []
    for texts in attention_texts() if counts else ():
        batch = checkpoint.tokenizer(*texts, return_tensors="pt", return_token_type_ids=True, return_attention_mask=True)
        length = batch["input_ids"].shape[1]
        if not 0 < length <= most:
            continue
        with torch.no_grad(), returning_attention(checkpoint.model):
            found = checkpoint.model(**{spec.name: batch[spec.name] for spec in checkpoint.inputs if spec.name in batch})["attentions"]
        maps = text_files.sample(every, MAX_VALUES // length**2)
        heads = {layer: tuple(head for other, head in maps if other == layer) for layer, _ in maps}
        request = attention.Request(texts[0], texts[1] if len(texts) > 1 else None, tuple(heads.items()))
        samples.append(AttentionSample(request, [found[layer][0, list(which)].numpy() for layer, which in heads.items()]))
    return samples


def measure_attention(engine: Engine, tokenizer: Tokenizer, samples: Sequence[AttentionSample], precision: Precision) -> float | None:
    """Returns the largest difference of a weight to PyTorch, or None where the graph gives no attention out.

    Raises:
        ParityError: A float32 graph's is more than `MAX_ERROR`, or a text has other tokens.
    """
    errors: list[float] = []
    for sample in samples:
        encoding, _ = attention.encode(sample.request, tokenizer)
        rows = engine.run([encoding])
        length = len(encoding)
        if sample.layers[0].shape[-1] != length:
            raise ParityError(f"a text has {length} tokens where the checkpoint's tokenizer gives it {sample.layers[0].shape[-1]}.")
        errors.append(float(np.abs(rows[0][attention.OUTPUT] - np.concatenate(sample.layers)).max()))
    if not errors:
        return None
    worst = float(np.max(errors))  # not `max`, which may leave a NaN out
    if precision == "fp32" and not worst <= MAX_ERROR:
        raise ParityError(f"fp32 attention weights are off by {worst:.2e}, allowed is {MAX_ERROR:.0e}; export it without --attentions.")
    return worst
