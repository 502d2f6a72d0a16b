"""Observations of the inputs of linear layers: bounds over all rows, and a sample of the rows."""

from pathlib import Path

import numpy as np
import pytest

from bertserve.export import inference
from bertserve.export.graph import rewrite
from bertserve.export.int8 import activations, gptq, graph_edits, scales, sensitivity
from bertserve.export.int8.activations import observe, observe_tensors
from bertserve.export.int8.gptq import LayerParams
from bertserve.export.int8_texts import BUILT_IN_TEXTS, read_texts
from support.staged import Staged, run

pytestmark = pytest.mark.torch

EMPTY = "\u200b"  # the tokenizer removes this character
TEXTS = ["a good film", "the book was very dull !", EMPTY, "long " * 300, "a bad film"]


def test_bounds_cover_all_rows(all_staged: dict[str, Staged], tmp_path: Path) -> None:
    staged, path = all_staged["text-classification"], tmp_path / "more.onnx"
    model = rewrite.load(staged.packed)
    names = [node.outputs[0].name or "" for node in model.graph if node.op_type in ("Gelu", "LayerNormalization")]
    rewrite.save(model, path, outputs=names)
    feeds = staged.feeds(TEXTS)
    observation = observe_tensors(path, names, feeds, tmp_path / "samples")
    runs = [run(path, feed)[1:] for feed in feeds]

    assert list(observation) == names
    for place, name in enumerate(names):
        rows = np.concatenate([values[place].reshape(-1, values[place].shape[-1]) for values in runs])
        np.testing.assert_allclose(rows.max(axis=0), observation[name].high, rtol=0, atol=1e-5)
        np.testing.assert_allclose(rows.min(axis=0), observation[name].low, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.abs(rows).max(axis=0), observation[name].peak, rtol=0, atol=1e-5)


def test_a_large_model_is_observed_on_fewer_texts(all_staged: dict[str, Staged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`MAX_FLOPS` limits the texts, but the widest matrix still gets the rows that GPTQ needs."""
    staged = all_staged["text-classification"]
    model = rewrite.load(staged.packed)
    layers, feeds = rewrite.linears_by_input(model.graph), staged.feeds([f"{TEXTS[1]} {i}" for i in range(400)])
    whole = observe(model, layers, tmp_path / "whole.onnx", feeds, tmp_path / "whole")
    monkeypatch.setattr(activations, "MAX_FLOPS", 1.0)
    part = observe(model, layers, tmp_path / "part.onnx", feeds, tmp_path / "part")
    name = max(whole, key=lambda x: whole[x].width)

    assert 2 * part[name].width < len(part[name].rows()) < len(whole[name].rows())


def test_a_batch_has_texts_of_one_length(staged: Staged) -> None:
    feeds = staged.feeds([*TEXTS, *(f"{TEXTS[0]} {digit} {sign}" for digit in range(10) for sign in "!?")])
    batches = inference.batch_by_length(feeds)
    sizes = [(len(batch["input_ids"]), inference.token_count(batch)) for batch in batches]
    alone = {feed["input_ids"].tobytes(): run(staged.packed, feed) for feed in feeds}

    assert sizes == sorted(sizes, key=lambda size: -size[1])
    assert sum(count for count, _ in sizes) == len(feeds)
    assert inference.BATCH_TEXTS == max(count for count, _ in sizes) > min(count for count, _ in sizes)
    for batch in batches:
        expected = [alone[row.tobytes()] for row in batch["input_ids"]]
        for place, together in enumerate(run(staged.packed, batch)):
            np.testing.assert_allclose(np.concatenate([outputs[place] for outputs in expected]), together, rtol=0, atol=1e-5)


def quantized(staged: Staged, folder: Path) -> dict[str, LayerParams]:
    """Returns the quantization of a graph's layers by input tensor; writes the observed graph to the folder."""
    model = rewrite.load(staged.packed)
    layers = rewrite.linears_by_input(model.graph)
    observation = observe(model, layers, folder / "observed.onnx", staged.feeds(read_texts(BUILT_IN_TEXTS)[:20]), folder / "samples")
    params = {}
    for x, layer in layers.items():
        weight, bias = layer.arrays()
        input_params = scales.choose_activation_params(weight, observation[x], smooth=True)
        params[x] = gptq.quantize_weight(weight, bias, observation[x], input_params, use_gptq=False)
    return params


@pytest.mark.parametrize("task", ["text-classification", "fill-mask"])
def test_a_measured_effect_equals_the_effect_of_one_int8_layer(all_staged: dict[str, Staged], task: str, tmp_path: Path) -> None:
    staged = all_staged[task]
    # few texts, so that all of them are measured
    texts = [feed for feed in staged.feeds(read_texts(BUILT_IN_TEXTS)[:30]) if inference.token_count(feed) >= 16][: sensitivity.FIRST_TEXTS]
    params = quantized(staged, tmp_path)
    sensitivities = sensitivity.measure_sensitivity(rewrite.load(staged.packed), params, tmp_path / "shifted.onnx", texts, limits=[1.0])
    expected = inference.compute_outputs(staged.packed, texts)
    alone = {}
    for x, quant in params.items():
        model = rewrite.load(staged.packed)
        graph_edits.emit_linears(model.graph, {x: quant})
        rewrite.save(model, tmp_path / "one.onnx")
        alone[x] = inference.rms_error(expected, inference.compute_outputs(tmp_path / "one.onnx", texts)) ** 2
    average = np.mean(list(alone.values()))

    assert sensitivities == {x: pytest.approx(error / average, rel=0.05) for x, error in alone.items()}
