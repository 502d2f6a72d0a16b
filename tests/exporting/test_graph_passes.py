"""Graph passes between fusing and quantizing: what they change, and that outputs stay the same."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bertserve.export.errors import ExportError
from bertserve.export.graph import rewrite
from bertserve.export.graph.cpu_passes import pack_qkv, restrict_to_cls, unfuse
from bertserve.export.inference import Feed
from bertserve.export.int8 import graph_edits
from bertserve.export.int8.graph_edits import fold_smoothing
from support import raises_exactly
from support.checkpoints import SIZES
from support.families import FAMILIES
from support.staged import Staged, assert_equal_outputs, graph_of, operators, padded, rewritten, run, stage

pytestmark = pytest.mark.torch

LENGTH = 4
WIDTH = 8
HIDDEN = SIZES["hidden_size"]
TEXTS = ["good", "a very good film , but the book is great !", "1 2 3"]

Array = NDArray[Any]


@pytest.fixture(name="classifier")
def staged_classifier(all_staged: dict[str, Staged]) -> Staged:
    return all_staged["text-classification"]


def batches(staged: Staged) -> list[tuple[Feed, Array]]:
    """Returns batches and their masks: each text alone, and all texts in one padded batch."""
    feeds = staged.feeds(TEXTS)
    together = padded(feeds, 40)
    return [(feed, feed["attention_mask"]) for feed in [*feeds, together]]


def handmade(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, Array],
    outputs: Sequence[str] = ("y",),
    inputs: Sequence[str] = ("x",),
) -> Path:
    """Writes a graph with float32 inputs [rows, LENGTH, WIDTH] and returns its path."""
    onnx.save(graph_of(nodes, constants, dict.fromkeys(inputs, ("rows", LENGTH, WIDTH)), outputs), str(path))
    return path


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = normal(3, LENGTH, WIDTH, seed=9)


def save(folder: Path, model: onnx.ModelProto, name: str = "other.onnx") -> Path:
    onnx.save(model, str(folder / name))
    return folder / name


def graph_constant(path: Path, name: str) -> Array:
    value = rewrite.load(path).graph.initializers[name].const_value
    return value.numpy()


def with_outputs(source: Path, path: Path, names: Sequence[str]) -> Path:
    """Writes a graph with these tensors as additional outputs, and returns its path."""
    rewrite.save(rewrite.load(source), path, outputs=names)
    return path


def branch(value: str, output: str) -> onnx.GraphProto:
    """Returns a branch of `If` that reads a value of the outer graph."""
    return helper.make_graph(
        [helper.make_node("Neg", [value], [output])], output, [], [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    )


def test_a_graph_with_subgraphs_is_refused(tmp_path: Path) -> None:
    """Passes ignore the readers in branches of `If`, so they could change values that a branch needs."""
    nodes = [
        helper.make_node("Gather", ["x", "zero"], ["first"], axis=1),
        helper.make_node("ReduceMax", ["first"], ["largest"], keepdims=0),
        helper.make_node("Cast", ["largest"], ["decided"], to=TensorProto.BOOL),
        helper.make_node("If", ["decided"], ["y"], name="decide", then_branch=branch("first", "a"), else_branch=branch("x", "b")),
    ]
    path = handmade(tmp_path / "graph.onnx", nodes, {"zero": np.array(0)})
    run(path, {"x": X})

    with raises_exactly(ExportError, match=r"`If` \(`decide`\)"):
        rewrite.load(path)


@pytest.mark.parametrize(("before", "after"), [("fused", "unfused"), ("unfused", "cls_only"), ("cls_only", "packed")])
def test_each_pass_keeps_the_outputs(staged: Staged, before: str, after: str) -> None:
    for feed, mask in batches(staged):
        assert_equal_outputs(getattr(staged, after), getattr(staged, before), feed, mask)


def test_no_slow_operator_is_left(staged: Staged) -> None:
    before, after = operators(staged.fused), operators(staged.unfused)
    slow = {"Attention", "SkipLayerNormalization", "BiasGelu", "Gemm"}

    assert {"Attention", "SkipLayerNormalization", "BiasGelu"} <= set(before)
    assert slow & set(after) == set()
    assert before["Attention"] == after["MultiHeadAttention"] == 2


def test_attention_keeps_its_attributes(classifier: Staged, tmp_path: Path) -> None:
    model = onnx.load(str(classifier.fused))
    for node in model.graph.node:
        if node.op_type == "Attention":
            [masked] = [attribute for attribute in node.attribute if attribute.name == "mask_filter_value"]
            masked.f = -1.0
            node.attribute.append(helper.make_attribute("scale", 0.2))
    fused = save(tmp_path, model)
    rewritten(unfuse, fused, tmp_path / "unfused.onnx")
    feed, mask = batches(classifier)[-1]

    assert_equal_outputs(tmp_path / "unfused.onnx", fused, feed, mask)
    with pytest.raises(AssertionError):
        assert_equal_outputs(fused, classifier.fused, feed, mask)


@pytest.mark.parametrize(
    ("operator", "change"),
    [
        pytest.param("Attention", lambda node: node.attribute.append(helper.make_attribute("unidirectional", 1)), id="unidirectional"),
        pytest.param("Attention", lambda node: node.input.__setitem__(1, node.input[0]), id="a weight that is computed"),
        pytest.param("SkipLayerNormalization", lambda node: node.output.extend(["mean"]), id="a norm that gives out its mean"),
    ],
)
def test_an_operator_that_is_used_in_another_way_stays(
    classifier: Staged, tmp_path: Path, operator: str, change: Callable[[onnx.NodeProto], object]
) -> None:
    model = onnx.load(str(classifier.fused))
    change(next(node for node in model.graph.node if node.op_type == operator))
    rewritten(unfuse, save(tmp_path, model), tmp_path / "unfused.onnx")

    assert operators(tmp_path / "unfused.onnx")[operator] == 1


def gemm(shape: tuple[int, ...], *bias: str, **attributes: Any) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """Returns the nodes and constants of a `Gemm` of all rows of `x`."""
    nodes = [helper.make_node("Reshape", ["x", "flat"], ["rows"]), helper.make_node("Gemm", ["rows", "w", *bias], ["y"], **attributes)]
    return nodes, {"w": normal(*shape), "b": normal(5), "flat": np.array([-1, WIDTH])}


def einsum(equation: str, *shape: int) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    return [helper.make_node("Einsum", ["x", "w"], ["y"], equation=equation)], {"w": normal(*shape)}


JOINED = [helper.make_node("Reshape", ["x", "heads"], ["cut"]), helper.make_node("Einsum", ["cut", "w"], ["y"], equation="ibnd,hnd->ibh")]


@pytest.mark.parametrize(
    ("graph", "counts"),
    [
        pytest.param(einsum("ibh,hnd->ibnd", WIDTH, 2, 3), {"MatMul": 1, "Reshape": 1}, id="split into heads"),
        pytest.param(einsum("ibh,nh->ibn", 5, WIDTH), {"MatMul": 1}, id="a transposed matrix"),
        pytest.param(einsum("ibh,hk->ibk", WIDTH, 5), {"MatMul": 1}, id="a plain product"),
        pytest.param(einsum("ibh,hk->bik", WIDTH, 5), {"Einsum": 1}, id="turned axes"),
        pytest.param(einsum("ibh,bk->ihk", LENGTH, 5), {"Einsum": 1}, id="another axis"),
        pytest.param(einsum("ibh,ih->ibh", 3, WIDTH), {"Einsum": 1}, id="no sum"),
        # a sum over two axes, heads and their values, is a product with both axes merged
        pytest.param((JOINED, {"w": normal(5, 2, 4), "heads": np.array([0, 0, 2, 4])}), {"MatMul": 1, "Reshape": 2}, id="joined heads"),
        pytest.param(gemm((WIDTH, 5), "b", transB=0), {"Reshape": 1, "MatMul": 1, "Add": 1}, id="with a bias"),
        pytest.param(gemm((5, WIDTH), "b", transB=1), {"Reshape": 1, "MatMul": 1, "Add": 1}, id="transposed with a bias"),
        pytest.param(gemm((5, WIDTH), transB=1), {"Reshape": 1, "MatMul": 1}, id="transposed without a bias"),
        pytest.param(gemm((WIDTH, 5), "b", alpha=2.0), {"Reshape": 1, "Gemm": 1}, id="scaled"),
    ],
)
def test_einsum_and_gemm_with_a_constant_become_a_matmul(
    tmp_path: Path, graph: tuple[list[onnx.NodeProto], dict[str, Array]], counts: dict[str, int]
) -> None:
    """The matrix can have more than two axes, like XLNet's. Operators that are not plain products are unchanged."""
    path = handmade(tmp_path / "graph.onnx", *graph)
    rewritten(unfuse, path, tmp_path / "unfused.onnx")

    assert operators(tmp_path / "unfused.onnx") == counts
    assert_equal_outputs(tmp_path / "unfused.onnx", path, {"x": X})


