"""The checkpoint's own outputs in PyTorch, float32, with which graphs are compared.

The Hugging Face tokenizer makes its inputs, with its own truncation and windows, so that the service's tokenizer is compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.signature import read_output
from export.evidence.samples import sample_requests
from service.tasks import answer, classify, embed, fill_mask, ner
from service.text.windows import default_stride


class Reference:
    """The checkpoint's outputs for some requests, computed once and used for every graph.

    Attributes:
        requests: The requests.
        rows: For each request the outputs of its windows, float32 by name.
    """

    def __init__(self, checkpoint: Checkpoint, requests: Sequence[Any]) -> None:
        """Runs the requests through PyTorch, a window at a time."""
        self.requests = requests
        self.rows = [[_run_window(checkpoint, window) for window in _windows(checkpoint, request)] for request in requests]


def sample_reference(checkpoint: Checkpoint) -> Reference:
    """Returns the checkpoint's outputs for the fixed samples of its task."""
    return Reference(
        checkpoint, sample_requests(checkpoint.task, checkpoint.max_length, checkpoint.mask.token if checkpoint.mask else None)
    )


def _windows(checkpoint: Checkpoint, request: Any) -> list[dict[str, list[int]]]:
    """Returns the inputs of each window by the Hugging Face tokenizer's own truncation."""
    texts, truncation, stride, length = _tokenizer_arguments(checkpoint, request)
    batch = checkpoint.tokenizer(
        *texts,
        truncation=truncation,
        max_length=length,
        stride=stride or 0,
        return_overflowing_tokens=stride is not None,
        return_token_type_ids=True,
        return_attention_mask=True,
    )
    nested = batch if stride is not None else {name: [values] for name, values in batch.items()}
    names = [spec.name for spec in checkpoint.inputs if spec.name in nested]
    return [{name: nested[name][i] for name in names} for i in range(len(nested["input_ids"]))]


def _tokenizer_arguments(checkpoint: Checkpoint, request: Any) -> tuple[tuple[str, ...], str, int | None, int]:
    """Returns a request's texts, the truncation strategy, the stride of its windows if it has any, and the length of one, in tokens."""
    length = checkpoint.max_length
    if isinstance(request, classify.Request):
        texts = (request.text, request.text_pair) if request.text_pair else (request.text,)
        return texts, "longest_first", _stride(request.parameters.stride, checkpoint) if request.parameters.window else None, length
    if isinstance(request, ner.Request):
        return (request.text,), "longest_first", _stride(request.parameters.stride, checkpoint), length
    if isinstance(request, answer.Request):
        length = min(answer.DEFAULT_SEQ_LEN, length)
        return (request.question, request.context), "only_second", min(length // 2, answer.DEFAULT_STRIDE), length
    assert isinstance(request, fill_mask.Request | embed.Request)
    return (request.text,), "longest_first", None, length


def _stride(requested: int | None, checkpoint: Checkpoint) -> int:
    return default_stride(checkpoint.max_length - 2) if requested is None else requested


def _run_window(checkpoint: Checkpoint, window: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Returns a window's outputs from PyTorch in the form of the engine's, float32 by name."""
    with torch.no_grad():
        outputs = checkpoint.model(**{name: torch.tensor([values]) for name, values in window.items()})
    row = {spec.name: read_output(outputs, spec.name)[0].numpy() for spec in checkpoint.outputs}
    if checkpoint.mask is not None:
        masks = [i for i, id_ in enumerate(window["input_ids"]) if id_ == checkpoint.mask.id]
        row = {name: values[masks] for name, values in row.items()}
    return row
