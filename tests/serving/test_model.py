"""`Model`, between requests and inference threads: batching by graph, errors that name their input, and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from application import model_of
from bertserve.service.bundle import files
from bertserve.service.engine.cost import CostModel
from bertserve.service.engine.engines import Engines
from bertserve.service.errors import InvalidValueError, TooLargeError
from bertserve.service.metrics import Metrics
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.tasks.batch import Batch, TaskModel, TaskRun
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.classify import ClassifyParameters, ClassifyRequest
from bertserve.service.tasks.cost import Cost
from bertserve.service.text.tokenizer import SHORT_CHARS
from fakes import FakeEngine


class Bench:
    """A model on a fake engine."""

    def __init__(
        self,
        folder: Path,
        *,
        batch_variant: bool = False,
        guilty_token: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        **changes: Any,
    ) -> None:
        loaded = files.load_bundle(tiny.bundle(folder, "m", **changes))
        self.metrics = Metrics()
        self.queue = RequestQueue(max_batch_tokens=4096, max_queue_tokens=4096)
        self.scheduler = Scheduler(self.queue, threads=1, clock=clock)
        self.engine = FakeEngine(guilty_token=guilty_token)
        cost = CostModel(loaded.manifest.flops, fixed_s=1.0, rate=1e12)
        self.model = model_of(
            loaded, Engines(self.engine), scheduler=self.scheduler, metrics=self.metrics, cost=cost, batch_variant=batch_variant
        )

    def count(self, name: str, **labels: str) -> float:
        wanted = {f'{key}="{value}"' for key, value in ({"task": "text-classification", "model": "m"} | labels).items()}
        for line in self.metrics.page().decode().splitlines():
            head, _, value = line.rpartition(" ")
            if head.startswith(f"bertserve_{name}{{") and wanted <= set(head[head.index("{") + 1 : -1].split(",")):
                return float(value)
        return 0.0


def play(bench: Bench, check: Callable[[], Awaitable[Any]]) -> None:
    """Runs a check with the inference threads started."""

    async def run() -> None:
        bench.scheduler.start()
        try:
            await asyncio.wait_for(check(), 20)
        finally:
            bench.engine.gate.set()
            await bench.scheduler.stop(5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("invariant", "batch_variant", "batches"), [(True, False, [1, 4]), (False, False, [1, 1, 1, 1, 1]), (False, True, [1, 4])]
)
def test_only_batch_invariant_graphs_are_batched(tmp_path: Path, invariant: bool, batch_variant: bool, batches: list[int]) -> None:
    """A graph whose scores depend on the batch runs one text at a time, unless the operator opts in."""
    bench = Bench(tmp_path, batch_invariant=invariant, batch_variant=batch_variant)

    async def check() -> None:
        bench.engine.gate.clear()
        first = asyncio.ensure_future(bench.model.predict([ClassifyRequest("good")], timeout_s=10))
        await asyncio.sleep(0)
        await asyncio.to_thread(bench.engine.entered.acquire, timeout=20)
        rest = asyncio.ensure_future(bench.model.predict([ClassifyRequest("bad")] * 4, timeout_s=10))
        await asyncio.sleep(0)
        bench.engine.gate.set()
        await asyncio.gather(first, rest)

    play(bench, check)
    assert batches == bench.engine.batches


@pytest.mark.parametrize("padding", ["", " " * SHORT_CHARS], ids=["inline", "on an inference thread"])
def test_an_input_that_cannot_be_encoded_is_named(tmp_path: Path, padding: str) -> None:
    """The error has the index of the input, on whichever thread it is tokenized. No input of the request runs."""
    bench = Bench(tmp_path)

    async def check() -> None:
        with pytest.raises(InvalidValueError, match="60 tokens") as caught:
            await bench.model.predict(
                [ClassifyRequest("good" + padding), ClassifyRequest("good " * 60, parameters=ClassifyParameters(truncation=False))],
                timeout_s=10,
            )
        assert 1 == caught.value.input_index

    play(bench, check)
    assert [] == bench.engine.batches
    assert (0, 0) == (bench.queue.queue_items, bench.queue.queue_tokens)


@pytest.mark.parametrize("steps", [[], [Batch([])], ["again"]], ids=["first rows", "step", "second rows"])
def test_an_input_that_cannot_be_decoded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[Any]) -> None:
    """The error has the index of the input, at whichever step of its decoding it is raised."""
    bench = Bench(tmp_path)

    def failing(request: Any, model: TaskModel) -> TaskRun:
        (tokens,) = model.tokenizer.tokenize([request.text])
        batch = Batch([model.tokenizer.assemble(tokens.ids)], Cost(answer_bytes=9))
        yield batch
        for step in steps:
            yield batch if step == "again" else step
        if request.text == "bad":
            raise TooLargeError("too large")
        return 1

    monkeypatch.setitem(TASKS, "text-classification", replace(TASKS["text-classification"], run=failing))  # type: ignore[arg-type]

    async def check() -> None:
        with pytest.raises(TooLargeError) as caught:
            await bench.model.predict([ClassifyRequest(text) for text in ("good", "fine", "bad", "good")], timeout_s=10)
        assert 2 == caught.value.input_index

    play(bench, check)
    assert (0, 0) == (bench.queue.queue_items, bench.queue.queue_tokens)


def test_a_batch_is_counted_in_all_metrics(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def check() -> None:
        await bench.model.predict([ClassifyRequest("good"), ClassifyRequest("good bad fine"), ClassifyRequest("good " * 40)], timeout_s=10)

    play(bench, check)
    assert [3] == bench.engine.batches
    assert [40, 3 * 32 - 40] == [bench.count("tokens_total", kind=kind) for kind in ("real", "padded")]
    assert [1, 3, 1] == [bench.count(name) for name in ("batch_rows_count", "batch_rows_sum", "inference_seconds_count")]
    assert [1, 1, 1, 1] == [
        bench.count(name) for name in ("truncated_total", "tokenize_seconds_count", "queue_seconds_count", "decode_seconds_count")
    ]
