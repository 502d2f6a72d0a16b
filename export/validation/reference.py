"""The checkpoint's own outputs in PyTorch float32, the reference for graphs, and its attention.

The Hugging Face tokenizer creates the inputs, with its own truncation and windows, so that the service's tokenizer is validated too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertserve.export import calibration
from bertserve.export.calibration import Texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.signature import read_output, returning_attention
from bertserve.export.errors import ParityError
from bertserve.export.progress import track
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.spec import TokenizerCall
from bertserve.export.validation.samples import attention_texts, sample_requests, text_requests
from bertserve.export.validation.served_graph import ServedGraph
from bertserve.service.engine.onnx_engine import Row
from bertserve.service.tasks import attention
from bertserve.service.tasks.attention import MAX_VALUES

NO_TEXTS = Texts()

MAX_ERROR = 1e-4  # of a weight, which is from 0 to 1, for float32
MAX_TOKENS = 512  # of a text; PyTorch returns the maps of all layers and heads at once


class Reference:
    """The checkpoint's outputs for some requests, computed once and used for every graph.

    Attributes:
        requests: The requests.
        rows: For each request, the outputs of its windows, float32 by name.
        fixed: Number of the first requests, which are for graphs of each precision; the others are ordinary texts.
        attention: Its attention on a few texts, if the graphs return attention.
    """

    def __init__(self, checkpoint: Checkpoint, requests: Sequence[Any], texts: Sequence[Any] = ()) -> None:
        """Runs requests, and `texts` for int8, in PyTorch."""
        self.requests = [*requests, *texts]
        self.rows = [run(checkpoint, request) for request in track(self.requests, "run PyTorch", unit="samples")]
        self.fixed = len(requests)
        self.attention: Sequence[AttentionSample] = ()


def sample_reference(checkpoint: Checkpoint, texts: Texts = NO_TEXTS) -> Reference:
    """Returns the checkpoint's outputs for the samples of its task, and for texts to validate int8, which were not used to create it."""
    reference = Reference(checkpoint, fixed_requests(checkpoint), text_requests(checkpoint.task, texts, checkpoint.tokenizer_spec))
    reference.attention = sample_attention(checkpoint)
    return reference


