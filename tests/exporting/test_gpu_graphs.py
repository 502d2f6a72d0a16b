"""Graphs for GPUs, tested on the CPU: their export, outputs that match PyTorch, and their planned shapes."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from bertserve.export.build_input import choose_precisions
from bertserve.export.gpu.build import plan_shapes
from bertserve.export.gpu.fp16 import MAX_FP16_MAGNITUDE, find_overflowing_nodes
from bertserve.export.validation.comparison import MAX_ABS_ERROR
from bertserve.service.bundle.example import difference
from bertserve.service.bundle.files import Bundle
from bertserve.service.settings import GPU_BATCH_TOKENS
from bertserve.service.tasks import similarity
from bertserve.service.tasks.embed import EmbedBody
from bertserve.service.tasks.fill_mask import FillMaskBody
from bertserve.service.tasks.similarity import SimilarityBody
from support.bundles import Service, exported
from support.checkpoints import POSITIONS, ROWS, SIZES, bert, edit_json, edit_weights, encoder, sentence_transformers
from support.families import FAMILIES
from support.staged import ARCHITECTURES, checkpoint_of, operators
from support.task_runs import encode

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
LAYERS = SIZES["num_hidden_layers"]
# `make test` exports these for all providers: one has an output per text, the other an output per mask.
SAMPLE = {"text-classification", "fill-mask"}
GRAPHS = [("cuda", "fp32"), ("cuda", "fp16"), ("tensorrt", "fp32"), ("tensorrt", "fp16")]


def save_bundle(source: Path, folder: Path, **changes: Any) -> Bundle:
    """Exports a checkpoint with graphs for all providers, and returns the bundle."""
    options: dict[str, Any] = {"precisions": ("fp32", "fp16"), "providers": ("cpu", "cuda", "tensorrt")} | changes
    return exported(source, folder, **options)


@pytest.fixture(
    name="bundle",
    scope="module",
    params=[pytest.param(task, marks=() if task in SAMPLE else pytest.mark.full_grid) for task in ARCHITECTURES],
)
def bundle_of_a_task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Returns a bundle with graphs for all providers."""
    folder = tmp_path_factory.mktemp("gpu")
    return save_bundle(checkpoint_of(folder, request.param), folder / "models")


def model_of(bundle: Bundle, provider: Any, precision: Any) -> onnx.ModelProto:
    return onnx.load(str(bundle.path / bundle.graph(provider, precision).file))


def test_the_bundle_lists_each_graph_with_its_plan(bundle: Bundle) -> None:
    graphs = bundle.manifest.graphs

    assert [(graph.provider, graph.precision) for graph in graphs] == [("cpu", "fp32"), *GRAPHS]
    assert [graph.default for graph in graphs] == [True, False, True, False, True]
    assert graphs[0].shapes is None
    masks = bundle.manifest.task == "fill-mask"
    for graph in graphs[1:]:
        assert graph.shapes == plan_shapes(POSITIONS, masks=masks, ranges=3 if graph.provider == "tensorrt" else 0)
        assert graph.batch_invariant
        assert graph.validation.provider == "cpu"
    # TensorRT converts to fp16 itself, so both precisions share a file
    assert graphs[3].file == graphs[4].file == "model.tensorrt.fp32.onnx"


def test_the_cuda_graph_is_fused_and_takes_lengths(bundle: Bundle) -> None:
    """Each layer has fused attention, which reads the lengths, and two fused norms; the ids are int32."""
    graph = bundle.graph("cuda", "fp32")
    counts = operators(bundle.path / graph.file)
    attention = [node for node in model_of(bundle, "cuda", "fp32").graph.node if node.op_type == "Attention"]
    masks = {"mask_index": "int64"} if bundle.manifest.task == "fill-mask" else {}

    assert tuple(counts[name] for name in ("SkipLayerNormalization", "EmbedLayerNormalization", "Cast")) == (2 * LAYERS, 1, 0)
    assert [node.input[3] for node in attention] == ["lengths"] * LAYERS
    assert {spec.name: spec.dtype for spec in graph.inputs} == dict.fromkeys(("input_ids", "token_type_ids", "lengths"), "int32") | masks


def test_fp16_weights_are_stored_in_half_precision(bundle: Bundle) -> None:
    model = model_of(bundle, "cuda", "fp16")
    large = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}
    sizes = [(bundle.path / bundle.graph("cuda", precision).file).stat().st_size for precision in ("fp32", "fp16")]

    assert large == {TensorProto.FLOAT16}
    whole = {spec.name for spec in bundle.graph("cuda", "fp16").outputs}
    assert {value.type.tensor_type.elem_type for value in model.graph.output if value.name in whole} == {TensorProto.FLOAT16}
    assert sizes[1] < 0.6 * sizes[0]
    assert "KeptFloat" not in bundle.graph("cuda", "fp16").validation.quantized
    assert bundle.graph("cuda", "fp16").validation.quantized["Float16"] > 5 * LAYERS


