"""The checkpoint's own outputs in PyTorch, float32, with which graphs are compared.

The Hugging Face tokenizer makes its inputs, with its own truncation and windows, so that the service's tokenizer is compared too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertserve.export.calibration import Texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.signature import read_output
from bertserve.export.evidence.attention_parity import AttentionSample, sample_attention
from bertserve.export.evidence.samples import full_length_request, sample_requests, text_requests
from bertserve.export.progress import track
from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.bundle.manifest import SpecialPiece
from bertserve.service.tasks import answer, choose, classify, embed, fill_mask, ner
from bertserve.service.text.windows import default_stride

NO_TEXTS = Texts()


class Reference:
    """The checkpoint's outputs for some requests, computed once and used for every graph.

    Attributes:
        requests: The requests.
        rows: For each request the outputs of its windows, float32 by name.
        fixed: How many of them, the first ones, are for graphs of each precision; the others are ordinary texts.
        attention: Its attention on a few texts, where graphs give it out.
    """

    def __init__(self, checkpoint: Checkpoint, requests: Sequence[Any], texts: Sequence[Any] = ()) -> None:
        """Runs the requests through PyTorch, a window at a time: two at once change each other's outputs in some models.

        Args:
            checkpoint: The checkpoint.
            requests: Requests for graphs of each precision.
            texts: More of them, for int8.
        """
        self.requests = [*requests, *texts]
        self.rows = [
            [_run_window(checkpoint, window) for window in _windows(checkpoint, request)]
            # a bar for a single request would be one for each line of a user's data
            for request in (track(self.requests, "run PyTorch", unit="samples") if len(self.requests) > 1 else self.requests)
        ]
        self.fixed = len(requests)
        self.attention: Sequence[AttentionSample] = ()

    def of(self, precision: Precision) -> Reference:
        """Returns what a graph of a precision is compared with: of int8, whose answers may differ, all; of others the first requests."""
        if precision == "int8":
            return self
        first = copy.copy(self)
        first.requests, first.rows = self.requests[: self.fixed], self.rows[: self.fixed]
        return first


def sample_reference(checkpoint: Checkpoint, texts: Texts = NO_TEXTS) -> Reference:
    """Returns the checkpoint's outputs for the samples of its task.

    Args:
        checkpoint: The checkpoint.
        texts: Ordinary texts on which int8 is measured, none of those that it was made with; none where there is no such graph.
    """
    mask = checkpoint.mask.token if checkpoint.mask else None
    task, length, pairs_only = checkpoint.task, checkpoint.max_length, checkpoint.pairs_only
    prompts = checkpoint.embedding.prompts.values() if checkpoint.embedding else ()
    spec = checkpoint.tokenizer_spec("")
    full = full_length_request(task, spec, lambda text: len(checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]))
    fixed = [*sample_requests(task, spec, prompts), full]
    reference = Reference(checkpoint, fixed, text_requests(task, texts, length, mask, pairs_only=pairs_only))
    reference.attention = sample_attention(checkpoint)
    return reference


def _windows(checkpoint: Checkpoint, request: Any) -> list[dict[str, list[int]]]:
    """Returns the inputs of each window, or of each choice, by the Hugging Face tokenizer's own truncation.

    Raises:
        ValueError: The model is too short for windows of the request.
    """
    texts, truncation, stride, length = _tokenizer_arguments(checkpoint, request)
    try:
        batch = checkpoint.tokenizer(
            *texts,
            truncation=truncation,
            max_length=length,
            stride=stride or 0,
            return_overflowing_tokens=stride is not None,
            return_token_type_ids=True,
            return_attention_mask=True,
        )
    except BaseException as error:  # the library raises bare Exception, and a Rust panic is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"a window of {length} tokens has no room for the text and its overlap: {error}") from error
    is_nested = stride is not None or isinstance(request, choose.Request)
    nested = batch if is_nested else {name: [values] for name, values in batch.items()}
    names = [spec.name for spec in checkpoint.inputs if spec.name in nested]
    found = [{name: nested[name][i] for name in names} for i in range(len(nested["input_ids"]))]
    # where the beginning of a text is cut, transformers gives its last window first
    return found[::-1] if stride is not None and checkpoint.truncation_side == "left" else found


def _tokenizer_arguments(checkpoint: Checkpoint, request: Any) -> tuple[tuple[Any, ...], str, int | None, int]:
    """Returns a request's texts, or lists of them, the truncation strategy, the stride of its windows if it has any, and the length of one, in tokens."""
    length = checkpoint.max_length
    if isinstance(request, classify.Request):
        texts = (request.text, request.text_pair) if request.text_pair else (request.text,)
        return texts, "longest_first", _stride(request.parameters.stride, checkpoint) if request.parameters.window else None, length
    if isinstance(request, choose.Request):
        # lists, as in `run_swag`: of one pair transformers would leave out an empty second text
        return ([request.first] * len(request.choices), request.seconds), "longest_first", None, length
    if isinstance(request, ner.Request):
        return (request.text,), "longest_first", _stride(request.parameters.stride, checkpoint), length
    if isinstance(request, answer.Request):
        length = min(request.parameters.max_seq_len or answer.DEFAULT_SEQ_LEN, length)
        return (request.question, request.context), "only_second", min(length // 2, answer.DEFAULT_STRIDE), length
    if isinstance(request, embed.Request):
        return (request.prompt + request.text,), "longest_first", None, length
    assert isinstance(request, fill_mask.Request)
    return (request.text,), "longest_first", None, length


def _stride(requested: int | None, checkpoint: Checkpoint) -> int:
    specials = sum(isinstance(piece, SpecialPiece) for piece in checkpoint.single)
    return default_stride(checkpoint.max_length - specials) if requested is None else requested


def _run_window(checkpoint: Checkpoint, window: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Returns a window's outputs from PyTorch in the form of the engine's, float32 by name."""
    with torch.no_grad():
        outputs = checkpoint.model(**{name: torch.tensor([values]) for name, values in window.items()})
    row = {spec.name: read_output(outputs, spec.name)[0].numpy() for spec in checkpoint.outputs if spec.kind != "per_map"}
    if checkpoint.mask is not None:
        masks = [i for i, id_ in enumerate(window["input_ids"]) if id_ == checkpoint.mask.id]
        row = {name: values[masks] for name, values in row.items()}
    return row
