"""Special cases of model families, and models that are refused with a message that names the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import transformers

from bertserve.export.checkpoint import load
from bertserve.export.checkpoint.load import load_checkpoint
from bundles import refused
from checkpoints import edit_json
from families import FAMILIES, LENGTH, SIZES, bert_tokenizer, roberta_tokenizer, save_random
from grid import save_bundle

pytestmark = pytest.mark.torch


def saved(path: Path, architecture: Any, config: Any, tokenizer: Any) -> Path:
    save_random(path, architecture, config)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("architecture", "config", "task"),
    [
        ("GPT2LMHeadModel", transformers.GPT2Config(vocab_size=2000, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH), "fill-mask"),
        ("ViTForImageClassification", transformers.ViTConfig(image_size=16, patch_size=8, **SIZES), "text-classification"),
    ],
)
def test_a_model_without_a_supported_task_is_refused(tmp_path: Path, architecture: str, config: Any, task: str) -> None:
    """A generative language model and an image model are refused, even with the flag of another task."""
    tokenizer = roberta_tokenizer() if task == "fill-mask" else bert_tokenizer()
    source = saved(tmp_path / "other", getattr(transformers, architecture), config, tokenizer)

    assert f"['{architecture}']; give --task" in refused(source)
    assert f" {task} on a {type(config).__name__} " in refused(source, task=task)


def test_a_model_with_another_required_input_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A forward method with another required argument cannot be called with a tokenizer's outputs."""
    source = FAMILIES["BERT"].save(tmp_path / "boxes", "text-classification")
    forward = transformers.BertForSequenceClassification.forward

    def needy(self: Any, bbox: Any, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        return forward(self, input_ids, attention_mask, **options)

    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", needy)

    assert "'bbox'" in refused(source)


def test_another_head_for_the_same_task_is_refused(tmp_path: Path) -> None:
    family, tokenizer = FAMILIES["XLNet"], FAMILIES["XLNet"].tokenizer()
    config = family.config(vocab_size=len(tokenizer), d_model=32, n_layer=2, n_head=4, d_inner=64)
    source = saved(tmp_path / "beam", transformers.XLNetForQuestionAnswering, config, tokenizer)

    assert "['XLNetForQuestionAnswering'] is not XLNetForQuestionAnsweringSimple" in refused(source)


FUNNEL = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1, 1]}


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        # hashes characters, so it has no embedding to compare with a vocabulary
        ("Canine", SIZES, "no embedding"),
        # mixes tokens with a Fourier transform, which TorchScript cannot export
        ("FNet", {"vocab_size": 2000, **SIZES}, " torchscript: UnsupportedOperatorError: "),
        # cannot read a text of two tokens: the first run, which chooses the padding, fails with the cause
        pytest.param("Funnel", {"vocab_size": 2000, **FUNNEL}, "[1, 4, 2, 1]", marks=pytest.mark.full_grid),
    ],
)
def test_a_model_that_cannot_be_run_or_traced_is_refused(tmp_path: Path, model: str, fields: dict[str, Any], reason: str) -> None:
    architecture = f"{model}ForSequenceClassification"
    config = getattr(transformers, f"{model}Config")(**fields)
    message = refused(saved(tmp_path / "other", getattr(transformers, architecture), config, bert_tokenizer()))

    assert architecture in message
    assert reason in message


def test_an_embedding_model_without_a_hidden_size_is_refused(tmp_path: Path) -> None:
    """CLIP contains two models, each with its own hidden size."""
    config = transformers.CLIPConfig(text_config={"vocab_size": 2000, **SIZES}, vision_config={**SIZES, "image_size": 8, "patch_size": 4})
    transformers.CLIPModel(config).save_pretrained(tmp_path / "clip")
    bert_tokenizer().save_pretrained(tmp_path / "clip")

    assert "no `hidden_size`" in refused(tmp_path / "clip", task="feature-extraction")


def test_padding_is_on_the_side_that_the_model_supports(tmp_path: Path) -> None:
    """Absolute positions count padding on the left, whatever the tokenizer says. XLNet needs a token at the last position."""
    source = FAMILIES["BERT"].save(tmp_path / "left", "text-classification")
    edit_json(source / "tokenizer_config.json", padding_side="left")
    other = FAMILIES["XLNet"].save(tmp_path / "right", "text-classification")
    edit_json(other / "tokenizer_config.json", padding_side="right")

    assert "right" == load_checkpoint(str(source)).tokenizer_spec.padding_side
    assert "left" == load_checkpoint(str(other)).tokenizer_spec.padding_side


def test_a_tokenizer_without_a_limit_gets_the_default_length(tmp_path: Path) -> None:
    """Relative positions have no maximum, and 10^30 tokens are not a usable length."""
    source = FAMILIES["XLNet"].save(tmp_path / "endless", "text-classification")
    edit_json(source / "tokenizer_config.json", model_max_length=int(1e30))

    assert load.DEFAULT_LENGTH == load_checkpoint(str(source)).tokenizer_spec.max_length


@pytest.mark.full_grid
def test_shared_weights_of_layers_are_stored_once(tmp_path: Path) -> None:
    """Twice as many layers add nodes to a graph but no weights, in float and in int8."""
    sizes = []
    for layers in (1, 2):
        _, bundle = save_bundle("ALBERT", "token-classification", tmp_path / str(layers), num_hidden_layers=layers)
        models = [onnx.load(str(bundle.path / graph.file)) for graph in bundle.manifest.graphs]
        sizes.append([sum(len(tensor.raw_data) for tensor in model.graph.initializer if len(tensor.dims) == 2) for model in models])

    assert sizes[0] == sizes[1]
    assert min(sizes[0]) > 0
