"""The int8 graph: close to float even with huge channels, the same for a row in any batch, and the same on every CPU."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bertserve.export import inference, int8_texts
from bertserve.export.errors import ExportError
from bertserve.export.graph import rewrite
from bertserve.export.int8.graph_edits import MIN_TABLE_ROWS, emit_embeddings
from bertserve.export.int8.quantize import quantize
from bertserve.export.int8.scales import MAX_INT8, MAX_INT16
from support import raises_exactly
from support.checkpoints import bert, edit_weights
from support.staged import ARCHITECTURES, Staged, checkpoint_of, graph_of, run, stage

pytestmark = pytest.mark.torch

CHANNEL, UNIT = 5, 7
# about three times the error measured on texts outside the calibration (onnxruntime 1.31)
MAX_ERROR = {"text-classification": 0.15, "token-classification": 0.06, "question-answering": 0.15, "fill-mask": 0.09}
SAMPLE = {"text-classification", "token-classification"}
TEXTS = int8_texts.read_texts(int8_texts.BUILT_IN_TEXTS)
SEEN, UNSEEN = TEXTS[:40], TEXTS[40:80]

Array = NDArray[Any]


def plant_outliers(tensors: dict[str, torch.Tensor]) -> None:
    """Makes one channel and one hidden unit of each block huge, as training does; the matrices that read them mostly compensate."""
    for name, tensor in tensors.items():
        if name.endswith("embeddings.LayerNorm.weight"):
            tensor[CHANNEL] *= 20
        if "layer.0.attention.self" in name and name.endswith("weight"):
            tensor[:, CHANNEL] /= 5
        if "intermediate.dense" in name:
            tensor[UNIT] *= 20
        if name.endswith("output.dense.weight") and "attention" not in name:
            tensor[:, UNIT] /= 20


def int8(
    staged: Staged, target: Path, texts: Sequence[str] = SEEN, *, max_error: float = 1.0, quick: bool = False
) -> tuple[dict[str, int], float]:
    """Quantizes a graph with these texts, and measures its error on other texts."""
    return quantize(staged.packed, target, target.parent, staged.feeds(texts), staged.feeds(UNSEEN), max_error=max_error, quick=quick)


@dataclass(frozen=True)
class Quantized:
    """The graphs of a checkpoint with outliers before and after quantization, the counts of its operators, and its error."""

    staged: Staged
    target: Path
    counts: dict[str, int]
    error: float

    @property
    def task(self) -> str:
        return self.staged.loaded.task


QuantizedOf = Callable[[str], Quantized]


@pytest.fixture(name="quantized_of", scope="module")
def quantized_graphs(tmp_path_factory: pytest.TempPathFactory) -> QuantizedOf:
    """Returns a function that returns the int8 graph of a task's checkpoint, which is created at the first call."""
    folder = tmp_path_factory.mktemp("quantized")

    @functools.cache
    def quantized_of(task: str) -> Quantized:
        source = checkpoint_of(folder, task)
        edit_weights(source, plant_outliers)
        staged = stage(source, folder / f"stages-{task}")
        target = folder / f"{task}.onnx"
        return Quantized(staged, target, *int8(staged, target))

    return quantized_of


@pytest.fixture(
    name="quantized", params=[pytest.param(task, marks=() if task in SAMPLE else pytest.mark.full_grid) for task in ARCHITECTURES]
)
def quantized_graph(request: pytest.FixtureRequest, quantized_of: QuantizedOf) -> Quantized:
    return quantized_of(request.param)


def test_outputs_are_close_to_the_float_graphs(quantized: Quantized) -> None:
    feeds = quantized.staged.feeds(UNSEEN)
    expected, actual = (inference.compute_outputs(path, feeds) for path in (quantized.staged.packed, quantized.target))

    assert 0 < inference.rms_error(expected, actual) < MAX_ERROR[quantized.task]


