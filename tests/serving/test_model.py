"""`Model`, between requests and inference threads: batching by graph, errors that name their input, and metrics."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from application import model_of
from bertserve.service.backend.cost import CostModel
from bertserve.service.backend.engines import Engines
from bertserve.service.bundle import files
from bertserve.service.errors import InvalidValueError, TooLargeError
from bertserve.service.metrics import Metrics
from bertserve.service.scheduling.request_queue import LONG_STEP_S, RequestQueue
from bertserve.service.scheduling.scheduler import GIL_PAUSE_S, Scheduler
from bertserve.service.scheduling.stage import Stage
from bertserve.service.serving import model as model_module
from bertserve.service.serving.work import RequestRun
from bertserve.service.tasks.batch import PAUSE, Batch, TaskModel, TaskRun
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.classify import ClassifyParameters, ClassifyRequest
from bertserve.service.tasks.cost import NOTHING, Budget, Cost
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
        self.scheduler = Scheduler(self.queue, threads=1, observe=self.metrics.observe_queue, clock=clock)
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


@pytest.mark.parametrize("steps", [[], [PAUSE], [Batch([], NOTHING)], ["again"]], ids=["first rows", "pause", "step", "second rows"])
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


@pytest.mark.parametrize(("provider", "told"), [("cpu", True), ("cuda", False)])
def test_the_cost_model_learns_the_cpu_time_of_a_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, told: bool
) -> None:
    """On the CPU, the CPU time leaves out waits within the run. On another device, the CPU time is not used."""
    bench = Bench(tmp_path)
    bench.model.graph = bench.model.graph.model_copy(update={"provider": provider})
    quick, learned = bench.engine.run, []

    def slow(encodings: Any) -> Any:
        time.sleep(0.1)
        return quick(encodings)

    monkeypatch.setattr(bench.engine, "run", slow)
    monkeypatch.setattr(CostModel, "observe", lambda _self, *run: learned.append(run))
    play(bench, lambda: bench.model.predict([ClassifyRequest("good")], timeout_s=10))

    [(_, _, seconds, busy_s)] = learned
    assert seconds >= 0.1  # the time that it slept
    assert told == (busy_s is not None)
    assert busy_s is None or busy_s < seconds / 2


def test_a_long_task_pauses_for_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task yields pauses before and after its first batch, in which other requests run. The results are complete."""
    monkeypatch.setattr(model_module, "SLICE_S", 0.0)
    bench = Bench(tmp_path, clock=itertools.count(step=0.002).__next__)  # each reading of the clock advances it by 2 ms
    steps: list[tuple[str, str]] = []

    def slow(request: Any, model: TaskModel) -> TaskRun:
        name = request.text.split()[0]
        for _ in range(3):
            steps.append(("tokenize", name))
            yield PAUSE
        (tokens,) = model.tokenizer.tokenize([request.text])
        [row] = yield Batch([model.tokenizer.assemble(tokens.ids)], Cost(answer_bytes=9))
        for _ in range(3):
            steps.append(("decode", name))
            yield PAUSE
        return len(row)

    async def check() -> None:
        requests = [[ClassifyRequest(name + " " * SHORT_CHARS)] * 2 for name in ("good", "bad")]
        bench.engine.gate.clear()
        blocker = asyncio.ensure_future(bench.model.predict([ClassifyRequest("good")], timeout_s=9))
        await asyncio.to_thread(bench.engine.entered.acquire, timeout=20)
        monkeypatch.setitem(TASKS, "text-classification", replace(TASKS["text-classification"], run=slow))  # type: ignore[arg-type]
        both = [asyncio.ensure_future(bench.model.predict(each, timeout_s=9)) for each in requests]
        while bench.queue.queue_items < 2:
            await asyncio.sleep(0.001)
        bench.engine.gate.set()
        for prediction in await asyncio.gather(*both):
            assert [1, 1] == prediction.results
            assert 2 * 3 == prediction.tokens
        await blocker

    play(bench, check)
    for kind in ("tokenize", "decode"):
        names = [name for step, name in steps if step == kind]
        assert 2 * 2 * 3 == len(names)
        assert 2 < sum(one != other for one, other in itertools.pairwise(names))
    assert 0 == bench.queue.queue_tokens


