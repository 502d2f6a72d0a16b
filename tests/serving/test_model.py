"""`Model`, between requests and inference threads: batching by graph, and errors that name their input."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from application import model_of
from bertserve.service.bundle import files
from bertserve.service.engine.cost_model import CostModel
from bertserve.service.engine.engines import Engines
from bertserve.service.errors import TooLargeError
from bertserve.service.metrics import Metrics
from bertserve.service.models.model import Model
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.tasks.batch import Batch, TaskGenerator, TaskModel
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.classify import ClassifyRequest
from bertserve.service.tasks.cost import Cost
from fakes import FakeEngine
from served_socket import until


def model_in(folder: Path, engine: FakeEngine, *, batch_variant: bool = False, **changes: Any) -> tuple[Model, Scheduler]:
    """Returns a model on a fake engine with its scheduler. Its cost makes all texts worth a common batch."""
    loaded = files.load_bundle(tiny.bundle(folder, **changes))
    scheduler = Scheduler(RequestQueue(max_batch_tokens=4096, max_queue_tokens=4096), threads=1)
    cost = CostModel(loaded.manifest.flops, fixed_s=1.0, rate=1e12)
    model = model_of(loaded, Engines(engine), scheduler=scheduler, metrics=Metrics(), cost=cost, batch_variant=batch_variant)
    scheduler.start()
    return model, scheduler


@pytest.mark.parametrize(
    ("invariant", "batch_variant", "batches"), [(True, False, [1, 4]), (False, False, [1, 1, 1, 1, 1]), (False, True, [1, 4])]
)
async def test_only_batch_invariant_graphs_are_batched(tmp_path: Path, invariant: bool, batch_variant: bool, batches: list[int]) -> None:
    """A graph whose scores depend on the batch runs one text at a time, unless the operator opts in."""
    engine = FakeEngine()
    model, scheduler = model_in(tmp_path, engine, batch_variant=batch_variant, batch_invariant=invariant)
    engine.gate.clear()
    first = asyncio.ensure_future(model.predict([ClassifyRequest("good")], timeout_s=10))
    await asyncio.to_thread(engine.entered.acquire, timeout=20)
    rest = asyncio.ensure_future(model.predict([ClassifyRequest("bad")] * 4, timeout_s=10))
    await until(lambda: scheduler.queue.queue_items == 4)
    engine.gate.set()
    await asyncio.gather(first, rest)
    await scheduler.stop(5)
    assert batches == engine.batches


@pytest.mark.parametrize("steps", [[], [Batch([])], ["again"]], ids=["first rows", "step", "second rows"])
async def test_an_input_that_cannot_be_decoded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[Any]) -> None:
    """The error has the index of the input, at whichever step of its decoding it is raised."""

    def failing(request: Any, model: TaskModel) -> TaskGenerator:
        (tokens,) = model.tokenizer.tokenize([request.text])
        batch = Batch([model.tokenizer.assemble(tokens.ids)], Cost(answer_bytes=9))
        yield batch
        for step in steps:
            yield batch if step == "again" else step
        if request.text == "bad":
            raise TooLargeError("too large")
        return 1

    monkeypatch.setitem(TASKS, "text-classification", replace(TASKS["text-classification"], function=failing))  # type: ignore[arg-type]
    model, scheduler = model_in(tmp_path, FakeEngine())
    with pytest.raises(TooLargeError) as caught:
        await model.predict([ClassifyRequest(text) for text in ("good", "fine", "bad", "good")], timeout_s=10)
    assert (2, 0, 0) == (caught.value.input_index, scheduler.queue.queue_items, scheduler.queue.queue_tokens)
    await scheduler.stop(5)