def fixed_requests(checkpoint: Checkpoint) -> list[Any]:
    """Returns the fixed samples of a checkpoint, of which one has its maximum length."""
    spec = checkpoint.tokenizer_spec
    return sample_requests(
        checkpoint.task, spec, checkpoint, lambda text: len(checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"])
    )


def run(checkpoint: Checkpoint, request: Any) -> list[Row]:
    """Returns the outputs of each window of a request in PyTorch; windows run alone, because they change each other in some models."""
    call = TASKS[checkpoint.task].tokenizer_call(request, checkpoint.tokenizer_spec)
    return [_run_window(checkpoint, window) for window in _windows(checkpoint, call)]


def _windows(checkpoint: Checkpoint, call: TokenizerCall) -> list[dict[str, list[int]]]:
    """Returns the inputs of each window or choice, with the Hugging Face tokenizer's own truncation.

    Raises:
        ValueError: The model is too short for windows of the request.
    """
    length = call.length or checkpoint.tokenizer_spec.max_length
    try:
        batch = checkpoint.tokenizer(
            *call.texts,
            truncation=call.truncation,
            max_length=length,
            stride=call.stride or 0,
            return_overflowing_tokens=call.stride is not None,
            return_token_type_ids=True,
            return_attention_mask=True,
        )
    except BaseException as error:  # the library raises a plain Exception, and a panic of Rust is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"a window of {length} tokens has no room for the text and its overlap: {error}") from error
    is_nested = call.stride is not None or isinstance(call.texts[0], list)
    nested = batch if is_nested else {name: [values] for name, values in batch.items()}
    if not any(piece.type_id for piece in (*checkpoint.tokenizer_spec.single, *(checkpoint.tokenizer_spec.pair or ()))):
        # the library gives other types than the template's from the second window on
        nested["token_type_ids"] = [[0] * len(ids) for ids in nested["input_ids"]]
    names = [spec.name for spec in checkpoint.inputs if spec.name in nested]
    windows = [{name: nested[name][i] for name in names} for i in range(len(nested["input_ids"]))]
    # if the beginning of a text is cut, transformers returns the last window first
    return windows[::-1] if call.stride is not None and checkpoint.tokenizer_spec.truncation_side == "left" else windows


def _run_window(checkpoint: Checkpoint, window: dict[str, list[int]]) -> Row:
    """Returns a window's outputs from PyTorch in the engine's form, float32 by name."""
    with torch.no_grad():
        outputs = checkpoint.model(**{name: torch.tensor([values]) for name, values in window.items()})
    row = {spec.name: read_output(outputs, spec.name)[0].numpy() for spec in checkpoint.outputs if spec.kind != "per_map"}
    if checkpoint.mask is not None:
        masks = [i for i, id_ in enumerate(window["input_ids"]) if id_ == checkpoint.mask.id]
        row = {name: values[masks] for name, values in row.items()}
    return row


@dataclass(frozen=True)
class AttentionSample:
    """A text with PyTorch's attention maps of it.

    Attributes:
        request: The text, with the layers and heads to compare.
        layers: Weights of each of these layers, float32 [heads, length, length].
    """

    request: attention.AttentionRequest
    layers: Sequence[NDArray[np.float32]]


def sample_attention(checkpoint: Checkpoint) -> list[AttentionSample]:
    """Returns the checkpoint's attention for short and long texts, for as many heads as an answer may have; empty without attention."""
    counts, max_length = checkpoint.attention_heads, min(checkpoint.tokenizer_spec.max_length, MAX_TOKENS)
    all_heads = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    samples: list[AttentionSample] = []
    for texts in attention_texts() if counts else ():
        ordered = texts[::-1] if checkpoint.tokenizer_spec.second_text_first else texts
        batch = checkpoint.tokenizer(*ordered, return_tensors="pt", return_token_type_ids=True, return_attention_mask=True)
        length = batch["input_ids"].shape[1]
        if not 0 < length <= max_length or (len(texts) > 1 and checkpoint.tokenizer_spec.pair is None):
            continue
        with torch.no_grad(), returning_attention(checkpoint.model):
            weights = checkpoint.model(**{spec.name: batch[spec.name] for spec in checkpoint.inputs if spec.name in batch})["attentions"]
        maps = calibration.sample(all_heads, MAX_VALUES // length**2)
        heads = {layer: tuple(head for map_layer, head in maps if map_layer == layer) for layer, _ in maps}
        request = attention.AttentionRequest(texts[0], texts[1] if len(texts) > 1 else None, tuple(heads.items()))
        samples.append(AttentionSample(request, [weights[layer][0, list(indices)].numpy() for layer, indices in heads.items()]))
    return samples


def measure_attention(served: ServedGraph, samples: Sequence[AttentionSample]) -> float | None:
    """Returns the largest difference of a weight from PyTorch, or None if the graph does not return attention.

    Raises:
        ParityError: A float32 weight differs by more than `MAX_ERROR`, or a text has different tokens.
    """
    errors: list[float] = []
    for sample in samples:
        encoding, _ = attention.encode(sample.request, served.tokenizer)
        rows = served.engine.run([encoding])
        length = len(encoding)
        if sample.layers[0].shape[-1] != length:
            raise ParityError(f"a text has {length} tokens, but {sample.layers[0].shape[-1]} with the checkpoint's tokenizer.")
        errors.append(float(np.abs(rows[0][attention.OUTPUT] - np.concatenate(sample.layers)).max()))
    if not errors:
        return None
    worst = float(np.max(errors))  # `max` may ignore a NaN
    if served.graph.precision == "fp32" and not worst <= MAX_ERROR:
        raise ParityError(
            f"fp32 attention weights differ by {worst:.2e}, over the limit of {MAX_ERROR:.0e}; export it without --attentions."
        )
    return worst
