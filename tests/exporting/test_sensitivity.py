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
    monkeypatch.setattr(sensitivity, "LIMIT_FACTOR", 1e9)  # all layers are measured on all texts
    monkeypatch.setattr(sensitivity, "choose_texts", lambda feeds, tokens: list(texts))
    params = quantized(staged, tmp_path)
    found = sensitivity.measure(rewrite.load(staged.packed), params, tmp_path / "shifted.onnx", texts, limits=[1.0])
    parts = [
        (part, inference.outputs(staged.packed, part)) for part in (texts[: sensitivity.FIRST_TEXTS], texts[sensitivity.FIRST_TEXTS :])
    ]
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
