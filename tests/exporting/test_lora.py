"""LoRA adapters that peft saved are merged at export: the bundle answers like the base model with its adapter."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from bertserve.export import cli
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.errors import ExportError
from support import raises_exactly, tiny
from support.bundles import exported
from support.checkpoints import edit_json, save_adapter
from support.families import FAMILIES
from support.grid import logit_error

pytestmark = pytest.mark.torch

RANK, ALPHA = 4, 6
LAYERS = [f"bert.encoder.layer.{i}.attention.self.{part}" for i in (0, 1) for part in ("query", "value")]
LABELS = 4


def adapter(folder: Path, *, base_task: str = "fill-mask", **config: Any) -> Path:
    """Writes a base model and an adapter that makes it a classifier of four labels; returns the adapter's folder."""
    base = FAMILIES["BERT"].save(folder / "base", base_task)
    path = folder / "adapter"
    path.mkdir(parents=True)
    shapes = {f"{name}.lora_{part}.weight": shape for part, shape in (("A", (RANK, 32)), ("B", (32, RANK))) for name in LAYERS}
    shapes |= {"bert.pooler.dense.weight": (32, 32), "bert.pooler.dense.bias": (32,)}
    shapes |= {"classifier.weight": (LABELS, 32), "classifier.bias": (LABELS,)}
    rng = torch.Generator().manual_seed(1)
    scales = {name: 0.3 if "lora" in name else 1 for name in shapes}
    tensors = {f"base_model.model.{name}": scales[name] * torch.randn(*shape, generator=rng) for name, shape in shapes.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": str(base)}
    (path / "adapter_config.json").write_text(json.dumps(fields | config), encoding="utf-8")
    return path


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # raised in peft's own model class
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"use_rslora": True, "init_lora_weights": "orthogonal"}, marks=pytest.mark.full_grid),
        {"use_dora": True, "bias": "all"},
        pytest.param({"rank_pattern": {"query": 2}, "bias": "lora_only"}, marks=pytest.mark.full_grid),
    ],
)
def test_weights_equal_the_weights_that_peft_merges(tmp_path: Path, settings: dict[str, Any]) -> None:
    path, source = FAMILIES["BERT"].save(tmp_path / "base", "fill-mask"), tmp_path / "adapter"
    base, trained = (transformers.BertForSequenceClassification.from_pretrained(path, num_labels=LABELS) for _ in range(2))
    modules: dict[str, Any] = {"target_modules": ["query", "value"], "modules_to_save": ["pooler", "classifier"]}
    save_adapter(trained, source, task_type="SEQ_CLS", r=RANK, lora_alpha=ALPHA, **modules, **settings)
    plain = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = PeftModel.from_pretrained(base, source).merge_and_unload().eval()
    expected = model.state_dict()
    actual = load_checkpoint(str(source)).model.state_dict()

    assert actual.keys() == expected.keys()
    assert max(float((expected[name] - actual[name]).abs().max()) for name in expected) == 0.0
    assert [name for name in LAYERS if (expected[f"{name}.weight"] - plain[f"{name}.weight"]).abs().max() > 0.1] == LAYERS
    assert logit_error(exported(source), lambda ids: model(ids).logits) <= 1e-4