def test_the_tensorrt_graph_has_only_standard_operators(bundle: Bundle) -> None:
    model = model_of(bundle, "tensorrt", "fp16")

    assert {node.domain for node in model.graph.node} == {entry.domain for entry in model.opset_import} == {""}
    assert bundle.graph("tensorrt", "fp32").validation.fusions == {}


@pytest.mark.full_grid
def test_a_bundle_can_be_exported_for_only_a_gpu(tmp_path: Path) -> None:
    """The stored example is answered by the GPU graph, and the bundle has only the requested graph."""
    bundle = save_bundle(checkpoint_of(tmp_path, CLASSIFIES), tmp_path / "models", providers=("cuda",), precisions=("fp16",))

    assert sorted(path.name for path in bundle.path.glob("*.onnx")) == ["model.cuda.fp16.onnx"]
    assert [graph.precision for graph in bundle.manifest.graphs] == ["fp16"]
    assert [set(score) for score in bundle.manifest.example.result[0][:1]] == [{"label", "score"}]


@pytest.mark.full_grid
def test_unfused_attention_keeps_its_mask(tmp_path: Path) -> None:
    """Lengths cannot describe padding on the left, so attention stays unfused; in fp16, its mask stays in float32."""
    source = FAMILIES["LLaMA"].save(tmp_path / "checkpoint", CLASSIFIES)
    edit_json(source / "config.json", pad_token_id=-1)  # LLaMA is then padded on the left
    bundle = save_bundle(source, tmp_path / "models", providers=("cuda",))

    assert bundle.manifest.tokenizer.padding_side == "left"
    for graph in bundle.manifest.graphs:
        assert "Attention" not in operators(bundle.path / graph.file)
        assert [spec.fill for spec in graph.inputs] == ["token_ids", "attention_mask"]
        assert graph.batch_invariant
    assert bundle.graph("cuda", "fp16").validation.quantized["KeptFloat"] >= LAYERS


