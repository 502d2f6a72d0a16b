"""Multi-threaded runs, whose outputs are identical, and the cost model, which predicts runs."""

import threading
from collections.abc import Callable
from functools import partial
from math import isfinite
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.bundle.manifest import Flops
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.model_engines import ModelEngines
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import StartError
from bertserve.service.models import loading
from bertserve.service.text.tokenizer import Encoding
from support import metric, tiny
from support.app_client import call_once, serving, state_of
from support.bundles import included
from support.fakes import FakeEngine


def wait_for_multi_threaded(model: str) -> None:
    """Waits until a model's multi-threaded engine is created, or has failed."""
    for thread in [thread for thread in threading.enumerate() if thread.name == f"multi-threaded-{model}"]:
        assert not thread.daemon  # a daemon thread would return to a finished interpreter and abort the process
        thread.join(20)


def test_no_run_waits_for_the_multi_threaded_engine() -> None:
    single, multi, gate = FakeEngine(), FakeEngine(), threading.Event()
    calls: list[str] = []

    def make() -> OnnxEngine:
        calls.append(threading.current_thread().name)
        assert gate.wait(20)
        return multi

    engines = ModelEngines(single, make, model="m", threads=2, min_tokens=10)
    assert engines.for_multi_threaded_run(9) is single
    assert calls == []
    first: list[OnnxEngine] = []
    waiter = threading.Thread(target=lambda: first.append(engines.for_multi_threaded_run(10)), daemon=True)  # like the inference threads
    waiter.start()
    waiter.join(20)
    assert [*first, engines.for_multi_threaded_run(10)] == [single, single]
    gate.set()
    wait_for_multi_threaded("m")
    assert [engines.for_multi_threaded_run(10), engines.for_multi_threaded_run(10)] == [multi, multi]
    assert calls == ["multi-threaded-m"]


