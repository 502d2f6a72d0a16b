"""Runs that are replayed as CUDA graphs. No test needs a GPU: bound runs work on the CPU too, where nothing is captured."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bertserve.service.bundle import files
from bertserve.service.bundle.graph_spec import ShapeBucket, ShapePlan
from bertserve.service.engine import cuda_graphs, onnx_engine
from bertserve.service.engine.cuda_graphs import CudaGraphSession
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.engine.sessions import open_session
from bertserve.service.errors import StartError
from bertserve.service.providers import GpuOptions
from bertserve.service.text.tokenizer import Encoding
from support import tiny

PLAN = ShapePlan(buckets=(ShapeBucket(length=8, rows=(1, 2, 6)), ShapeBucket(length=16, rows=(1, 3)), ShapeBucket(length=32, rows=(1, 2))))
CPU = ("cpu", 0)


def texts(rows: int, length: int, seed: int = 0) -> list[Encoding]:
    dice = np.random.default_rng(seed)
    return [Encoding(dice.integers(5, 60, length), np.zeros(length, dtype=np.int64), masks=(1,)) for _ in range(rows)]


class Sessions:
    """Sessions on the CPU that count their runs: the shared one first."""

    def __init__(self) -> None:
        self.references: list[Any] = []
        self.plain: list[int] = []  # runs without bound buffers, by session
        self.options: list[GpuOptions] = []

    def open(self, path: Path, graph: Any, *, gpu: GpuOptions, **_: Any) -> Any:
        session, number = open_session(path, graph, provider="cpu"), len(self.references)
        run = session.run

        def count_and_run(*arguments: Any) -> Any:
            self.plain.append(number)
            return run(*arguments)

        session.run = count_and_run
        self.references.append(weakref.ref(session))
        self.options.append(gpu)
        return session


@pytest.fixture(name="sessions")
def counted_sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    sessions = Sessions()
    monkeypatch.setattr(onnx_engine, "open_session", sessions.open)
    monkeypatch.setattr(onnx_engine, "CudaGraphSession", lambda session, open_own, device: CudaGraphSession(session, open_own, CPU))
    return sessions


@pytest.fixture(name="thread")
def inference_thread() -> Iterator[Callable[..., Any]]:
    """Returns a function that calls another one on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def engine_of(path: Path, precision: str = "fp16", side: Any = "right", file: str | None = None, **changes: Any) -> OnnxEngine:
    """Returns an engine that believes that it is on CUDA."""
    fields = {"shapes": PLAN, "provider": "cuda", "precision": precision} | changes
    graph = files.load_bundle(path).manifest.graphs[0].model_copy(update=fields)
    return OnnxEngine(path / (file or graph.file), graph, pad_id=0, padding_side=side, gpu=GpuOptions(2, cuda_graphs=True))