class SlowTexts:
    """A simulated tokenizer in virtual time; a text takes a fixed time per character."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.now_s = 0.0
        self.tokenized: list[int] = []
        self.pauses: list[float] = []
        self.seconds_per_char = model_module.SECONDS_PER_CHAR
        monkeypatch.setattr(
            model_module, "time", SimpleNamespace(perf_counter=self._clock, thread_time=self._clock, sleep=self.pauses.append)
        )

    def _clock(self) -> float:
        self.now_s += 1e-9
        return self.now_s

    def _run(self, request: Any, model: TaskModel) -> TaskRun:
        self.tokenized.append(len(request.text))
        self.now_s += len(request.text) * self.seconds_per_char
        yield Batch([], Cost(answer_bytes=9))
        return 1

    def first_stage(self, *lengths: int) -> Stage:
        """Returns the first stage of a request with texts of these lengths."""
        requests, model = [ClassifyRequest("a" * length) for length in lengths], self.bench.model
        spec = replace(TASKS["text-classification"], run=self._run)
        run = RequestRun(requests, spec, TaskModel(model._tokenizer, model.bundle.manifest, Budget()), None)
        return model._first_stage(run, sum(lengths))


def test_a_text_that_is_slow_to_tokenize_starts_a_new_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler learns of each such text before it is tokenized, even if a short text precedes it in the list."""
    texts = SlowTexts(Bench(tmp_path), monkeypatch)
    long = int(2 * LONG_STEP_S / model_module.SECONDS_PER_CHAR)
    stage = texts.first_stage(long, 1, long, 1)
    for expected in ([long], [long, 1], [long, 1, long], [long, 1, long, 1]):
        assert (expected[-1] == long) == stage.long_step == (stage.delay_s > LONG_STEP_S)
        stage = stage.finish([None])
        assert expected == texts.tokenized


def test_a_thread_lets_others_take_the_gil_between_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the event loop waits for many slices, because numpy and tokenizers release the GIL only for microseconds."""
    texts = SlowTexts(Bench(tmp_path), monkeypatch)
    monkeypatch.setattr(model_module, "SLICE_S", 0.0)
    stage = texts.first_stage(1, 1, 1)
    paused = [len(texts.pauses)]
    while isinstance(stage, Stage):
        stage = stage.finish([None])
        paused.append(len(texts.pauses))
    assert [1, 2, 2, 3, 4, 4] == paused  # after each slice but the last: three texts are tokenized, then three results are read
    assert {GIL_PAUSE_S} == set(texts.pauses)


def test_a_slice_with_a_possibly_slow_text_is_a_long_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is possibly slow if the slowest text of its length exceeds a long step. Texts share such a slice while they are quick."""
    texts = SlowTexts(Bench(tmp_path), monkeypatch)
    can_be_long = model_module.LONG_CHARS + 1
    assert can_be_long * model_module.SLOWEST_SECONDS_PER_CHAR > LONG_STEP_S > can_be_long * model_module.SECONDS_PER_CHAR
    assert not texts.first_stage(model_module.LONG_CHARS).long_step
    stage = texts.first_stage(1000, can_be_long, 1000, can_be_long)
    for expected, long_step in ((1, False), (4, True)):
        assert long_step == stage.long_step
        stage = stage.finish([None])
        assert expected == len(texts.tokenized)


def test_slow_texts_raise_the_expected_delay_of_their_own_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a slow text, the next texts of its request are expected to be as slow, up to a limit. Other requests are not affected."""
    texts = SlowTexts(Bench(tmp_path), monkeypatch)
    chars = 10_000
    for observed, expected in ((5e-6, 5e-6), (1e-7, model_module.SECONDS_PER_CHAR), (1.0, model_module.SLOWEST_SECONDS_PER_CHAR)):
        texts.seconds_per_char = observed
        stage = texts.first_stage(chars)
        assert chars * model_module.SECONDS_PER_CHAR == pytest.approx(stage.delay_s)
        monkeypatch.setattr(model_module, "SLICE_S", 0.0)
        stage = texts.first_stage(chars, chars).finish([None])
        assert chars * expected == pytest.approx(stage.delay_s, rel=1e-3)


@pytest.mark.parametrize(
    ("cost", "is_large"),
    [
        (Cost(answer_bytes=2 * model_module.MANY_BYTES), True),
        (Cost(answer_bytes=2, memory=2 * model_module.MANY_NUMBERS), True),
        (Cost(answer_bytes=2), False),
    ],
    ids=["large answer", "much memory", "small"],
)
def test_memory_freed_by_a_large_request_returns_to_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: Cost, is_large: bool
) -> None:
    """Glibc would keep the heap that thousands of candidates fragment. After a small request, the call is skipped."""
    bench = Bench(tmp_path)
    returned: list[bool] = []
    monkeypatch.setattr(model_module.freed_memory, "return_soon", lambda: returned.append(True))

    def answer(request: ClassifyRequest, model: TaskModel) -> TaskRun[int]:
        yield Batch([], cost)
        return 1

    async def check() -> None:
        monkeypatch.setitem(TASKS, "text-classification", replace(TASKS["text-classification"], run=answer))  # type: ignore[arg-type]
        await bench.model.predict([ClassifyRequest("good")], timeout_s=9)

    play(bench, check)
    assert is_large == bool(returned)
