"""Gives every head the one form that all later stages know: inputs of [rows, length], and outputs by the names of the graph.

What a task asks of all its models is in `export/tasks`. Two classes of pretraining need more.

ALBERT's class of pretraining has two heads, of which the one of sentence order has no class of its own. ELECTRA's discriminator has one
logit a token, x, which says by its sigmoid that the token was replaced. With a second one that is always 0 it is a tagger like any other: the
softmax over 0 and x is 1 - sigmoid(x) and sigmoid(x).

Adapters are hooks: the model's own code runs, whatever it is, in PyTorch and in both exporters.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AlbertForPreTraining, ElectraForPreTraining, PreTrainedModel

from bertserve.export.errors import CheckpointError
from bertserve.export.tasks.catalog import TASKS
from bertserve.service.bundle.manifest import Task

SENTENCE_ORDERS = 2


def adapt_head(model: PreTrainedModel, task: Task) -> None:
    """Makes a loaded model take and give out what graphs of its task do; most do so already.

    Raises:
        CheckpointError: ALBERT's head of sentence order has not two labels.
    """
    if (adapt := TASKS[task].adapt_model) is not None:
        adapt(model)
    elif isinstance(model, AlbertForPreTraining):
        _give_sentence_order(model)
    elif isinstance(model, ElectraForPreTraining):
        model.register_forward_hook(_give_both_tags)


def _give_sentence_order(model: Any) -> None:
    """Makes ALBERT's class of pretraining give out the `logits` [rows, 2] of sentence order, and compute nothing for the other head."""
    labels = model.sop_classifier.classifier.out_features
    if labels != SENTENCE_ORDERS:
        raise CheckpointError(
            f"the head of sentence order has {labels} labels, as config.json says, and {SENTENCE_ORDERS} are known: in order, and swapped."
        )
    model.predictions = torch.nn.Identity()

    def name(module: Any, args: Any, output: Any) -> Any:
        output["logits"] = output["sop_logits"]
        return output

    model.register_forward_hook(name)


def _give_both_tags(module: Any, args: Any, output: Any) -> Any:
    """Makes `logits` [rows, length, 2], of the tags original and replaced, of ELECTRA's [rows, length]."""
    replaced = output["logits"]
    output["logits"] = torch.stack([torch.zeros_like(replaced), replaced], dim=-1)
    return output