def test_a_classifiers_last_layer_is_computed_for_one_token(classifier: Staged, tmp_path: Path) -> None:
    """Attention output, feed-forward block and both norms of the last layer have one row; tensors before it have all rows."""
    names = [
        node.outputs[0].name
        for node in ir.load(classifier.cls_only).graph
        if node.op_type in ("Gelu", "LayerNormalization", "MultiHeadAttention")
    ]
    with_outputs(classifier.cls_only, tmp_path / "more.onnx", names)
    [feed] = classifier.feeds(TEXTS[1:2])
    length = feed["input_ids"].shape[1]

    assert [value.shape[1] for value in run(tmp_path / "more.onnx", feed)[1:]] == [length] * 5 + [1] * 4


def test_a_model_with_unfused_relative_positions_is_restricted(tmp_path: Path) -> None:
    """MPNet's attention has a bias and is not fused. The nodes after it are restricted, and outputs are unchanged."""
    staged = stage(FAMILIES["MPNet"].save(tmp_path / "mpnet", "text-classification"), tmp_path / "stages")

    assert staged.nodes_restricted >= 8
    feeds = staged.feeds([TEXTS[0], TEXTS[1], TEXTS[2], "the film " * 40])[:4]  # without the pairs, which leave no room for padding
    for feed in [*feeds, padded(feeds, max(feed["input_ids"].shape[1] for feed in feeds) + 7)]:
        assert_equal_outputs(staged.cls_only, staged.fused, feed)
        assert_equal_outputs(staged.packed, staged.fused.with_name("raw.onnx"), feed)


