"""Shape plans: the scheduler makes batches for planned shapes, the engine runs only these shapes, and the answers do not change."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from bertserve.service.bundle import files
from bertserve.service.bundle.graph_spec import InputSpec, ShapeBucket, ShapePlan
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.scheduling.records import Item, ScheduledRequest
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.text.tokenizer import Encoding
from support import metric, tiny
from support.app_client import assert_same, serving, state_of
from support.fakes import FakeRunner, fake_work, record_runs

ROWS = {8: (1, 2, 4, 6), 16: (1, 3), 32: (1, 2)}
PLAN = ShapePlan(buckets=tuple(ShapeBucket(length=length, rows=rows) for length, rows in ROWS.items()))
MASKED = PLAN.model_copy(update={"masks": (1, 4, 16, 64)})
SHAPES = {(rows, b.length) for b in PLAN.buckets for rows in b.rows}
TEXTS = ["good", "a good film", " ".join(["a dull book and"] * 3), " ".join(["the film was not good ,"] * 5), "bad"] * 5


def shapes_of(feeds: list[Any]) -> set[tuple[int, ...]]:
    return {feed["input_ids"].shape for feed in feeds}


def encoding(length: int, masks: tuple[int, ...] = ()) -> Encoding:
    ids = np.array([2, *((5 + 3 * i + length) % 60 for i in range(length - 2)), 3], dtype=np.int64)
    return Encoding(ids, np.zeros(length, dtype=np.int64), masks=masks)


def planned_engine(path: Path, plan: ShapePlan | None, side: str = "right") -> OnnxEngine:
    """Returns an engine on a tiny bundle's graph with a shape plan."""
    graph = files.load_bundle(path).manifest.graphs[0].model_copy(update={"shapes": plan})
    return OnnxEngine(path / graph.file, graph, pad_id=0, padding_side=side)


def test_a_batch_gets_the_smallest_shape_that_fits() -> None:
    """Rows and lengths are rounded up to planned values. Too many rows have no shape; a longer text gets the last length."""
    given_ = [(1, 3), (2, 8), (3, 8), (5, 1), (7, 8), (2, 9), (4, 16), (2, 32), (1, 40)]

    assert [PLAN.padded_shape(*shape) for shape in given_] == [(1, 8), (2, 8), (4, 8), (6, 8), None, (3, 16), None, (2, 32), (1, 32)]


def test_a_token_budget_limits_the_rows() -> None:
    assert set(PLAN.within(40).all_shapes) == {(1, 8), (2, 8), (4, 8), (1, 16), (1, 32)}
    assert set(PLAN.within(1).all_shapes) == {(1, 8), (1, 16), (1, 32)}


def edit_graph(path: Path, **changes: Any) -> Path:
    """Changes fields of the graph's entry in a bundle's manifest and returns the bundle's path."""
    return tiny.edit(path, lambda fields: fields["graphs"][0].update(changes))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(32, 64))
def test_each_batch_has_a_planned_shape_within_the_budget(lengths: list[int], budget: int) -> None:
    """No item is left over. Plans end at 32 tokens; an item of 40 stands for 32 tokens and 8 masks."""
    queue = RequestQueue(max_queue_tokens=10_000)
    runner = FakeRunner(lambda rows, tokens: 1.0 + rows * tokens * 1e-6, max_batch_tokens=budget, shape=PLAN.padded_shape)
    for length in lengths:
        queue.put(ScheduledRequest(runner, fake_work(length), 0.0, 1e6), [Item(length)], 0.0)
    batches = []
    while batch := queue.start_batch(0.0):
        batches.append([item.tokens for item in batch.items])

    assert sorted(n for batch in batches for n in batch) == sorted(lengths)
    shapes = [PLAN.padded_shape(len(batch), max(batch)) for batch in batches]
    assert None not in shapes
    assert {shape for shape in shapes if shape} <= set(PLAN.within(budget).all_shapes)


