"""The effect of each layer's quantization on the outputs: the measurement without a graph equals that of graphs with one int8 layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertserve.export import inference
from bertserve.export.calibration import BUILT_IN, read_texts
from bertserve.export.graph import rewrite
from bertserve.export.int8 import graph_edits, sensitivity, smoothquant
from bertserve.export.int8.activations import observe
from bertserve.export.int8.smoothquant import QuantParams
from staged import Staged

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)


def quantized(staged: Staged, folder: Path) -> dict[str, QuantParams]:
    """Returns the quantization of a graph's layers by input tensor; writes the observed graph to the folder."""
    model = rewrite.load(staged.packed)
    layers = rewrite.find_linears(model.graph)
    seen = observe(model, layers, folder / "observed.onnx", staged.feeds(read_texts(BUILT_IN)[:20]), folder / "samples")
    params = {}
    for x, layer in layers.items():
        weight, bias = layer.arrays()
        scale = smoothquant.choose_scale(weight, seen[x], smooth=True)
        params[x] = smoothquant.quantize_weight(weight, bias, seen[x], scale, use_gptq=False)
    return params


@pytest.mark.parametrize("task", ["text-classification", "fill-mask"])
def test_a_measured_effect_equals_the_effect_of_one_int8_layer(
    all_staged: dict[str, Staged], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = all_staged[task]
    texts = staged.feeds(read_texts(BUILT_IN)[:20])
    monkeypatch.setattr(sensitivity, "FAR", 1e9)  # all layers are measured on all texts
    monkeypatch.setattr(sensitivity, "_short", lambda feeds, tokens: list(texts))
    params = quantized(staged, tmp_path)
    found = sensitivity.measure(rewrite.load(staged.packed), params, tmp_path / "shifted.onnx", texts, limits=[1.0])
    parts = [(part, inference.outputs(staged.packed, part)) for part in (texts[: sensitivity.FEW], texts[sensitivity.FEW :])]
    alone = {}
    for x, quant in params.items():
        model = rewrite.load(staged.packed)
        graph_edits.emit_linears(model.graph, {x: quant})
        rewrite.save(model, tmp_path / "one.onnx")
        errors = [inference.relative_error(expected, inference.outputs(tmp_path / "one.onnx", part)) ** 2 for part, expected in parts]
        alone[x] = float(np.average(errors, weights=[len(part) for part, _ in parts]))

    assert pytest.approx(1) == float(np.mean(list(found.values())))
    assert alone.keys() == found.keys()
    np.testing.assert_allclose(np.array(list(alone.values())) / np.mean(list(alone.values())), list(found.values()), rtol=0.05)


def test_a_layer_far_from_all_limits_is_measured_on_few_texts(
    all_staged: dict[str, Staged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = all_staged["text-classification"]
    params, rounds = quantized(staged, tmp_path), []
    measured = sensitivity._measure
    monkeypatch.setattr(sensitivity, "_measure", lambda graph, params, texts: rounds.append(list(params)) or measured(graph, params, texts))
    found = sensitivity.measure(
        rewrite.load(staged.packed), params, tmp_path / "shifted.onnx", staged.feeds(read_texts(BUILT_IN)[:40]), limits=[1.0]
    )

    assert list(params) == rounds[0] == list(found)
    assert 0 < len(rounds[1]) < len(rounds[0])


def test_a_few_short_texts_are_measured(all_staged: dict[str, Staged]) -> None:
    """Texts have at least `MIN_TOKENS` tokens, within a limit of tokens and texts; if no text has enough, the longest are measured."""
    staged = all_staged["token-classification"]
    feeds = staged.feeds([f"{'good ' * n}" for _ in range(8) for n in (5, *range(30, 9, -1))])
    for tokens, count in ((1e9, sensitivity.MOST), (20 * sensitivity.MIN_TOKENS, 20), (0, sensitivity.LEAST)):
        chosen = sorted(inference.tokens(feed) for feed in sensitivity._short(feeds, tokens))
        expected = sorted([*range(sensitivity.MIN_TOKENS, 33)] * 8)
        assert expected[:count] == chosen
    few = [inference.tokens(feed) for feed in sensitivity._short(staged.feeds(["good", "good good"]), 1e9)]

    assert [3, 4] == sorted(few)


def test_single_texts_and_pairs_are_measured(all_staged: dict[str, Staged]) -> None:
    staged = all_staged["text-classification"]
    chosen = sensitivity._short(staged.feeds(read_texts(BUILT_IN)[:100]), 0)
    pairs = sum(bool(feed["token_type_ids"].any()) for feed in chosen)

    assert sensitivity.LEAST == len(chosen)
    assert sensitivity.LEAST / 4 < pairs < 3 * sensitivity.LEAST / 4