def test_channels_in_float_reduce_the_error_of_outliers(quantized_of: QuantizedOf, tmp_path: Path) -> None:
    """The matrices with the largest effect on the outputs have them. `--quick` does not measure the effects."""
    quantized = quantized_of("text-classification")
    quick_counts, quick_error = int8(quantized.staged, tmp_path / "int8.onnx", quick=True)

    assert [(name in quantized.counts, name in quick_counts) for name in ("FloatUnits", "FloatInputs")] == [(True, False)] * 2
    assert quantized.error < 0.9 * quick_error


def test_a_feed_forward_block_stays_whole_if_its_rest_would_be_too_small(tmp_path: Path) -> None:
    """Without 16 of its 40 hidden units, a matrix would be too small to be quantized."""
    source = bert(tmp_path, intermediate_size=40)
    edit_weights(source, plant_outliers)
    counts, _ = int8(stage(source, tmp_path / "stages"), tmp_path / "int8.onnx")

    assert "FloatUnits" not in counts
    assert counts["MatMulIntegerToFloat"] == 10


def test_identical_calibration_texts_are_accepted(quantized_of: QuantizedOf, tmp_path: Path) -> None:
    """The same word 16 times hardly shows the activations, but other texts still get finite logits of the right shape."""
    staged = quantized_of("text-classification").staged
    int8(staged, tmp_path / "int8.onnx", ["good"] * 16)
    for feed in staged.feeds(UNSEEN[:5]):
        [expected], [actual] = run(staged.packed, feed), run(tmp_path / "int8.onnx", feed)
        assert actual.shape == expected.shape
        assert np.isfinite(actual).all()


@pytest.mark.full_grid
def test_a_layer_whose_attention_is_zero_is_quantized(tmp_path: Path) -> None:
    """A tensor that is zero for every text gets scales too, and the outputs stay close to float."""
    source = checkpoint_of(tmp_path, "text-classification")
    edit_weights(source, lambda tensors: [tensor.zero_() for name, tensor in tensors.items() if "layer.0.attention.self.value" in name])
    staged = stage(source, tmp_path / "stages")
    counts, _ = int8(staged, tmp_path / "int8.onnx")
    outputs = [inference.compute_outputs(path, staged.feeds(UNSEEN)) for path in (staged.packed, tmp_path / "int8.onnx")]

    assert counts["MatMulIntegerToFloat"] == 10
    assert inference.rms_error(*outputs) < 0.15


def test_no_output_hides_one_that_is_not_a_number() -> None:
    sound, invalid = np.array([1, 2], np.float32), np.array([1, np.nan], np.float32)

    assert np.isnan(inference.rms_error([sound, sound], [sound, invalid]))


def test_the_most_sensitive_matrices_stay_in_float_to_meet_the_limit(quantized_of: QuantizedOf, tmp_path: Path) -> None:
    quantized = quantized_of("token-classification")
    feeds = quantized.staged.feeds(UNSEEN)
    expected = inference.compute_outputs(quantized.staged.packed, feeds)
    limit = 0.6 * inference.rms_error(expected, inference.compute_outputs(quantized.target, feeds))
    counts, error = int8(quantized.staged, tmp_path / "int8.onnx", max_error=limit)
    remainder = inference.rms_error(expected, inference.compute_outputs(tmp_path / "int8.onnx", feeds))

    assert remainder == error <= limit
    assert quantized.counts["MatMulIntegerToFloat"] == counts["KeptFloat"] + counts["MatMulIntegerToFloat"]
    assert 0 < counts["KeptFloat"] < quantized.counts["MatMulIntegerToFloat"]


def test_an_unreachable_limit_ends_the_export(quantized_of: QuantizedOf, tmp_path: Path) -> None:
    staged = quantized_of("text-classification").staged
    with raises_exactly(ExportError, match=r"1e-09, .*--int8-texts.*--max-int8-error.*--precision fp32"):
        int8(staged, tmp_path / "int8.onnx", max_error=1e-9)


def test_attention_outputs_are_quantized_without_a_multiplication(quantized: Quantized) -> None:
    """Adjacent matrices include the scaling of attention outputs, so attention's own output is quantized."""
    graph = rewrite.load(quantized.target).graph
    stored = [producer.op_type for node in graph if node.op_type == "QuantizeLinear" and (producer := node.inputs[0].producer())]

    assert 0 < sum(node.op_type == "MultiHeadAttention" for node in graph) == stored.count("MultiHeadAttention")


