"""Weights that a model does not use: they are accepted if they are harmless, and refused if they would change the answers."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.checkpoint.weights import refuse_unexpected_weights
from bertserve.export.errors import ExportError
from support import raises_exactly
from support.checkpoints import bert, edit_weights

pytestmark = pytest.mark.torch


@functools.cache
def model(architecture: str) -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 16}
    created: transformers.PreTrainedModel = getattr(transformers, architecture)(transformers.BertConfig(**sizes))
    return created


def refuse(*names: str, architecture: str = "BertForSequenceClassification", ignored: tuple[str, ...] = ()) -> None:
    refuse_unexpected_weights("ckpt", names, model(architecture), ignored)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("BertForSequenceClassification", "cls.seq_relationship.weight"),
        ("BertForSequenceClassification", "fit_dense.weight"),  # a weight of TinyBERT's distillation
        ("BertForTokenClassification", "bert.pooler.dense.weight"),
        ("BertModel", "classifier.weight"),
        ("BertModel", "embeddings.position_ids"),
    ],
)
def test_weights_of_other_heads_and_position_ids_are_accepted(architecture: str, name: str) -> None:
    refuse(name, architecture=architecture)
    refuse(architecture=architecture)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("BertForSequenceClassification", "bert.encoder.layer.0.adapter.down.weight"),
        ("BertForSequenceClassification", "classifier.scale"),
        ("BertForSequenceClassification", "lstm.weight_ih_l0"),
        ("BertForTokenClassification", "crf.transitions"),
        ("BertModel", "encoder.layer.0.attention.self.distance_embedding.weight"),
    ],
)
def test_weights_of_unknown_parts_are_refused(architecture: str, name: str) -> None:
    """The parts are inside or outside the encoder, or in a module of the model. The user's option accepts them."""
    with raises_exactly(ExportError, match=rf" 1 weight .*`{name}`"):
        refuse(name, architecture=architecture)
    refuse(name, architecture=architecture, ignored=("unrelated.*", name))


DISTANCES = tuple(f"encoder.layer.{layer}.attention.self.distance_embedding.weight" for layer in range(2))


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (DISTANCES, ["encoder.layer.*.attention.self.distance_embedding.weight"]),
        (["crf.transitions", "bert.pooler.dense.scale"], ["bert.pooler.dense.scale", "crf.transitions"]),
    ],
)
def test_the_proposed_patterns_name_the_weights_of_all_layers(names: Sequence[str], patterns: list[str]) -> None:
    with raises_exactly(ExportError) as caught:
        refuse(*names)
    assert re.findall(r"--ignore-weights '([^']+)'", str(caught.value)) == patterns
    refuse(*names, ignored=tuple(patterns))


def test_a_user_can_ignore_weights(tmp_path: Path) -> None:
    """A pattern selects them. The manifest records it, so that `verify` loads the checkpoint in the same way."""
    source = bert(tmp_path)
    edit_weights(source, lambda tensors: tensors.update({"crf.transitions": torch.zeros(3, 3)}))
    assert load_checkpoint(str(source), LoadOptions(ignored_weights=["crf.*"])).origin.ignored_weights == ("crf.*",)
    with raises_exactly(ExportError, match=r"`crf\.transitions`.*--ignore-weights"):
        load_checkpoint(str(source), LoadOptions(ignored_weights=["lstm.*"]))
