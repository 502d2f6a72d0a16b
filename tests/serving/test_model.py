"""`Model`, between requests and inference threads: batching by graph, errors that name their input, and faults of a graph."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

import tiny
from app_client import busy_client, error_of, fake_service, serving, state_of, until_queued
from bertserve.service.bundle import files
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import DeviceLostError, EngineError, TooLargeError
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Cost
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel
from bertserve.service.text.tokenizer import SHORT_CHARS, Encoding
from fakes import FakeEngine, FaultySession, wrap_sessions
from served_socket import until


@pytest.mark.parametrize(
    ("invariant", "batch_variant", "batches"), [(True, False, [1, 4]), (False, False, [1, 1, 1, 1, 1]), (False, True, [1, 4])]
)
@pytest.mark.parametrize("text", ["bad", "bad " * SHORT_CHARS], ids=["short", "long"])
async def test_texts_of_several_callers_share_a_run_of_a_batch_invariant_graph(
    tmp_path: Path, invariant: bool, batch_variant: bool, batches: list[int], text: str
) -> None:
    """A graph whose scores depend on the batch runs one text at a time, unless the operator opts in.

    Long texts are tokenized while a run is active. If inference threads tokenized them, each would run alone.
    """
    engine = FakeEngine()
    tiny.bundle(tmp_path, batch_invariant=invariant)
    service = fake_service(tmp_path, engine, max_batch_tokens=4096, batch_variant_graphs=batch_variant)
    service.scheduler.clock = lambda: 0.0  # all arrive together, also on a machine that stalls
    async with busy_client(service, engine) as client:
        rest = [asyncio.ensure_future(client.post("/classify", json={"inputs": text})) for _ in range(4)]
        await until_queued(service, 4)
        engine.gate.set()
        assert [200] * 4 == [answer.status_code for answer in await asyncio.gather(*rest)]
    assert batches == engine.batches


@pytest.mark.parametrize("steps", [[], [Step([])], ["again"]], ids=["first rows", "step", "second rows"])
async def test_an_input_that_cannot_be_decoded_is_named(models: Path, monkeypatch: pytest.MonkeyPatch, steps: list[Any]) -> None:
    def fail(request: Any, model: TaskModel) -> TaskGenerator:
        (tokens,) = model.tokenizer.tokenize([request.text])
        first = Step([model.tokenizer.assemble(tokens.ids)], Cost(response_bytes=9))
        yield first
        for step in steps:
            yield first if step == "again" else step
        if request.text == "bad":
            raise TooLargeError("too large")
        return 1

    monkeypatch.setitem(TASKS, "text-classification", replace(TASKS["text-classification"], function=fail))
    service = fake_service(models, FakeEngine())
    async with serving(service) as client:
        answer = await client.post("/classify", json={"inputs": ["good", "fine", "bad", "good"]})
        assert error_of(answer, 413, "too_large").startswith("inputs[2]: ")
        assert (0, 0) == (service.scheduler.queue.queue_items, service.scheduler.queue.held_tokens)


GUILTY = "poor"
INNOCENT = ("good", "bad", "fine", "dull", "great")
FAULTS = {
    "raise": "RuntimeError",
    "panic": "SystemExit",
    "memory": "1 x 3 tokens",
    "allocation": "1 x 3 tokens",
    "bad_alloc": "1 x 3 tokens",
    "nan": "`logits` is not finite",
    "short": "`logits` has 0 rows",
}


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=a ; expr=cudaStreamSynchronize", DeviceLostError),
        ("CUDA failure 719: unspecified launch failure ; GPU=0", DeviceLostError),
        ("CUDA error 999: unknown error", DeviceLostError),
        ("CUDA failure 710: device-side assert triggered", DeviceLostError),
        ("CUDA failure 214: uncorrectable ECC error encountered", DeviceLostError),
        ("Unable to determine the device handle: GPU has fallen off the bus", DeviceLostError),
        ("CUDA failure 2: out of memory ; GPU=0", EngineError),
        ("CUBLAS failure 700 of a name with CUDA failure 7001", EngineError),
        ("Non-zero status code returned while running Gather node", EngineError),
    ],
)
def test_errors_that_end_all_work_on_the_gpu_are_told_from_others(
    models: Path, monkeypatch: pytest.MonkeyPatch, message: str, kind: type[Exception]
) -> None:
    session = SimpleNamespace(run=lambda names, feed: (_ for _ in ()).throw(RuntimeError(message)))
    graph = files.load_bundle(models / "tiny").manifest.graphs[0]
    wrap_sessions(monkeypatch, lambda _: session)
    engine = OnnxEngine(models / "tiny" / graph.file, graph, pad_id=0, padding_side="right")
    with pytest.raises(kind) as error:
        engine.run([Encoding(np.zeros(3, np.int64), np.zeros(3, np.int64))])
    assert "hostname" not in str(error.value)


@pytest.mark.parametrize(("fault", "value"), FAULTS.items())
async def test_only_the_request_that_causes_a_graph_fault_fails(
    models: Path, monkeypatch: pytest.MonkeyPatch, fault: str, value: str
) -> None:
    sessions: list[FaultySession] = []

    def faulty(session: Any) -> FaultySession:
        sessions.append(FaultySession(session, tiny.VOCABULARY.index(GUILTY), fault))
        return sessions[-1]

    wrap_sessions(monkeypatch, faulty)
    service = state_of(models, threads=1)
    [session] = sessions
    async with serving(service) as client:

        def ask(text: str) -> asyncio.Task[httpx.Response]:
            return asyncio.ensure_future(client.post("/classify", json={"inputs": text}))

        before = [(await ask(text)).json() for text in INNOCENT]
        session.gate.clear()
        blocker, runs = ask("book"), len(session.batches)
        await until(lambda: len(session.batches) > runs)
        together = [ask(text) for text in (*INNOCENT, GUILTY)]
        await until_queued(service, len(together))
        session.gate.set()
        *innocent, guilty = await asyncio.gather(*together)
        assert value in error_of(guilty, 500, "engine")
        assert [200] * len(INNOCENT) == [answer.status_code for answer in innocent]
        for expected, answer in zip(before, innocent, strict=True):
            assert [one["label"] for one in expected[0]] == [one["label"] for one in answer.json()[0]]
            assert [one["score"] for one in answer.json()[0]] == pytest.approx([one["score"] for one in expected[0]], abs=1e-6)
        assert max(session.batches) > 1, "they shared no batch"
        assert 200 == (await blocker).status_code
        assert 200 == (await ask("good")).status_code
        assert 200 == (await client.get("/health/ready")).status_code
