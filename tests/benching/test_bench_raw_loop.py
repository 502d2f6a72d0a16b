"""The raw ONNX Runtime loop: it encodes bodies like the service, and accepts graphs from other sources."""

import json
import threading
from pathlib import Path
from statistics import fmean, median

import onnx
import pytest

from bertserve.bench import target
from bertserve.bench.raw_loop import RawLoop
from bertserve.service.errors import BertServeError, StartError
from support import ROOT, tiny


@pytest.fixture(name="sentiment", scope="module")
def sentiment_raw_loop() -> RawLoop:
    return RawLoop(ROOT / "models/sentiment")


@pytest.mark.parametrize(
    ("workload", "low", "mean", "high"), [("short", 15, 23, 30), ("long", 135, 162, 190), ("mixed", 5, 48, 320), ("uniform", 12, 260, 512)]
)
def test_workloads_have_the_expected_token_counts(sentiment: RawLoop, workload: str, low: int, mean: int, high: int) -> None:
    tokens = [feed["input_ids"].shape[1] for feed, _ in sentiment.encode(target.build_bodies(workload))]

    assert fmean(tokens) == pytest.approx(mean, rel=0.05)
    assert low <= min(tokens)
    assert high >= max(tokens)
    assert workload != "mixed" or median(tokens) < 40


def test_the_raw_loop_feeds_only_the_inputs_of_the_graph(tmp_path: Path) -> None:
    """Each window of a passage is one run. A graph without `token_type_ids` does not get them."""
    path = tiny.bundle(tmp_path, "qa", task="question-answering", max_length=32)
    file = tmp_path / "other.onnx"
    other = tiny.graph("question-answering")
    for i, value in enumerate(list(other.graph.input)):
        if value.name == "token_type_ids":
            del other.graph.input[i]
            other.graph.node.insert(0, onnx.helper.make_node("Sub", ["input_ids", "input_ids"], ["token_type_ids"]))
    onnx.save(other, str(file))
    body = target.Body(json.dumps({"inputs": {"question": "good ?", "context": "a good film " * 30}}).encode(), 1)
    raw = RawLoop(path, file)
    runs = raw.encode([body])

    assert sorted(runs[0][0]) == ["attention_mask", "input_ids"]
    assert len(runs) > 1
    assert raw.measure(runs, threads=2, seconds=0.1, stop=threading.Event()) > 0


def test_a_graph_with_an_unknown_input_is_refused(models: Path, tmp_path: Path) -> None:
    graph = tiny.graph()
    graph.graph.input.append(onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1]))
    onnx.save(graph, str(tmp_path / "odd.onnx"))

    with pytest.raises(StartError, match="pixels"):
        RawLoop(models / "tiny", tmp_path / "odd.onnx")


INFO = {"name": "tiny", "provider": "cpu", "precision": "fp32"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": "0" * 12}, StartError, "--bundle"),
        ({"provider": "cuda"}, StartError, "--provider cpu"),
        # the precision of a graph that the bundle does not have for the CPU
        ({"provider": "cuda", "precision": "fp16"}, StartError, "--provider cpu"),
        ({"precision": "int8"}, BertServeError, "int8"),
    ],
)
def test_a_bundle_that_is_not_what_the_service_runs_is_refused(
    models: Path, changes: dict[str, str], error: type[Exception], message: str
) -> None:
    """Another bundle, another version of it, a graph that it does not have, or another provider: the ratio would compare two things."""
    info = INFO | {"version": RawLoop(models / "tiny").bundle.version}

    assert RawLoop(models / "tiny", served=info).description["precision"] == "fp32"
    with pytest.raises(error, match=message):
        RawLoop(models / "tiny", served=info | changes)