def answers(bundle: Bundle, provider: Any, precision: Any, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    service = Service(bundle.path, precision, provider)
    return [service.answer(body) for body in bodies]


@pytest.mark.parametrize("pooling", ["mean_tokens", pytest.param("cls_token", marks=pytest.mark.full_grid)])
def test_the_graph_pools_unless_a_request_needs_tokens(pooling: str, tmp_path: Path) -> None:
    """Vectors of padded batches equal the CPU's, with all options; one request that needs tokens makes its whole batch return them."""
    bundle = save_bundle(sentence_transformers(encoder(tmp_path, layers=2), "Normalize", pooling=pooling), tmp_path / "models")
    options = ({}, {"normalize": False}, {"dimensions": 3}, {"pooling": "max"}, {"pooling": "none"})
    bodies = [{"inputs": ["good", "a very good film , but the book is great !"], **each} for each in options]
    expected = answers(bundle, "cpu", "fp32", bodies)

    assert bundle.graph("cpu").small_outputs == ()
    requests = [EmbedBody(**body).task_inputs(bundle.manifest)[0] for body in bodies]
    assert [Service(bundle.path).encode(request).small_outputs for request in requests] == [True, True, True, False, False]
    [compared] = SimilarityBody(inputs={"source_sentence": "good", "sentences": ["film"]}).task_inputs(bundle.manifest)
    assert encode(similarity, compared, Service(bundle.path).tokenizer, bundle.manifest).small_outputs
    for provider, precision in GRAPHS[:3]:
        service = Service(bundle.path, precision, provider)
        own, other = (service.encodings(*EmbedBody(**body).task_inputs(bundle.manifest)) for body in (bodies[0], bodies[3]))
        assert [set(row) for row in service.engine.run(own, small_outputs=True)] == [{"sentence_embedding"}] * 2
        assert [set(row) for row in service.engine.run([*own, other[0]])] == [{"last_hidden_state"}] * 3
        assert difference(expected, answers(bundle, provider, precision, bodies), 1e-5 if precision == "fp32" else 0.05) is None


@pytest.mark.parametrize("bundle", ["fill-mask"], indirect=True)
def test_the_graph_of_a_fill_mask_model_returns_the_best_tokens(bundle: Bundle) -> None:
    """Targets, and more candidates than the graph returns, need the scores of all tokens."""
    parameters = ({}, {"top_k": 20}, {"top_k": 101}, {"targets": ["good", "film"]})
    bodies = [{"inputs": "the [MASK] was very [MASK] .", "parameters": each} for each in parameters]
    expected = answers(bundle, "cpu", "fp32", bodies)

    requests = [FillMaskBody(**body).task_inputs(bundle.manifest)[0] for body in bodies]
    assert [Service(bundle.path).encode(request).small_outputs for request in requests] == [True, True, False, False]
    for provider, precision in (GRAPHS[0], GRAPHS[2]):
        service = Service(bundle.path, precision, provider)
        small, whole = (service.encodings(*FillMaskBody(**body).task_inputs(bundle.manifest)) for body in (bodies[0], bodies[3]))
        assert {name: values.shape for name, values in service.engine.run(small, small_outputs=True)[0].items()} == {
            "top_logs": (2, min(100, ROWS)),
            "top_tokens": (2, min(100, ROWS)),
        }
        assert [set(row) for row in service.engine.run([*small, *whole])] == [{"logits"}] * 2
        assert difference(expected, answers(bundle, provider, precision, bodies), 1e-5) is None
    half = answers(bundle, "cuda", "fp16", bodies[:1])
    assert half[0][0][0]["score"] == pytest.approx(expected[0][0][0]["score"], abs=0.02)


@pytest.mark.full_grid
def test_operators_that_overflow_fp16_stay_in_float32(tmp_path: Path) -> None:
    """A feed-forward block with inner values beyond the range of fp16 still matches PyTorch."""
    scale = 3e5

    def blow_up(tensors: dict[str, torch.Tensor]) -> None:
        name = "bert.encoder.layer.0.intermediate.dense"
        tensors[f"{name}.weight"] *= scale
        tensors[f"{name}.bias"] *= scale
        tensors["bert.encoder.layer.0.output.dense.weight"] /= scale

    source = bert(tmp_path, "large", hidden_act="relu")
    edit_weights(source, blow_up)
    bundle = save_bundle(source, tmp_path / "models", providers=("cuda",))
    graph = bundle.graph("cuda", "fp16")

    assert 3 <= graph.validation.quantized["KeptFloat"] < graph.validation.quantized["Float16"]
    assert graph.validation.worst_abs_error < MAX_ABS_ERROR["fp16"]


def test_writers_and_readers_of_a_large_tensor_stay_in_float32() -> None:
    """A fused sum is checked with the sum of its inputs' magnitudes. The reader of a large constant also stays in float32."""
    nodes = [
        helper.make_node("Mul", ["x", "big"], ["a"], name="constant"),
        helper.make_node("Relu", ["x"], ["b"], name="writer"),
        helper.make_node("Relu", ["b"], ["c"], name="reader"),
        helper.make_node("SkipLayerNormalization", ["d", "e", "gamma", "beta"], ["f"], name="sum"),
        helper.make_node("SkipLayerNormalization", ["d", "x", "gamma", "beta"], ["g"], name="small_sum"),
        helper.make_node("Relu", ["x"], ["h"], name="not_finite"),
        helper.make_node("Relu", ["x"], ["i"], name="small"),
    ]
    tensors = [numpy_helper.from_array(np.float32([value]), name) for name, value in (("big", -3.4e38), ("gamma", 1.0), ("beta", 0.0))]
    model = helper.make_model(helper.make_graph(nodes, "g", [], [], tensors))
    limit = MAX_FP16_MAGNITUDE
    peaks = dict.fromkeys("xcfg", 1.0) | {"a": 0.0, "b": limit * 1.01, "d": limit * 0.6, "e": limit * 0.6, "h": float("nan"), "i": limit}

    assert find_overflowing_nodes(model, peaks) == {"constant", "writer", "reader", "sum", "not_finite"}


@pytest.mark.parametrize("max_length", [20, 512, 8192])
@pytest.mark.parametrize("ranges", [0, 3])
def test_plans_reach_the_maximum_length_within_the_token_limit(max_length: int, ranges: int) -> None:
    """All lengths but the last are multiples of 8, each is at most twice the previous one, and batches have limited sizes."""
    plan = plan_shapes(max_length, masks=True, ranges=ranges)
    lengths = [bucket.length for bucket in plan.buckets]

    assert lengths[-1] == max_length
    assert all(length % 8 == 0 for length in lengths[:-1])
    assert all(b <= 2 * a for a, b in itertools.pairwise(lengths))
    assert all(bucket.rows[0] == 1 for bucket in plan.buckets)
    assert plan.masks[-1] >= max_length
    most = max(rows * length for rows, length in plan.all_shapes)
    assert most <= (max(GPU_BATCH_TOKENS, 8 * max_length) if ranges else max(GPU_BATCH_TOKENS, max_length))
    if ranges:
        assert [len({bucket.rows for bucket in part.buckets}) for part in plan.split(ranges)] == [1, 1, 1][: len(lengths)]
    for tokens in range(1, max_length + 1, 7):
        assert plan.padded_shape(1, tokens) is not None


def test_each_provider_gets_the_precisions_that_it_supports() -> None:
    """The requested order is kept. Without a request, each provider gets all its precisions."""
    assert choose_precisions(("cpu", "cuda"), None) == {"cpu": ("fp32", "int8"), "cuda": ("fp32", "fp16")}
    assert choose_precisions(("cpu", "cuda", "tensorrt"), ("int8", "fp16")) == {"cpu": ("int8",), "cuda": ("fp16",), "tensorrt": ("fp16",)}
    assert choose_precisions(("cuda",), ("fp16", "fp32")) == {"cuda": ("fp16", "fp32")}
