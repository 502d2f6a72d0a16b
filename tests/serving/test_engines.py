"""Runs of several threads while nothing else runs: when they are taken, and that they answer the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import tiny
from application import call
from embedded import ROOT
from fakes import FakeEngine
from service import bundle, registry
from service.backlog import Backlog
from service.cost import CostModel
from service.engine import OnnxEngine
from service.engines import LENGTHS, Engines, IdleEngine, lengths, pays_from
from service.metrics import Metrics
from service.model import Model
from service.scheduler import Scheduler
from service.tasks.classify import Request
from service.tokenization import Encoding, Tokenizer


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((0.9, 1.0, 1.2, 1.5), 64),
        ((1.3, 1.0, 1.2, 1.5), 64),
        ((1.2, 1.2, 1.2, 1.2), 16),
        ((1.5, 1.5, 1.5, 1.0), None),
        ((1, 1, 1, 1), None),
    ],
)
def test_it_pays_from_the_length_on_from_which_all_longer_runs_gain(ratios: tuple[float, ...], expected: int | None) -> None:
    """A gain at a short length that a longer one does not have is noise."""
    alone = [(1, length, length * 1e-3) for length in LENGTHS]
    together = [(1, length, length * 1e-3 / ratio) for length, ratio in zip(LENGTHS, ratios, strict=True)]

    assert expected == pays_from(alone, together)


def test_what_is_over_at_once_needs_no_threads() -> None:
    """A ratio alone is noise where a run takes microseconds."""
    assert pays_from([(1, 16, 2e-4)], [(1, 16, 1e-4)]) is None


@pytest.mark.parametrize(("longest", "expected"), [(512, [16, 32, 64, 128]), (50, [16, 32]), (8, [8])])
def test_engines_are_timed_at_lengths_that_the_model_takes(longest: int, expected: list[int]) -> None:
    """A model of short texts is timed at what it has, at one length at least."""
    assert [(1, length) for length in expected] == lengths(longest)


def test_only_lone_runs_of_enough_tokens_take_it(tmp_path: Path) -> None:
    """Short texts, and texts beside others, run with one thread; what ran is counted, and the cost model learns of lanes' runs only."""
    loaded = bundle.load(tiny.bundle(tmp_path))
    metrics, lanes, threads = Metrics(), FakeEngine(), FakeEngine()
    scheduler = Scheduler(Backlog(max_batch_tokens=4096, max_queue_tokens=4096), lanes=1)
    cost = CostModel(loaded.manifest.flops, fixed_s=1.0, rate=1e12)
    model = Model(
        loaded,
        loaded.manifest.graphs[0],
        tokenizer=Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer),
        engines=Engines(lanes, IdleEngine(threads, threads=2, min_tokens=10)),
        cost=cost,
        scheduler=scheduler,
        metrics=metrics.model("text-classification", "tiny"),
    )

    async def check() -> None:
        scheduler.start()
        try:
            await model.predict([Request("good")], timeout_s=10)
            assert ([1], []) == (lanes.batches, threads.batches)
            assert cost.slowdown < 1.0
            slowdown = cost.slowdown
            await model.predict([Request("good " * 20)], timeout_s=10)
            assert ([1], [1]) == (lanes.batches, threads.batches)
            assert slowdown == cost.slowdown
            await model.predict([Request("good bad fine")] * 4, timeout_s=10)
            assert ([1], [1, 4]) == (lanes.batches, threads.batches)
        finally:
            await scheduler.stop(5)

    asyncio.run(check())
    assert 'bertserve_idle_runs_total{model="tiny",task="text-classification"} 2.0' in metrics.page().decode()


@pytest.mark.parametrize("name", ["sentiment", "ner", "qa", "fill-mask"])
def test_several_threads_answer_the_same(name: str) -> None:
    """The same row, bit for bit, whatever ran beside it: threads share out rows and columns, never one sum."""
    loaded = bundle.load(ROOT / "models" / name)
    graph, spec = loaded.graph("cpu"), loaded.manifest.tokenizer
    engines = [
        OnnxEngine(loaded.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, threads=threads)
        for threads in (1, 3)
    ]
    rng = np.random.default_rng(0)

    for length in (7, 64, 200):
        ids = rng.integers(1000, 20000, length)
        encoding = Encoding(ids, np.zeros(length, dtype=np.int64), masks=(2, 5))
        one, several = (engine.run([encoding])[0] for engine in engines)
        assert list(one) == list(several)
        for output, expected in one.items():
            np.testing.assert_array_equal(several[output], expected)


def test_one_thread_makes_no_second_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--idle-threads 1` keeps the memory; more are told in a model's description where they pay."""
    tiny.bundle(tmp_path, "tiny")
    monkeypatch.setattr(registry, "pays_from", lambda alone, together: 16)

    def told(threads: int) -> object:
        return call(tmp_path, "GET", "/models/tiny", settings={"idle_threads": threads}).json()["graph"]["idle"]

    assert told(1) is None
    assert {"threads": 2, "min_tokens": 16} == told(2)


def test_a_session_that_does_not_pay_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more threads are no faster the lanes' session runs everything."""
    tiny.bundle(tmp_path, "tiny")
    monkeypatch.setattr(registry, "pays_from", lambda alone, together: None)

    assert call(tmp_path, "GET", "/models/tiny", settings={"idle_threads": 2}).json()["graph"]["idle"] is None