@pytest.mark.parametrize("error", [StartError("no such file"), MemoryError()])
def test_runs_stay_single_threaded_if_the_second_engine_fails(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why once, and the service does not try again."""
    single, calls = FakeEngine(), []

    def make() -> OnnxEngine:
        calls.append(1)
        raise error

    engines = ModelEngines(single, make, model="m", threads=2, min_tokens=10)
    for _ in range(3):
        assert engines.for_multi_threaded_run(10) is single
        wait_for_multi_threaded("m")

    assert calls == [1]
    [record] = caplog.records
    assert ("no such file" if isinstance(error, StartError) else "MemoryError.") in record.message


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_bytes(b"x")], ids=["gone", "altered"])
def test_a_changed_bundle_gets_no_second_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None]
) -> None:
    """The second session would give other results than the loaded model."""
    bundle = tiny.bundle(tmp_path)
    monkeypatch.setattr(loading, "min_multi_threaded_tokens", lambda cost, nodes, longest: 1)
    service = state_of(tmp_path, threads=2)
    engines = service.registry.get("tiny").engines
    change(bundle / "model.cpu.fp32.onnx")

    engines.for_multi_threaded_run(1)
    wait_for_multi_threaded("tiny")
    assert engines.for_multi_threaded_run(1) is engines.single_threaded
    assert f"`{bundle}/model.cpu.fp32.onnx`" in caplog.text


async def test_a_run_is_multi_threaded_only_with_enough_tokens(models: Path) -> None:
    """The predictions for one thread learn nothing from it."""
    single, several = FakeEngine(), FakeEngine()
    service = state_of(models, threads=1)
    model = service.registry.get("tiny")
    model.engines = ModelEngines(single, lambda: several, model="tiny", threads=2, min_tokens=10)
    model.engines.for_multi_threaded_run(10)
    wait_for_multi_threaded("tiny")
    before = model.predict_seconds(1, 8)

    async with serving(service) as client:
        await client.post("/classify", json={"inputs": "good"})
        assert (single.batches, several.batches) == ([1], [])
        after_one_run = model.predict_seconds(1, 8)
        await client.post("/classify", json={"inputs": "good " * 20})
        assert (single.batches, several.batches) == ([1], [1])
        assert before != after_one_run == model.predict_seconds(1, 8)
        model.predict_seconds = lambda rows, length: 1.0  # a batch saves time
        await client.post("/classify", json={"inputs": ["good bad fine"] * 4})
        assert (single.batches, several.batches) == ([1], [1, 4])
        page = (await client.get("/metrics")).text
    assert metric(page, "multi_threaded_runs_total", model="tiny") == 2


@pytest.mark.parametrize(
    "name",
    ["sentiment", "fill-mask", *(pytest.param(name, marks=pytest.mark.full_grid) for name in ("ner", "qa", "embed", "nli", "rerank"))],
)
def test_several_threads_give_the_same_output_as_one(name: str) -> None:
    """Outputs are bit-identical: threads divide rows and columns, but never split a sum."""
    engines = [included(name, threads=threads).engine for threads in (1, 3)]
    rng = np.random.default_rng(0)

    for length in (7, 64, 200):
        ids = rng.integers(1000, 20000, length)
        encoding = Encoding(ids, np.zeros(length, dtype=np.int64), masks=(2, 5))
        one, several = (engine.run([encoding])[0] for engine in engines)
        assert list(several) == list(one)
        for output, expected in one.items():
            np.testing.assert_array_equal(several[output], expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_multi_thread_disables_the_second_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """With more threads, the model's description shows them."""
    tiny.bundle(tmp_path, "tiny")
    monkeypatch.setattr(loading, "min_multi_threaded_tokens", lambda cost, nodes, longest: 16)

    graph = call_once(state_of(tmp_path, multi_threads=threads), "GET", "/models/tiny").json()["graph"]
    assert graph["multi_threaded_run"] == [None, {"threads": 2, "min_tokens": 16}][threads - 1]


FLOPS = Flops(linear=2e7, quadratic=9e3)


def seconds_of(rows: int, length: int, *, fixed_s: float = 1e-3, rate: float = 1e11) -> float:
    return fixed_s + rows * (FLOPS.linear * length + FLOPS.quadratic * length**2) / rate


def model() -> CostModel:
    """Returns a cost model whose fixed cost is a third of the cost of a short run."""
    return CostModel(FLOPS, [(1, length, seconds_of(1, length)) for length in (8, 128)])


def test_one_stall_has_little_effect() -> None:
    cost, fresh = model(), model()
    cost.observe(1, 20, 1000.0)
    for rows, length in ((1, 20), (8, 20), (1, 500)):
        assert 1 < cost.predict_seconds(rows, length) / fresh.predict_seconds(rows, length) < 1.05


def test_the_fixed_cost_is_learned_from_runs_in_service() -> None:
    """If the fixed cost is three times that of the warm-up, the predictions for all shapes adapt."""
    cost, true_s = model(), partial(seconds_of, fixed_s=3e-3)
    for i in range(5000):
        rows, length = 1 + i % 3, 10 + 7 * (i % 11)
        cost.observe(rows, length, true_s(rows, length))
    for rows, length in ((1, 8), (1, 80), (8, 20)):
        assert cost.predict_seconds(rows, length) == pytest.approx(true_s(rows, length), rel=0.02)
    assert cost.slowdown * cost.fixed_s == pytest.approx(3e-3, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 512), st.integers(1, 512), st.floats(min_value=0)), max_size=20), st.integers(1, 1000))
def test_predictions_stay_finite_for_any_measured_time(runs: list[tuple[int, int, float]], times: int) -> None:
    cost = model()
    for i in range(min(times, 50 * len(runs))):
        cost.observe(*runs[i % len(runs)])
    assert all(isfinite(cost.predict_seconds(*shape)) and cost.predict_seconds(*shape) > 0 for shape in ((1, 1), (64, 512)))


@given(st.floats(1e-6, 1e-1), st.floats(1e6, 1e13))
def test_the_fit_finds_the_fixed_cost_and_the_rate(fixed_s: float, rate: float) -> None:
    true_s = partial(seconds_of, fixed_s=fixed_s, rate=rate)
    cost = CostModel(FLOPS, [(1, length, true_s(1, length)) for length in (8, 32, 128)])
    for rows, length in ((1, 8), (1, 512), (32, 128)):
        assert cost.predict_seconds(rows, length) == pytest.approx(true_s(rows, length), rel=1e-3)


@pytest.mark.parametrize("seconds", [(3e-3, 2e-3, 1e-3), (1e-3, 1e-3, 1e-3), (1e-9, 1e-3, 1.0), (0.0, 0.0, 0.0)])
def test_noisy_timings_give_a_plausible_cost(seconds: tuple[float, ...]) -> None:
    cost = CostModel(FLOPS, zip((1, 1, 1), (8, 32, 128), seconds, strict=True))
    assert cost.fixed_s >= 0
    assert 0 < cost.predict_seconds(1, 8) <= cost.predict_seconds(1, 128) <= cost.predict_seconds(2, 128)
