"""`Model`, between requests and inference threads: batching by graph, errors that name their input, and faults of a graph."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bertserve.service.bundle import files
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import DeviceLostError, EngineError, TooLargeError
from bertserve.service.models.request_progress import EncodingItem, RequestProgress
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Cost
from bertserve.service.tasks.step import Step, TaskGenerator, TaskModel, TaskResult
from bertserve.service.text.tokenizer import INLINE_CHARS, Encoding
from support import tiny
from support.app_client import busy_client, error_of, fake_service, serving, until_queued
from support.fakes import FakeEngine, wrap_sessions


@pytest.mark.parametrize(
    ("invariant", "batch_variant", "batches"), [(True, False, [1, 4]), (False, False, [1, 1, 1, 1, 1]), (False, True, [1, 4])]
)
@pytest.mark.parametrize("text", ["bad", "bad " * INLINE_CHARS], ids=["short", "long"])
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
        assert [answer.status_code for answer in await asyncio.gather(*rest)] == [200] * 4
    assert engine.batches == batches


@pytest.mark.parametrize("second", [True, False])
def test_a_run_returns_small_outputs_if_no_text_needs_more(models: Path, second: bool) -> None:
    engine = FakeEngine()
    model = fake_service(models, engine).registry.models["tiny"]
    steps = [Step([Encoding(np.zeros(3, np.int64), np.zeros(3, np.int64))], small_outputs=small) for small in (True, second)]
    model.run([EncodingItem(3, step.encodings[0], RequestProgress([], 0), 0, step, 0) for step in steps])
    assert engine.batches == [2]
    assert engine.small_outputs == second


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
        return TaskResult(1)

    monkeypatch.setitem(TASKS, "text-classification", replace(TASKS["text-classification"], function=fail))
    service = fake_service(models, FakeEngine())
    async with serving(service) as client:
        answer = await client.post("/classify", json={"inputs": ["good", "fine", "bad", "good"]})
        assert error_of(answer, 413, "too_large").startswith("inputs[2]: ")
        assert (service.scheduler.queue.queue_items, service.scheduler.queue.total_held_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("outcome", "kind", "words"),
    [
        (RuntimeError("CUDA failure 700: an illegal memory access ; GPU=0 ; hostname=a ; expr=b"), DeviceLostError, "700"),
        (RuntimeError("CUDA failure 719: unspecified launch failure ; GPU=0"), DeviceLostError, "719"),
        (RuntimeError("CUDA error 999: unknown error"), DeviceLostError, "999"),
        (RuntimeError("CUDA failure 710: device-side assert triggered"), DeviceLostError, "710"),
        (RuntimeError("CUDA failure 214: uncorrectable ECC error encountered"), DeviceLostError, "214"),
        (RuntimeError("Unable to determine the device handle: GPU has fallen off the bus"), DeviceLostError, "fallen off the bus"),
        (RuntimeError("CUDA failure 2: out of memory ; GPU=0"), EngineError, "1 x 3 tokens"),
        (RuntimeError("[E:onnxruntime] Failed to allocate memory for requested buffer of size 4096"), EngineError, "1 x 3 tokens"),
        (RuntimeError("[E] Non-zero status code: std::bad_alloc"), EngineError, "1 x 3 tokens"),
        (MemoryError(), EngineError, "1 x 3 tokens"),
        (RuntimeError("CUBLAS failure 700 of a name with CUDA failure 7001"), EngineError, "RuntimeError"),
        (RuntimeError("Non-zero status code returned while running Gather node"), EngineError, "RuntimeError"),
        (np.full((1, 3), np.nan, dtype=np.float32), EngineError, "`logits` is not finite"),
        (np.zeros((0, 3), dtype=np.float32), EngineError, "`logits` has 0 rows"),
    ],
)
def test_a_fault_of_a_graph_is_an_error_of_its_batch_or_of_the_gpu(
    models: Path, monkeypatch: pytest.MonkeyPatch, outcome: Exception | NDArray[np.float32], kind: type[Exception], words: str
) -> None:
    """The message has nothing of the library's own, which can have a caller's ids. After an error of the GPU, no run succeeds."""

    def run(names: list[str], feed: dict[str, Any]) -> list[Any]:
        if isinstance(outcome, Exception):
            raise outcome
        return [outcome]

    graph = files.load_bundle(models / "tiny").manifest.graphs[0]
    wrap_sessions(monkeypatch, lambda _: SimpleNamespace(run=run))
    engine = OnnxEngine(models / "tiny" / graph.file, graph, pad_id=0, padding_side="right")
    with pytest.raises(kind, match=words) as error:
        engine.run([Encoding(np.zeros(3, np.int64), np.zeros(3, np.int64))])
    assert "hostname" not in str(error.value)