def test_an_adapters_own_tokenizer_is_used(tmp_path: Path) -> None:
    source = adapter(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base", model_max_length=50)
    tokenizer.save_pretrained(source)

    assert load_checkpoint(str(source)).tokenizer.max_length == 50


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "`bert.encoder.layer.0.attention.self.query`"),
        ({"alpha_pattern": {"query": 2}}, "`alpha_pattern` = {'query': 2}"),
        ({"use_rslora": "yes"}, "`use_rslora` = 'yes'"),
        ({"a_setting_of_next_year": "x" * 999}, f"`a_setting_of_next_year` = '{'x' * 79}"),
        ({"lora_alpha": None}, "`lora_alpha` = None"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights` = 'pissa'"),
        ({"base_model_name_or_path": None}, "`base_model_name_or_path`"),
        ({"base_model_name_or_path": "./nowhere"}, "`./nowhere`"),
    ],
)
def test_an_unsupported_configuration_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with raises_exactly(ExportError, match=re.escape(message)):
        load_checkpoint(str(adapter(tmp_path, **config)))


def test_settings_without_an_effect_are_accepted(tmp_path: Path) -> None:
    plain = load_checkpoint(str(adapter(tmp_path / "plain"))).model.state_dict()
    settings = {
        "eva_config": {"rho": 2.0},
        "init_lora_weights": "eva",
        "layers_to_transform": [0, 1],
        "lora_dropout": 0.1,
        "target_modules": ["query"],
    }
    later = {"a_config_of_next_year": None, "use_it": False, "its_layers": [], "its_pattern": {}, "its_name": ""}
    actual = load_checkpoint(str(adapter(tmp_path / "other", **settings, **later))).model.state_dict()

    assert actual.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(plain[name], actual[name])] == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # raised in peft's own model class
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")  # peft warns about the shared matrix, which is refused
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ["word_embeddings"]}, "only `bert.embeddings.word_embeddings.weight`"),
        ({"target_modules": ["query", "decoder"]}, "only `cls.predictions.decoder.weight`"),
        ({"bias": "all", "modules_to_save": ["transform"]}, None),
    ],
)
def test_a_change_of_a_shared_matrix_in_one_of_two_places_is_refused(tmp_path: Path, settings: dict[str, Any], message: str | None) -> None:
    """Peft trains a copy of the matrix for one module, but a merge would change both modules. A shared bias is trained as one tensor."""
    base = transformers.BertForMaskedLM.from_pretrained(FAMILIES["BERT"].save(tmp_path / "base", "fill-mask"))
    adapted = save_adapter(base, tmp_path / "adapter", **{"r": RANK, "target_modules": ["query"], **settings})
    if message is not None:
        with raises_exactly(ExportError, match=re.escape(message)):
            load_checkpoint(str(tmp_path / "adapter"))
        return
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    with torch.no_grad():
        expected, actual = adapted(ids).logits, load_checkpoint(str(tmp_path / "adapter")).model(ids).logits
    np.testing.assert_allclose(expected.numpy(), actual.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("bert.embeddings.word_embeddings.lora_embedding_A", torch.zeros(4, 32), "tensor `.*lora_embedding_A`"),
        ("bert.encoder.layer.0.attention.self.query.lora_magnitude_vector", torch.zeros(32), "tensor `.*lora_magnitude_vector`"),
        ("bert.encoder.layer.9.output.dense.lora_A.weight", torch.zeros(4, 32), "`lora_B.weight` of `bert.encoder.layer.9.output.dense`"),
        ("bert.encoder.layer.0.attention.self.query.lora_A.weight", torch.zeros(4, 31), r"\[4, 31\].*\[4, 32\]"),
        ("bert.nothing.weight", torch.zeros(4), "BertForSequenceClassification"),
    ],
)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    source = adapter(tmp_path)
    save_file(load_file(source / "adapter_model.safetensors") | {f"base_model.model.{name}": tensor}, source / "adapter_model.safetensors")

    with raises_exactly(ExportError, match=message):
        load_checkpoint(str(source))


def test_the_version_of_the_base_model_does_not_decide_about_the_token_types_of_an_adapter(tmp_path: Path) -> None:
    source = adapter(tmp_path)
    edit_json(tmp_path / "base" / "config.json", transformers_version="4.57.3")
    edit_json(tmp_path / "base" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")

    with raises_exactly(ExportError, match="--token-types template"):
        load_checkpoint(str(source))
    assert load_checkpoint(str(source), LoadOptions(token_types="template")).origin.token_types == "template"


def test_an_adapter_on_an_adapter_is_refused(tmp_path: Path) -> None:
    """Transformers loads an adapter in the base model's folder, but only if peft is installed."""
    source = adapter(tmp_path)
    (tmp_path / "base" / "adapter_config.json").write_text((source / "adapter_config.json").read_text())

    with raises_exactly(ExportError, match=r"`adapter` .*base`, .* peft "):
        load_checkpoint(str(source))


@pytest.mark.parametrize("verify", [False, True])
def test_a_missing_peft_is_named_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verify: bool
) -> None:
    source = adapter(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    bundle = tiny.bundle(tmp_path / "models")
    command = ["verify", str(bundle), "--checkpoint", str(source)] if verify else [str(source), "--output", str(tmp_path / "models")]

    assert cli.main(command) == 3
    [message] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bert-export: ")]
    assert all(fact in message for fact in ("`adapter`", "[lora]'"))


def test_an_adapter_can_be_a_pickle(tmp_path: Path) -> None:
    """Versions of peft before 0.7 saved only this file. Other objects are refused, and a missing file is named."""
    source = adapter(tmp_path)
    expected, tensors = load_checkpoint(str(source)).model.state_dict(), load_file(source / "adapter_model.safetensors")
    (source / "adapter_model.safetensors").unlink()
    with raises_exactly(ExportError, match=r"adapter_model\.safetensors"):
        load_checkpoint(str(source))
    torch.save(tensors, source / "adapter_model.bin")
    checkpoint = load_checkpoint(str(source))
    merged = checkpoint.model.state_dict()
    assert checkpoint.origin.weights_format == "pickle"
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, merged[name])] == []

    torch.save(tensors | {"path": Path("x")}, source / "adapter_model.bin")
    with raises_exactly(ExportError, match=r"pathlib"):
        load_checkpoint(str(source))


def test_an_adapter_without_a_task_uses_the_base_models_head(tmp_path: Path) -> None:
    source = adapter(tmp_path, base_task="text-classification", task_type=None)
    save_file(
        {name: value for name, value in load_file(source / "adapter_model.safetensors").items() if "lora" in name},
        source / "adapter_model.safetensors",
    )
    edit_json(source / "adapter_config.json", lora_alpha=0)
    alone, with_adapter = load_checkpoint(str(tmp_path / "base")), load_checkpoint(str(source))

    assert with_adapter.labels == alone.labels
    assert alone.origin.weights_sha256 != with_adapter.origin.weights_sha256