@pytest.mark.parametrize("task", list(tiny.OUTPUTS))
def test_bound_runs_give_the_same_bits(tmp_path: Path, sessions: Sessions, thread: Any, task: str) -> None:
    """This applies to all planned shapes, and a later run does not change the outputs of an earlier one."""
    plan = PLAN.model_copy(update={"masks": (1, 2, 8)}) if task == "fill-mask" else PLAN
    engine = engine_of(tiny.bundle(tmp_path, task=task), shapes=plan)
    batches = [texts(*shape, seed) for shape in plan.all_shapes for seed in (0, 1)]
    expected = [engine.run(batch) for batch in batches]  # on this thread, in the shared session
    for shape in plan.all_shapes:
        thread(engine.warm_up, *shape)
    sessions.plain.clear()
    actual = [thread(engine.run, batch) for batch in batches]

    assert sessions.plain == []
    for rows, others in zip(expected, actual, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert other.keys() == row.keys()
            assert all(value.tobytes() == other[name].tobytes() for name, value in row.items())


def test_a_run_with_other_outputs_is_not_replayed(tmp_path: Path, sessions: Sessions, thread: Any) -> None:
    """The warm-up captures small outputs. A batch that needs the others runs in the shared session."""
    path = tiny.bundle(tmp_path, task="question-answering")
    whole, small = files.load_bundle(path).manifest.graphs[0].outputs
    engine = engine_of(path, outputs=(whole,), small_outputs=(small,))
    thread(engine.warm_up, 2, 8)
    sessions.plain.clear()

    assert [set(row) for row in thread(partial(engine.run, small_outputs=True), texts(2, 8))] == [{small.name}] * 2
    assert sessions.plain == []
    assert [set(row) for row in thread(engine.run, texts(2, 8))] == [{whole.name}] * 2
    assert sessions.plain == [0]


def test_each_thread_has_a_session_and_the_others_share_one(tmp_path: Path, sessions: Sessions, thread: Any) -> None:
    """Runs are captured only in the warm-up. The sessions of threads have the option for CUDA graphs, the shared one does not."""
    engine = engine_of(tiny.bundle(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        threads = (thread, lambda *arguments: pool.submit(*arguments).result())
        for call in threads:
            call(engine.warm_up, 2, 8)
        assert [(gpu.device_id, gpu.cuda_graphs) for gpu in sessions.options] == [(2, False), (2, True), (2, True)]
        sessions.plain.clear()
        for call in threads:
            call(engine.run, texts(2, 8))
            assert sessions.plain == []
            call(engine.run, texts(1, 8))  # not captured
            call(engine.run, texts(1, 8))
            assert sessions.plain == [0, 0]
            sessions.plain.clear()
    engine.run(texts(2, 8))
    assert sessions.plain == [0]


def test_the_sessions_of_threads_end_with_their_engine(tmp_path: Path, sessions: Sessions, thread: Any) -> None:
    engine = engine_of(tiny.bundle(tmp_path))
    thread(engine.warm_up, 2, 8)
    assert [session() is not None for session in sessions.references] == [True, True]
    del engine
    thread(gc.collect)  # the thread lives, as after a reload
    assert [session() is not None for session in sessions.references] == [False, False]


@pytest.mark.parametrize("limit", [{"MAX_TOKENS": 15}, {"MAX_RUNS": 0}, {"MAX_OUTPUT_BYTES": 1}])
def test_large_runs_and_those_beyond_a_limit_use_the_shared_session(
    tmp_path: Path, sessions: Sessions, thread: Any, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(cuda_graphs, name, value)
    engine = engine_of(tiny.bundle(tmp_path))
    thread(engine.warm_up, 2, 8)
    sessions.plain.clear()
    thread(engine.run, texts(2, 8))
    assert sessions.plain == [0]


@pytest.mark.parametrize("reason", ["fp32", "attention"])
def test_other_graphs_are_not_captured(tmp_path: Path, sessions: Sessions, thread: Any, reason: str) -> None:
    engine = engine_of(
        tiny.bundle(tmp_path, **({"attention_heads": (2,)} if reason == "attention" else {})), reason if reason == "fp32" else "fp16"
    )
    thread(engine.warm_up, 2, 8)
    assert len(sessions.references) == 1


def test_without_a_session_for_captures_a_model_still_answers(
    tmp_path: Path, sessions: Sessions, thread: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node on the CPU, or too little memory, is logged once."""

    def open_shared(*arguments: Any, gpu: GpuOptions, **more: Any) -> Any:
        if gpu.cuda_graphs:
            raise StartError("all nodes must be on CUDA.")
        return sessions.open(*arguments, gpu=gpu, **more)

    monkeypatch.setattr(onnx_engine, "open_session", open_shared)
    engine = engine_of(tiny.bundle(tmp_path))
    for shape in PLAN.all_shapes:
        thread(engine.warm_up, *shape)
    assert len(thread(engine.run, texts(2, 8))) == 2
    [line] = caplog.messages
    assert "all nodes must be on CUDA." in line


class FakeSession:
    """Records the graph ids of its runs; all runs except the ones before a capture wait for `gate`."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def run(self, names: Any, feed: Any, options: Any = None) -> list[Any]:
        if options is None:  # not the run before a capture
            self.entered.set()
            assert self.gate.wait(20)
        self.ids.append("plain" if options is None else options.get_run_config_entry("gpu_graph_id"))
        return [np.zeros((len(feed["input_ids"]), 3), dtype=np.float16)]

    def io_binding(self) -> Any:
        return self

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        assert (name, value.data_type()) == ("input_ids", "tensor(int64)")

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        assert (name, value.data_type()) == ("logits", "tensor(float16)")

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        assert binding is self
        self.entered.set()
        assert self.gate.wait(20)
        self.ids.append(options.get_run_config_entry("gpu_graph_id"))


def feed(rows: int, length: int) -> dict[str, Any]:
    return {"input_ids": np.ones((rows, length), dtype=np.int64)}


def test_each_captured_run_has_its_own_id() -> None:
    """The first run of a shape disables the capture, and then its own id captures it; later runs replay it."""
    shared, own = FakeSession(), FakeSession()
    graphs = CudaGraphSession(shared, lambda: own, CPU)
    graphs.run(["logits"], feed(1, 8))
    with graphs.capturing():
        for shape in ((4, 8), (2, 8)):
            graphs.run(["logits"], feed(*shape))
    for shape in ((2, 8), (4, 8), (2, 8), (1, 8)):
        graphs.run(["logits"], feed(*shape))
    assert shared.ids == ["plain", "plain"]
    assert own.ids == ["-1", "1", "1", "-1", "2", "2", "2", "1", "2"]


def test_a_capture_runs_alone() -> None:
    """While ONNX Runtime captures a run, CUDA refuses to allocate memory in all threads, so other runs wait for its end."""
    shared, own, other = FakeSession(), FakeSession(), FakeSession()
    graphs, others = CudaGraphSession(shared, lambda: own, CPU), CudaGraphSession(other, None, CPU)
    own.gate.clear()

    def capture() -> None:
        with graphs.capturing():
            graphs.run(["logits"], feed(1, 8))

    with ThreadPoolExecutor(2) as pool:
        capturing = pool.submit(capture)
        assert own.entered.wait(20)
        running = pool.submit(others.run, ["logits"], feed(1, 8))
        assert not other.entered.wait(0.1)
        own.gate.set()
        capturing.result(20)
        running.result(20)
    assert other.ids == ["plain"]


def test_a_run_that_hangs_stops_only_the_captures(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_WAIT_S", 0.1)
    shared, own, last = FakeSession(), FakeSession(), FakeSession()
    graphs, others = CudaGraphSession(shared, lambda: own, CPU), CudaGraphSession(last, None, CPU)
    last.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        hangs = pool.submit(others.run, ["logits"], feed(1, 8))
        assert last.entered.wait(20)

        def load() -> None:
            with graphs.capturing():
                graphs.run(["logits"], feed(1, 8))
                graphs.run(["logits"], feed(2, 8))

        try:
            pool.submit(load).result(10)
        finally:
            last.gate.set()
        hangs.result(20)
    assert shared.ids == ["plain", "plain"]
    [line] = caplog.messages
    assert "0.1 s" in line


def test_half_precision_outputs_become_float32(tmp_path: Path, sessions: Sessions, thread: Any) -> None:
    """They are copied in half precision and cast on the host."""
    path = tiny.bundle(tmp_path)
    model = onnx.load(path / files.load_bundle(path).manifest.graphs[0].file)
    model.graph.node.append(helper.make_node("Cast", ["logits"], ["half"], to=TensorProto.FLOAT16))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("half", TensorProto.FLOAT16, ["rows", "labels"]))
    engine = engine_of(path)
    exact = engine.run(texts(2, 8))
    onnx.save(model, path / "half.onnx")
    outputs = [files.load_bundle(path).manifest.graphs[0].outputs[0].model_copy(update={"name": "half"})]
    half = engine_of(path, file="half.onnx", outputs=tuple(outputs))
    plain = half.run(texts(2, 8))
    thread(half.warm_up, 2, 8)
    bound = thread(half.run, texts(2, 8))
    for row, one, two in zip(exact, plain, bound, strict=True):
        assert np.float32 == one["half"].dtype == two["half"].dtype
        assert one["half"].tobytes() == two["half"].tobytes() == row["logits"].astype(np.float16).astype(np.float32).tobytes()
