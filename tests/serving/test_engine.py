"""OnnxEngine on a real tiny graph: padding, rows and errors; and the cost model that is fitted to its warm-up runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from bertserve.service.bundle import files
from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.bundle.manifest import Flops, Manifest
from bertserve.service.engine.cost import CostModel
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import EngineError, ProviderError
from bertserve.service.text.tokenizer import Encoding


def engine(path: Path, **changes: Any) -> OnnxEngine:
    loaded = files.load_bundle(path)
    graph = loaded.manifest.graphs[0].model_copy(update=changes.pop("graph", {}))
    return OnnxEngine(path / graph.file, graph, **{"pad_id": 0, "padding_side": "right"} | changes)


def encoding(*ids: int) -> Encoding:
    """Returns an encoding of these ids, all in the first segment."""
    return Encoding(np.array(ids, dtype=np.int64), np.zeros(len(ids), dtype=np.int64))


def test_rows_that_are_not_finite_are_an_error(models: Path) -> None:
    path = models / "tiny"
    file = path / "model.cpu.fp32.onnx"
    model = onnx.load(str(file))
    words = next(tensor for tensor in model.graph.initializer if tensor.name == "words")
    values = onnx.numpy_helper.to_array(words).copy()
    values[9] = np.inf
    words.CopyFrom(onnx.numpy_helper.from_array(values, "words"))
    made = engine(path)
    onnx.save(model, str(file))
    made = OnnxEngine(file, Manifest.model_validate_json((path / "manifest.json").read_text()).graphs[0], pad_id=0, padding_side="right")

    assert np.isfinite(made.run([encoding(2, 8, 3)])[0]["logits"]).all()
    with pytest.raises(EngineError, match="`logits` is not finite"):
        made.run([encoding(2, 9, 3)])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[E] Non-zero status code: std::bad_alloc"),
        RuntimeError("BFCArena: Failed to allocate memory for 4096 bytes"),
    ],
)
def test_an_out_of_memory_error_names_the_size_of_the_batch(models: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """ONNX Runtime reports a lack of memory in several ways."""

    def run(*_: object) -> None:
        raise error

    made = engine(models / "tiny")
    monkeypatch.setattr(made, "_session", SimpleNamespace(run=run))

    with pytest.raises(EngineError, match="2 x 3 tokens"):
        made.run([encoding(2, 8, 3), encoding(2, 3)])


def test_a_wrong_number_of_rows_is_an_error(models: Path) -> None:
    file = models / "tiny" / "model.cpu.fp32.onnx"
    model = onnx.load(str(file))
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["logits"], ["pooled"], axes=[0], keepdims=1))
    model.graph.output.append(onnx.helper.make_tensor_value_info("pooled", onnx.TensorProto.FLOAT, [1, 3]))
    graph = files.load_bundle(models / "tiny").manifest.graphs[0]
    onnx.save(model, str(file))
    wrong = graph.model_copy(update={"outputs": (OutputSpec(name="pooled", kind="per_text"),)})

    with pytest.raises(EngineError, match="`pooled` has 1 rows"):
        OnnxEngine(file, wrong, pad_id=0, padding_side="right").run([encoding(2, 3), encoding(2, 3)])


def test_a_missing_provider_is_named(models: Path) -> None:
    with pytest.raises(ProviderError, match=r"needs CUDAExecutionProvider.*CPUExecutionProvider"):
        engine(models / "tiny", graph={"provider": "cuda"})


def test_a_file_that_is_not_a_graph_is_named(tmp_path: Path) -> None:
    graph = files.load_bundle(tiny.bundle(tmp_path)).manifest.graphs[0]
    (tmp_path / "broken.onnx").write_bytes(b"nonsense")

    with pytest.raises(ProviderError, match=r"cannot load .*broken\.onnx"):
        OnnxEngine(tmp_path / "broken.onnx", graph, pad_id=0, padding_side="right")


@pytest.mark.parametrize("task", ["text-classification", "fill-mask"])
def test_a_warm_up_run_of_one_token_can_be_timed(tmp_path: Path, task: str) -> None:
    """Every graph accepts such a run, also a graph that gathers the positions of masks."""
    loaded = files.load_bundle(tiny.bundle(tmp_path, task=task))
    subject = OnnxEngine(loaded.path / loaded.manifest.graphs[0].file, loaded.manifest.graphs[0], pad_id=0, padding_side="right")

    assert [(1, 1)] == [(rows, length) for rows, length, _ in subject.time_runs([(1, 1)], repeats=1)]


@given(st.floats(1e-6, 1e-1), st.floats(1e6, 1e13))
def test_the_fit_finds_the_fixed_cost_and_the_rate(fixed_s: float, rate: float) -> None:
    flops = Flops(linear=2e7, quadratic=9e3)
    true = CostModel(flops, fixed_s=fixed_s, rate=rate)
    fitted = CostModel(flops)
    fitted.fit([(rows, length, true.seconds(rows, length)) for rows, length in ((1, 8), (1, 32), (1, 128))])

    for rows, length in ((1, 8), (1, 512), (32, 128)):
        assert pytest.approx(true.seconds(rows, length), rel=1e-3) == fitted.seconds(rows, length)


@pytest.mark.parametrize("seconds", [(3e-3, 2e-3, 1e-3), (1e-3, 1e-3, 1e-3), (1e-9, 1e-3, 1.0)])
def test_noisy_timings_give_a_plausible_cost(seconds: tuple[float, ...]) -> None:
    """The cost is positive, and a longer run never costs less."""
    cost = CostModel(Flops(linear=2e7, quadratic=9e3))
    cost.fit(zip((1, 1, 1), (8, 32, 128), seconds, strict=True))

    assert cost.fixed_s >= 0
    assert 0 < cost.seconds(1, 8) <= cost.seconds(1, 128) <= cost.seconds(2, 128)