@pytest.mark.parametrize("second", ["an output", "a reader"])
def test_hidden_states_with_another_reader_are_not_restricted(classifier: Staged, tmp_path: Path, second: str) -> None:
    """If the last hidden states are an output, or if another node reads them, nothing is restricted and outputs are unchanged."""
    model = rewrite.load(classifier.unfused)
    hidden = [node for node in model.graph if node.op_type == "LayerNormalization"][-1].outputs[0]
    if second == "a reader":
        model.graph.append(reader := ir.node("Tanh", [hidden]))
        hidden = reader.outputs[0]
    rewrite.save(model, tmp_path / "wide.onnx", outputs=[hidden.name])
    count = rewritten(restrict_to_cls, tmp_path / "wide.onnx", tmp_path / "cls_only.onnx")
    [feed] = classifier.feeds(TEXTS[1:2])

    assert count == 0
    for a, b in zip(run(tmp_path / "wide.onnx", feed), run(tmp_path / "cls_only.onnx", feed), strict=True):
        np.testing.assert_array_equal(a, b)


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["product"])
BIAS = helper.make_node("Add", ["product", "b"], ["biased"])
SUM = helper.make_node("Add", ["biased", "x"], ["hidden"])
FIRST_ROW = helper.make_node("Gather", ["hidden", "zero"], ["y"], axis=1)
ROWWISE = {"w": normal(WIDTH, WIDTH), "b": normal(WIDTH, seed=1), "zero": np.array(0), "one": np.array(1)}
POSITIONS = helper.make_node("Add", ["product", "positions"], ["biased"])
MIXED = [
    helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1]),
    helper.make_node("MatMul", ["x", "turned"], ["scores"]),
    helper.make_node("MatMul", ["scores", "x"], ["mixed"]),
    helper.make_node("Add", ["mixed", "b"], ["hidden"]),
]


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        pytest.param([PRODUCT, BIAS, SUM, FIRST_ROW], 3, id="all nodes"),
        pytest.param([PRODUCT, BIAS, SUM, helper.make_node("Gather", ["hidden", "one"], ["y"], axis=1)], 0, id="another row is read"),
        pytest.param([PRODUCT, BIAS, SUM, helper.make_node("Gather", ["hidden", "zero"], ["y"], axis=0)], 0, id="another axis is read"),
        pytest.param([PRODUCT, BIAS, SUM, helper.make_node("Softmax", ["hidden"], ["y"], axis=1)], 0, id="all rows are read"),
        # positions that are added to hidden states differ by row, and attention scores mix rows
        pytest.param([PRODUCT, POSITIONS, SUM, FIRST_ROW], 1, id="after a constant with rows of its own"),
        pytest.param([*MIXED, FIRST_ROW], 1, id="after a product of two computed tensors"),
    ],
)
def test_only_nodes_for_the_first_row_are_restricted(tmp_path: Path, nodes: Sequence[onnx.NodeProto], count: int) -> None:
    path = handmade(tmp_path / "wide.onnx", nodes, ROWWISE | {"positions": normal(1, LENGTH, WIDTH)})

    assert rewritten(restrict_to_cls, path, tmp_path / "cls_only.onnx") == count
    assert_equal_outputs(tmp_path / "cls_only.onnx", path, {"x": X}, atol=1e-6)


