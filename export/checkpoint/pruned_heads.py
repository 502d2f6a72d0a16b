"""Gives a model the attention that is left of it where heads were pruned: `pruned_heads` in config.json, layer -> heads.

    {"pruned_heads": {"0": [1, 3], "5": [0]}}

transformers 4 writes this, with matrices that lack the heads. transformers 5 reads such a checkpoint as one of wrong shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from bertserve.export.errors import CheckpointError

# by the names of BERT's, RoBERTa's and ELECTRA's modules, and of DistilBERT's; the last one of each reads the heads
_MODULE = re.compile(r"(?:^|\.)layer\.(\d+)\.attention\.(?:(?P<head>self\.(?:query|key|value)|[qkv]_lin)|output\.dense|out_lin)$")


@contextmanager
def prune_while_loading(source: str, config: Any) -> Iterator[None]:
    """Makes models that are made within the block lack the heads that their configuration says were pruned.

    What fits no module of a known name is left as it is; its weights are then of another shape, which is refused where they are loaded.

    Args:
        source: The checkpoint, for the message.
        config: Its configuration.

    Raises:
        CheckpointError: `pruned_heads` is not understood, or leaves a layer without a head.
    """
    kept = _kept_heads(source, config)
    if not kept:
        yield
        return
    post_init = PreTrainedModel.post_init

    def prune(model: PreTrainedModel) -> None:
        for name, module in list(model.named_modules()):
            found = _MODULE.search(name)
            if found is not None and isinstance(module, torch.nn.Linear) and int(found[1]) in kept:
                size = kept[int(found[1])] * (config.hidden_size // config.num_attention_heads)
                rows, columns = (size, module.in_features) if found["head"] else (module.out_features, size)
                model.set_submodule(name, torch.nn.Linear(columns, rows, bias=module.bias is not None))
        post_init(model)

    with mock.patch.object(PreTrainedModel, "post_init", prune):
        yield


def _kept_heads(source: str, config: Any) -> Mapping[int, int]:
    """Returns how many heads each pruned layer has left."""
    pruned = getattr(config, "pruned_heads", None) or {}
    try:
        kept = {int(layer): config.num_attention_heads - len(set(map(int, heads))) for layer, heads in pruned.items() if heads}
        known = all(0 <= int(head) < config.num_attention_heads for heads in pruned.values() for head in heads)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"`pruned_heads` of `{source}` is {pruned!r}, and not layer -> list of heads; mend config.json.") from error
    if not known or any(count < 1 for count in kept.values()):
        raise CheckpointError(
            f"`pruned_heads` of `{source}` is {pruned!r}, which leaves a layer without a head, or names one that is not there; of "
            f"{config.num_attention_heads} heads each layer must keep one."
        )
    return kept