def saturating(inputs: Array, steps: Array) -> Array:
    """Multiplies like CPUs without VNNI: u8 by s8; sums of two adjacent products saturate at 16 bits, and are added in 32 bits."""
    if len(steps) % 2:
        inputs, steps = np.pad(inputs, ((0, 0), (0, 1))), np.pad(steps, ((0, 1), (0, 0)))
    a, b = inputs.astype(np.int64), steps.astype(np.int64)
    pairs = a[:, ::2, None] * b[None, ::2] + a[:, 1::2, None] * b[None, 1::2]
    total: Array = np.clip(pairs, -MAX_INT16 - 1, MAX_INT16).sum(axis=1)
    return total


@pytest.mark.full_grid
def test_a_cpu_that_saturates_gives_the_same_products(quantized: Quantized, tmp_path: Path) -> None:
    """For the calibration inputs, sums of two products stay within 16 bits in an emulation, so all CPUs answer alike."""
    model = onnx.load(str(quantized.target))
    products = [node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat"]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    own = len(model.graph.output)
    model.graph.output.extend(helper.make_tensor_value_info(node.input[0], TensorProto.UINT8, None) for node in products)
    onnx.save(model, str(tmp_path / "observed.onnx"))
    largest = 0.0
    for feed in quantized.staged.feeds(SEEN[:15]):
        for node, values in zip(products, run(tmp_path / "observed.onnx", feed)[own:], strict=True):
            inputs, steps = values.reshape(-1, values.shape[-1]), constants[node.input[1]]
            exact = inputs.astype(np.int64) @ steps.astype(np.int64)
            np.testing.assert_array_equal(exact, saturating(inputs, steps))
            stretched = np.rint(steps * (MAX_INT8 / np.maximum(np.abs(steps.astype(int)).max(axis=0), 1)))
            largest = max(largest, float(np.abs(saturating(inputs, stretched) - inputs.astype(np.int64) @ stretched).max()))
    assert largest > 0  # with scales from only the largest weight, some products would be wrong


# square and large in both directions, so that only the axis distinguishes rows from columns; the rows have very different sizes
TABLE = np.random.default_rng(0).normal(size=(MIN_TABLE_ROWS, MIN_TABLE_ROWS)).astype(np.float32)
TABLE *= np.geomspace(1e-6, 1e4, MIN_TABLE_ROWS, dtype=np.float32)[:, None]
TABLE[0] = 0


def emit_lookup(axis: int | None) -> tuple[int, ir.Model, NDArray[np.float32]]:
    """Emits int8 for one lookup; returns the number of replaced lookups, the model, and its output for the indices 3 and 0."""
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    node = helper.make_node("Gather", ["table", "ids"], ["y"], **attributes)
    model = ir.from_proto(graph_of([node], {"table": TABLE}, {"ids": ("n",)}, kind=TensorProto.INT64))
    count = emit_embeddings(model.graph)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    [values] = session.run(None, {"ids": np.array([3, 0])})
    return count, model, values


@pytest.mark.parametrize("axis", [None, 0])
def test_row_lookups_are_stored_as_integers(axis: int | None) -> None:
    """Each row is within half a step of its scale. Without the attribute, the axis is 0."""
    count, model, values = emit_lookup(axis)
    assert count == 1
    assert "table" not in {name for node in model.graph for name in (value.name for value in node.inputs if value is not None)}
    steps = np.abs(TABLE[[3, 0]]).max(axis=1, keepdims=True) / 127
    assert (np.abs(values - TABLE[[3, 0]]) <= 0.501 * steps).all()  # zeros stay zero


@pytest.mark.parametrize("axis", [1, -1])
def test_column_lookups_stay_in_float(axis: int) -> None:
    """There is one scale per row, so scales do not apply to columns."""
    count, model, values = emit_lookup(axis)
    assert (count, [node.op_type for node in model.graph]) == (0, ["Gather"])
    np.testing.assert_array_equal(TABLE[:, [3, 0]], values)
