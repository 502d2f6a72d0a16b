"""`--layers` with a list, and `--combine`: graphs with transformers' `hidden_states` as outputs, and requests that combine them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers import BertConfig, RobertaPreLayerNormConfig

from bertserve.export import cli
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.manifest import Layers
from bundles import Served, exported
from checkpoints import POSITIONS, ROWS, SIZES, save

pytestmark = pytest.mark.torch

TEXTS = ["good", "the film was not very good", "", "the book is great ! " * 12]
DEPTH = 4
CONFIGS = {"BertModel": BertConfig, "RobertaPreLayerNormModel": RobertaPreLayerNormConfig}


def encoder(folder: Path, architecture: str = "BertModel") -> Path:
    sizes = SIZES | {"num_hidden_layers": DEPTH}
    return save(folder / "encoder", architecture, CONFIGS[architecture](vocab_size=ROWS, max_position_embeddings=POSITIONS, **sizes))


def answer(bundle: Bundle, **body: Any) -> NDArray[np.float32]:
    """Returns the vectors of all texts, which run as one padded batch."""
    return np.array(Served(bundle).answer({"inputs": TEXTS, **body}))


def expected(source: Path, layers: list[int], combine: str) -> NDArray[np.float32]:
    """Returns PyTorch's combined hidden states, averaged over the tokens."""
    model, tokenizer = transformers.AutoModel.from_pretrained(source).eval(), transformers.AutoTokenizer.from_pretrained(source)
    means = []
    for text in TEXTS:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        chosen = [states[layer][0] for layer in layers]
        one = torch.cat(chosen, dim=-1) if combine == "concat" else sum(chosen) / (len(chosen) if combine == "mean" else 1)
        means.append(one.mean(0).numpy())
    return np.array(means)


@pytest.mark.parametrize("architecture", ["BertModel", pytest.param("RobertaPreLayerNormModel", marks=pytest.mark.full_grid)])
def test_layers_match_pytorchs_hidden_states(tmp_path: Path, architecture: str) -> None:
    """Exported layers match within 1e-4 in any order and each combination, also for a pre-norm model."""
    source = encoder(tmp_path, architecture)
    bundle = exported(source, layers=(0, -4, -2))

    assert bundle.manifest.embedding is not None
    assert (0, 1, 3, 4) == bundle.manifest.embedding.layers
    assert ["last_hidden_state", "hidden_states_0_1_3_4"] == [spec.name for spec in bundle.manifest.graphs[0].outputs]
    assert bundle.manifest.graphs[0].validation.worst_abs_error < 1e-4
    for layers in ([0], [-2, 1], [4, -2, 0, -4]):
        for combine in ("concat", "sum", "mean"):
            found = answer(bundle, layers=layers, combine=combine, pooling="mean")
            np.testing.assert_allclose(expected(source, layers, combine), found, rtol=0, atol=1e-4)
    np.testing.assert_allclose(expected(source, [-1], "concat"), answer(bundle, pooling="mean"), rtol=0, atol=1e-4)
    with pytest.raises(Exception, match="0 or -5, 1 or -4, 3 or -2, 4 or -1"):
        answer(bundle, layers=[2])


@pytest.mark.parametrize(
    ("layers", "numbers"), [pytest.param((-3, -2), [-3, -2], marks=pytest.mark.full_grid), ("last_four", [-4, -3, -2, -1])]
)
def test_a_bundle_has_default_layers_that_requests_can_override(tmp_path: Path, layers: Layers, numbers: list[int]) -> None:
    """`--layers` and `--combine` of the export set the defaults for requests."""
    source = encoder(tmp_path)
    bundle = exported(source, layers=layers, combine="mean")
    np.testing.assert_allclose(expected(source, numbers, "mean"), answer(bundle, pooling="mean"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(expected(source, [-1], "mean"), answer(bundle, pooling="mean", layers="last"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(expected(source, numbers, "sum"), answer(bundle, pooling="mean", combine="sum"), rtol=0, atol=1e-4)
    assert bundle.manifest.embedding is not None
    default = ", ".join(map(str, bundle.manifest.embedding.default_layers or ()))
    assert f" {default} (mean)" in (bundle.path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--layers", "-6,-1"], "--layers has -6"), (["--layers", "1,5"], "layers 1 to 4, and 0"), (["--combine", "sum"], "--combine sum")],
)
def test_layers_that_a_model_does_not_have_are_refused(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1 == cli.main([str(encoder(tmp_path)), "--output", str(tmp_path / "models"), "--precision", "fp32", *arguments])
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "models").glob("*"))