def test_query_key_and_value_are_one_product(staged: Staged) -> None:
    """Each layer has one product for all three. A restricted layer has one for key and value, because its query reads one row."""
    restricted = staged.loaded.task == "text-classification"

    assert operators(staged.cls_only)["MatMul"] - operators(staged.packed)["MatMul"] == (3 if restricted else 4)


def test_products_of_one_tensor_are_packed(tmp_path: Path) -> None:
    """Products with and without a bias are packed separately, and a product of another tensor stays."""
    nodes = [
        helper.make_node("MatMul", ["x", "wide"], ["p1"]),
        helper.make_node("Add", ["wide_bias", "p1"], ["y1"]),
        helper.make_node("MatMul", ["x", "w"], ["y2"]),
        helper.make_node("Neg", ["x"], ["other"]),
        helper.make_node("MatMul", ["other", "w"], ["p3"]),
        helper.make_node("Add", ["p3", "b"], ["y3"]),
        helper.make_node("MatMul", ["x", "w"], ["p4"]),
        helper.make_node("Add", ["p4", "b"], ["y4"]),
        helper.make_node("MatMul", ["x", "wide"], ["y5"]),
    ]
    constants = {"wide": normal(WIDTH, 12, seed=3), "wide_bias": normal(12, seed=4)} | ROWWISE
    path = handmade(tmp_path / "apart.onnx", nodes, constants, outputs=["y1", "y2", "y3", "y4", "y5"])
    rewritten(pack_qkv, path, tmp_path / "packed.onnx")

    assert operators(tmp_path / "packed.onnx")["MatMul"] == 3
    assert_equal_outputs(tmp_path / "packed.onnx", path, {"x": X})


@pytest.mark.parametrize("part", ["hidden units", "input channels"])
def test_hidden_units_and_input_channels_with_the_largest_values_are_split_off(classifier: Staged, tmp_path: Path, part: str) -> None:
    hidden = part == "hidden units"
    model = rewrite.load(classifier.packed)
    block = next(iter(graph_edits.feed_forward_blocks(model.graph).values()))
    layer = block[0] if hidden else next(layer for layer in map(rewrite.as_linear, model.graph) if layer is not None)
    name, (weight, _) = layer.weight.name, layer.arrays()
    peak = np.random.default_rng(0).permutation(weight.shape[1 if hidden else 0]).astype(np.float32)
    if hidden:
        graph_edits.split_hidden_units(model.graph, block, peak)
    else:
        graph_edits.split_input_channels(model.graph, layer, peak)
    rewrite.save(model, tmp_path / "split.onnx")
    largest = peak >= len(peak) - (graph_edits.HIDDEN_UNITS if hidden else graph_edits.INPUT_CHANNELS)
    expected, stored = (weight[:, largest], f"{name}/float") if hidden else (weight[largest], f"{name}/outlying")

    np.testing.assert_array_equal(expected, graph_constant(tmp_path / "split.onnx", stored))
    for feed, mask in batches(classifier):
        assert_equal_outputs(tmp_path / "split.onnx", classifier.packed, feed, mask)


def smoothed(staged: Staged, path: Path, factors: Array) -> tuple[set[str], set[str]]:
    """Smooths all attention outputs by the same factors; returns the names of all outputs and of the smoothed outputs."""
    model = rewrite.load(staged.packed)
    outputs = {node.outputs[0].name for node in model.graph if node.op_type == "MultiHeadAttention"}
    count = fold_smoothing(model.graph, dict.fromkeys(outputs, factors) | {"unknown": factors})
    rewrite.save(model, path)
    return outputs, count


FACTORS = np.geomspace(1, 64, HIDDEN, dtype=np.float32)


def test_smoothing_keeps_the_outputs(staged: Staged, tmp_path: Path) -> None:
    """Each channel of the values is multiplied by its factor. A factor of zero, as for a channel that nothing reads, changes nothing."""
    smoothed(staged, tmp_path / "zeros.onnx", np.eye(1, HIDDEN, dtype=np.float32)[0])
    outputs, count = smoothed(staged, tmp_path / "smoothed.onnx", FACTORS)
    name, sources = min(outputs), {"before": staged.packed, "after": tmp_path / "smoothed.onnx"}
    feed = batches(staged)[0][0]
    before, after = (run(with_outputs(source, tmp_path / f"{when}.onnx", [name]), feed)[-1] for when, source in sources.items())

    assert count == outputs
    for feed, mask in batches(staged):
        assert_equal_outputs(tmp_path / "smoothed.onnx", staged.packed, feed, mask, atol=1e-4)
        assert_equal_outputs(tmp_path / "zeros.onnx", staged.packed, feed, mask)
    np.testing.assert_allclose(after, before * FACTORS, rtol=1e-4, atol=1e-4)
