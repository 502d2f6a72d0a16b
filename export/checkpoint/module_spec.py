"""ModuleSpec: what a factory of a module of one's own returns, for `bert-export --module FILE:FACTORY`.

    def make():
        module = Tagger()
        module.load_state_dict(safetensors.torch.load_file("tagger.safetensors"))
        return {"module": module, "tokenizer": "tokenizer.json", "task": "token-classification", "labels": ["O", "PER"], "pad_token": "[PAD]"}

A dictionary with these names does too, so that the file imports nothing of bertserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bertserve.service.bundle.manifest import Pooling


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """A PyTorch module with all that a checkpoint of transformers says in its files.

    Attributes:
        module: Takes `input_ids` and, where its `forward` has parameters of these names, `attention_mask` and `token_type_ids`, int64
            [rows, length]. Returns float32 logits [rows, labels], of a tagger [rows, length, labels], of a reader a tuple of two
            [rows, length], and without a head vectors [rows, length, values].
        tokenizer: A `tokenizer.json`, with its special tokens in its post-processor; a relative path begins at the factory's file.
        task: `text-classification`, `token-classification`, `question-answering` or `feature-extraction`.
        pad_token: The token that fills up rows; it stands in no text.
        labels: Names by id, of a classification.
        problem_type: `single_label_classification`, `multi_label_classification` or `regression`, which says what turns logits into scores.
        cls_token: What stands for "no answer" in question answering.
        max_length: Usable length in tokens, special tokens counted.
        pooling: What makes one vector of a text's, for feature-extraction.
    """

    module: torch.nn.Module
    tokenizer: str | Path
    task: str
    pad_token: str
    labels: Sequence[str] = field(default=())
    problem_type: str = "single_label_classification"
    cls_token: str | None = None
    max_length: int = 512
    pooling: Pooling = "mean"
