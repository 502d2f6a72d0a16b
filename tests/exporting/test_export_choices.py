"""Exports of multiple-choice models: each choice of a question becomes a separate row of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bertserve.export.checkpoint.load import load_checkpoint
from checkpoints import bert

pytestmark = pytest.mark.torch


@pytest.fixture(name="source", scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("checkpoint"), "swag", architecture="BertForMultipleChoice")


def test_a_loaded_multiple_choice_model_takes_rows(source: Path) -> None:
    """Its inputs are [rows, length] in repeated calls, and it has as many operations as a classifier."""
    loaded = load_checkpoint(str(source))
    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        first, second = (loaded.model(**inputs).logits for _ in range(2))

    assert (2, 1) == first.shape
    assert torch.equal(first, second)
    classifier = load_checkpoint(str(bert(source.parent, "classifier", labels=("a",))))
    assert loaded.flops == classifier.flops
