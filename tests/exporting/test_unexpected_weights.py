"""Weights that a model has no place for: which are harmless, and which mean that it would answer as another model."""

from __future__ import annotations

import pytest

from export.checkpoint.unexpected_weights import refuse_unexpected_weights
from export.errors import CheckpointError

EXPECTED = ["enc.layer.0.dense.weight", "enc.layer.1.dense.weight", "enc.pooler.dense.weight", "cls.predictions.bias", "classifier.weight"]
MODULES = {
    "",
    "enc",
    "enc.layer",
    "enc.layer.0",
    "enc.layer.0.dense",
    "enc.layer.1",
    "enc.layer.1.dense",
    "enc.pooler",
    "enc.pooler.dense",
} | {
    "cls",
    "cls.predictions",
    "classifier",
}


def refuse(*names: str, modules: set[str] = MODULES) -> None:
    """Judges unexpected weights of a model with the encoder `enc`."""
    refuse_unexpected_weights("ckpt", names, expected=EXPECTED, modules=modules, encoder="enc")


@pytest.mark.parametrize(
    "name",
    [
        "cls.seq_relationship.weight",  # another head within a module of heads, as in BERT's pretraining
        "lm_head.dense.weight",
        "discriminator_predictions.dense_prediction.bias",
        "enc.embeddings.position_ids",
    ],
)
def test_other_heads_and_position_ids_are_harmless(name: str) -> None:
    """They do not take part in this head's answers."""
    refuse(name)


def test_a_pooler_that_the_model_does_not_have_is_harmless() -> None:
    """A head over tokens needs none; where there is one, a weight of it that is not known is not."""
    refuse("enc.pooler.dense.bias", modules=MODULES - {"enc.pooler", "enc.pooler.dense"})
    with pytest.raises(CheckpointError, match=r"`enc\.pooler\.dense\.scale`"):
        refuse("enc.pooler.dense.scale")


@pytest.mark.parametrize("name", ["enc.layer.2.dense.weight", "enc.layer.11.dense.weight"])
def test_more_layers_are_refused(name: str) -> None:
    """The message has a weight of them and the field to set."""
    with pytest.raises(
        CheckpointError, match=rf"`ckpt` has weights of more layers.*1 would not be used, among them `{name}`.*num_hidden_layers"
    ):
        refuse(name, "lm_head.dense.weight")


@pytest.mark.parametrize("name", ["enc.layer.0.adapter.down.weight", "enc.layer.0.dense.lora_A", "classifier.scale", "enc.extra.weight"])
def test_parts_that_the_architecture_does_not_know_are_refused(name: str) -> None:
    """Within the encoder, or in a module that the model has."""
    with pytest.raises(CheckpointError, match=rf"1 weights that its architecture has no place for, among them `{name}`"):
        refuse(name)


def test_no_unexpected_weights_are_fine() -> None:
    """The usual case."""
    refuse()