@pytest.mark.parametrize("shapes", ["planned", "exact"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("task", list(tiny.OUTPUTS))
def test_a_row_in_a_batch_equals_the_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, side: str, shapes: str) -> None:
    """The batches have texts of mixed lengths, which are padded to the longest text or to a planned shape."""
    path = tiny.bundle(tmp_path, task=task)
    masks = task == "fill-mask"
    exact, feeds = planned_engine(path, None, side), list[Any]()
    record_runs(monkeypatch, feeds.append)
    engine = planned_engine(path, None if shapes == "exact" else MASKED if masks else PLAN, side)
    texts = [encoding(n, (1,) + ((2, n - 2) if n > 6 else ()) if masks else ()) for n in (3, 5, 8, 9, 16, 17, 32, 4, 4, 4, 31)]
    for size in range(1, len(texts) + 1):
        rows = engine.run(texts[:size])

        assert len(rows) == size
        for text, row in zip(texts, rows, strict=False):
            [alone] = exact.run([text])
            assert row.keys() == alone.keys()
            for name, value in alone.items():
                np.testing.assert_allclose(value, row[name], rtol=0, atol=1e-5)
    assert len(shapes_of(feeds)) > 4
    assert shapes == "exact" or shapes_of(feeds) <= SHAPES
    if masks and shapes == "planned":
        assert {len(feed["mask_index"]) for feed in feeds} <= set(MASKED.masks)


def test_row_lengths_are_an_input(tmp_path: Path) -> None:
    """The input `lengths` has the number of tokens of each row as int32, in place of an attention mask."""
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["rows", "length"]),
        helper.make_tensor_value_info("lengths", TensorProto.INT32, ["rows"]),
    ]
    nodes = [
        helper.make_node("Cast", ["lengths"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "last"], ["logits"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 1])]
    proto = helper.make_graph(nodes, "lengths", inputs, outputs, [numpy_helper.from_array(np.array([1]), "last")])
    onnx.save(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(tmp_path / "graph.onnx"))
    specs = (InputSpec(name="input_ids", fill="token_ids", dtype="int32"), InputSpec(name="lengths", fill="lengths", dtype="int32"))
    graph = files.load_bundle(tiny.bundle(tmp_path)).manifest.graphs[0].model_copy(update={"inputs": specs, "shapes": PLAN})
    engine = OnnxEngine(tmp_path / "graph.onnx", graph, pad_id=7, padding_side="right")

    assert [row["logits"][0] for row in engine.run([encoding(n) for n in (3, 5, 9, 32, 4)])] == [3, 5, 9, 32, 4]


async def serve_texts(models: Path, budget: int) -> tuple[Any, set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Returns a service's answers to many texts, the shapes of its runs, and the shapes of its warm-up."""
    feeds: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        record_runs(patch, feeds.append)
        service = state_of(models, max_batch_tokens=budget, threads=1)
    warm = shapes_of(feeds)
    feeds.clear()

    async with serving(service) as client:
        response = await client.post("/classify", json={"inputs": TEXTS})
        page = (await client.get("/metrics")).text
    assert metric(page, "tokens_total") == sum(feed["input_ids"].size for feed in feeds)  # real and padding tokens
    return response.json(), shapes_of(feeds), warm


async def test_a_service_runs_only_planned_shapes(tmp_path: Path) -> None:
    plan = PLAN.model_dump(mode="json")
    exact = await serve_texts(tiny.bundle(tmp_path / "exact").parent, 64)
    answer, shapes, warm = await serve_texts(edit_graph(tiny.bundle(tmp_path / "planned"), shapes=plan).parent, 40)

    shapes_of_plan = set(PLAN.within(40).all_shapes)
    assert warm == shapes_of_plan
    assert shapes <= shapes_of_plan
    assert len(shapes) > 2
    assert not exact[1] <= SHAPES
    assert_same(answer, exact[0])
