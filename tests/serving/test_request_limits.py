"""The tokens of a request, and the memory that it holds until its response, have limits."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tiny
from application import Send, call_fresh, faked, play, refused, rejected
from bertserve.service.bundle.manifest import Embedding
from bertserve.service.errors import RefusedError
from bertserve.service.scheduling.request_queue import UNDERESTIMATED, RequestQueue
from bertserve.service.scheduling.stage import Stage
from bertserve.service.serving import model as model_module
from bertserve.service.serving.build import build
from bertserve.service.serving.model import Model
from bertserve.service.serving.work import RequestRun
from bertserve.service.settings import Settings
from bertserve.service.tasks import classify as classification
from bertserve.service.tasks import decoding, embed, fill_mask, question_answering, rerank, token_classification
from bertserve.service.tasks.batch import PAUSE, Batch, TaskModel, TaskRun, kept
from bertserve.service.tasks.batch import begin as first_of
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import ENCODING_MEMORY, TEXT_CHARS, Budget
from bertserve.service.tasks.spec import TaskSpec
from bertserve.service.text.tokenizer import SHORT_CHARS, Tokenizer
from bertserve.service.wire.reading import read_as
from fakes import FakeEngine, Head
from task_runs import begin

LIMITS = Limits(max_inputs=512, max_chars=200_000)


@pytest.fixture(scope="module", name="models_of_all")
def models_of_all_tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("all")
    own = [name for name, spec in TASKS.items() if spec.derivation is None]
    for task in own:
        tiny.bundle(folder, task, task=task)
    return dict(build(Settings(models=folder)).registry.models)


def begun(model: Model, requests: Sequence[Any], spec: TaskSpec) -> Stage:
    """Returns the first stage of the requests after the stages that only tokenize."""
    stage = model._first_stage(RequestRun(requests, spec, TaskModel(model._tokenizer, model.bundle.manifest, Budget()), None), 0)
    while stage.work == [(0, None)]:
        stage = stage.finish([None])
    return stage


def rows_of(model: Model, task: str, requests: list[Any]) -> list[dict[str, Any]]:
    """Returns the kept outputs of the requests, which all run in one batch."""
    stage = begun(model, requests, TASKS[task])
    return list(stage.run([payload for _, payload in stage.work]))


# Targets


def test_targets_are_tokenized_once_for_all_texts(models_of_all: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    tokenize = Tokenizer.tokenize
    monkeypatch.setattr(Tokenizer, "tokenize", lambda self, texts: asked.append(len(texts)) or tokenize(self, texts))
    body = b'{"inputs": [%s], "parameters": {"targets": ["good", "zq", "xq"]}}' % b", ".join([b'"a [MASK] film"'] * 64)
    begun(models_of_all["fill-mask"], read_as(TASKS["fill-mask"].body, body, LIMITS).requests(), TASKS["fill-mask"])

    assert sorted([*[1] * 64, 2]) == sorted(asked)


@pytest.mark.parametrize("texts", [1, 64])
def test_targets_count_once_at_admission(texts: int) -> None:
    """The characters of the targets are divided among the texts, so that none counts twice. Many targets use an inference thread."""
    targets = ["x" * 16] * fill_mask.MAX_TARGETS
    parameters = fill_mask.FillMaskParameters(targets=targets)
    requests = fill_mask.FillMaskBody(inputs=["[MASK]"] * texts, parameters=parameters).requests()

    assert texts * 6 + fill_mask.MAX_TARGETS * (16 + TEXT_CHARS) == sum(request.chars for request in requests)


def test_targets_of_joint_masks_are_prepared_once_for_all_texts(models_of_all: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    slots_of = fill_mask.slots_of
    monkeypatch.setattr(fill_mask, "slots_of", lambda targets: prepared.append(len(targets)) or slots_of(targets))
    parameters = fill_mask.FillMaskParameters(joint=True, targets=["good", "bad", "xq"])
    requests = fill_mask.FillMaskBody(inputs=["a [MASK] film"] * 9, parameters=parameters).requests()
    stage = begun(models_of_all["fill-mask"], requests, TASKS["fill-mask"])
    stage.finish([])

    assert [3] == prepared


@pytest.mark.parametrize(("targets", "is_short"), [(None, True), (["a", "b"], False)])
def test_joint_masks_with_targets_are_not_short(targets: list[str] | None, is_short: bool) -> None:
    """Six masks with targets make 64 mask patterns, which are prepared on an inference thread."""
    parameters = fill_mask.FillMaskParameters(joint=True, targets=targets)
    (request,) = fill_mask.FillMaskBody(inputs="[MASK]" * 6, parameters=parameters).requests()

    assert is_short == (request.chars <= SHORT_CHARS)


def test_many_targets_do_not_delay_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the maximum number of targets is tokenized, health probes and another short request are answered."""
    tiny.bundle(tmp_path, task="fill-mask")
    looked_up, go_on = threading.Event(), threading.Event()
    tokenize = Tokenizer.tokenize

    def slow(self: Tokenizer, texts: Sequence[str]) -> Any:
        if len(texts) > 1:
            looked_up.set()
            assert go_on.wait(10)
        return tokenize(self, texts)

    monkeypatch.setattr(Tokenizer, "tokenize", slow)
    many = {"inputs": "a [MASK] film", "parameters": {"targets": [f"x{number:03}{'x' * 12}" for number in range(fill_mask.MAX_TARGETS)]}}

    async def check(client: httpx.AsyncClient) -> list[int]:
        busy = asyncio.create_task(client.post("/fill-mask", json=many))
        assert await asyncio.to_thread(looked_up.wait, 10)
        others = [await client.get("/health/live"), await client.post("/fill-mask", json={"inputs": "a [MASK] film"})]
        assert not busy.done()
        go_on.set()
        return [answer.status_code for answer in (*others, await busy)]

    assert [200, 200, 200] == play(build(Settings(models=tmp_path, threads=2)), check)


def test_all_targets_together_have_a_limit_of_characters(api: Send) -> None:
    assert "16384 characters" in refused(api, "/fill-mask", "a [MASK]", targets=["x" * 256] * 65)


# Tokens


@pytest.mark.parametrize(
    ("task", "few", "many"),
    [
        ("text-classification", {"inputs": ["a"] * 10}, {"inputs": [""] * 500}),
        ("text-ranking", {"query": "a", "texts": ["a"] * 10}, {"query": "", "texts": [""] * 500}),
        (
            "sentence-similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["a"] * 10}},
            {"inputs": {"source_sentence": "", "sentences": [""] * 500}},
        ),
        (
            "zero-shot-classification",
            {"inputs": "a", "parameters": {"candidate_labels": ["good", "bad"]}},
            {"inputs": "", "parameters": {"candidate_labels": [chr(0x4E00 + i) for i in range(190)], "hypothesis_template": "{}"}},
        ),
        (
            "multiple-choice",
            {"inputs": {"question": "a", "choices": ["a"] * 10}},
            {"inputs": {"question": "", "choices": [""] * 64}},
        ),
        (
            "fill-mask",
            {"inputs": "[MASK]", "parameters": {"targets": ["good", "bad"]}},
            {"inputs": "[MASK]", "parameters": {"targets": ["a"] * 290}},
        ),
        (
            "fill-mask",
            {"inputs": "[MASK] [MASK]", "parameters": {"joint": True}},
            {"inputs": "[MASK] [MASK]", "parameters": {"joint": True, "targets": ["good", "bad"]}},
        ),
    ],
)
def test_many_empty_texts_are_not_tokenized_on_the_event_loop(
    models_of_all: dict[str, Model], monkeypatch: pytest.MonkeyPatch, task: str, few: dict[str, Any], many: dict[str, Any]
) -> None:
    """Empty texts have few characters, but each takes time to tokenize."""
    monkeypatch.setattr(model_module, "SLICE_S", 60.0)
    base = {"sentence-similarity": "feature-extraction", "multiple-choice": task, "fill-mask": task}.get(task, "text-classification")
    model, spec = models_of_all[base], TASKS[task]

    def on_event_loop(body: dict[str, Any]) -> bool:
        requests = read_as(spec.body, json.dumps(body).encode(), LIMITS).requests(model.bundle.manifest)
        run = RequestRun(requests, spec, TaskModel(model._tokenizer, model.bundle.manifest, Budget()), None)
        return model._first_stage(run, sum(request.chars for request in requests) + TEXT_CHARS * (len(requests) - 1)).work != [(0, None)]

    assert on_event_loop(few)
    assert not on_event_loop(many)


def test_the_objects_of_each_encoding_count_as_memory(models_of_all: dict[str, Model]) -> None:
    """A text of one token needs more memory for its objects than for its numbers."""
    stage = begun(models_of_all["text-classification"], [classification.ClassifyRequest("good")] * 500, TASKS["text-classification"])
    assert stage.memory >= ENCODING_MEMORY * 500


def test_a_query_without_texts_is_not_tokenized(models_of_all: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take time that no token of the queue counts."""
    monkeypatch.setattr(Tokenizer, "tokenize", None)
    request = rerank.RerankRequest("jq" * 50, ())
    assert (0, []) == (request.chars, begun(models_of_all["text-classification"], [request], TASKS[rerank.TASK]).work)


@pytest.mark.parametrize("stride", [None, 0, 20, 28])
def test_windows_are_counted_at_admission(models_of_all: dict[str, Model], stride: int | None) -> None:
    """The estimate for all overlapping windows is within a factor of two, for a single text and for the second text of a pair."""
    model = models_of_all["text-classification"]
    parameters = classification.ClassifyParameters(window="mean", stride=stride and stride - 8)
    for request in (
        classification.ClassifyRequest("good " * 600, None, classification.ClassifyParameters(window="mean", stride=stride)),
        classification.ClassifyRequest("good " * 4, "good " * 600, parameters),
    ):
        real = sum(tokens for tokens, _ in begun(model, [request], TASKS[model.task]).work)
        assert real / 2 <= classification.estimate(request, 32) <= 2 * real


def test_a_request_with_more_tokens_than_the_queue_is_refused_before_it_runs(models: Path) -> None:
    engine = FakeEngine()
    service = faked(models, engine, max_queue_tokens=256)
    message = rejected(
        play(service, lambda client: client.post("/classify", json={"inputs": ["?" * 64] * 12})),  # estimate by characters: 17 tokens each
        413,
        "too_large",
    )

    assert "queue holds 256" in message
    assert [] == engine.batches
    assert 0 == service.scheduler._queue.queue_tokens


def test_a_request_over_the_queue_limit_stops_before_its_later_texts(models: Path) -> None:
    """A request is refused at the text that exceeds the queue, before the later texts use memory."""
    begun: list[Any] = []
    spec = TASKS["text-classification"]
    run = spec.run

    def noted(request: Any, model: TaskModel) -> TaskRun:
        begun.append(request)
        return (yield from run(request, model))

    object.__setattr__(spec, "run", noted)
    try:
        service = faked(models, FakeEngine(), max_queue_tokens=64)
        rejected(play(service, lambda client: client.post("/classify", json={"inputs": ["?" * 10] * 15})), 413, "too_large")
    finally:
        object.__setattr__(spec, "run", run)

    assert 6 == len(begun)  # 12 tokens each


def put(queue: RequestQueue, estimate: int, real: int) -> None:
    """Admits a request by its estimated tokens, then queues an item with its real tokens."""
    scheduled = queue.admit(tokens=estimate, seconds=0.0, deadline=10.0, now=0.0)
    queue.put(scheduled, None, [(real, None)], lambda rows, length: 0.0, 0.0)


def test_a_request_with_many_times_its_estimated_tokens_must_fit_the_queue() -> None:
    """A request with more than `UNDERESTIMATED` times its estimate is refused if its real tokens exceed the queue."""
    queue = RequestQueue(max_batch_tokens=100, max_queue_tokens=100)
    put(queue, 60, 60)
    put(queue, 10, 10 * UNDERESTIMATED)
    assert 100 == queue.queue_tokens
    queue = RequestQueue(max_batch_tokens=100, max_queue_tokens=100)
    put(queue, 60, 60)
    with pytest.raises(RefusedError, match=r" 41 .* 10 .* 60 of 100") as caught:
        put(queue, 10, 10 * UNDERESTIMATED + 1)
    assert "queue_full" == caught.value.reason


def test_the_predicted_wait_includes_the_time_to_tokenize(models_of_all: dict[str, Model]) -> None:
    model = models_of_all["text-classification"]
    estimates = [model._estimate([classification.ClassifyRequest("a" * 1000)], TASKS[model.task], chars) for chars in (0, 10**6)]

    assert [estimates[0][0], 0.3] == [estimates[1][0], pytest.approx(estimates[1][1] - estimates[0][1])]


# Memory


def embedding(**parameters: Any) -> embed.EmbedRequest:
    """Returns an embedding request for a text of three tokens, or five with the special tokens."""
    given = embed.resolve(embed.EmbedParameters(**parameters), Embedding.model_validate(tiny.EMBEDDING))
    return replace(given, text="a good film")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (embedding(pooling="cls"), (8,)),
        (embedding(pooling="mean"), (8,)),
        (embedding(pooling="max"), (8,)),
        (embedding(pooling="mean", layers="last_four"), (32,)),
        (embedding(pooling="mean", dimensions=3), (3,)),
        (embedding(pooling="none"), (5, 8)),
        (embedding(pooling="none", layers="last_four"), (5, 32)),
        (embedding(pooling="none", layers=[-4, -1]), (5, 16)),
        (embedding(pooling="mean", layers=[-4, -1], combine="sum"), (8,)),
    ],
)
def test_vectors_are_pooled_before_they_are_kept(
    models_of_all: dict[str, Model], request_: embed.EmbedRequest, expected: tuple[int, ...]
) -> None:
    """A short text in a batch with a long text keeps only its pooled vector, or the vectors of its own tokens."""
    long = replace(request_, text="good " * 30)
    row, _ = rows_of(models_of_all["feature-extraction"], embed.TASK, [request_, long])

    assert [("vector", expected, None)] == [(name, values.shape, values.base) for name, values in row.items()]


@pytest.mark.parametrize(
    ("task", "request_", "longer"),
    [
        (token_classification.TASK, token_classification.NerRequest("a good film"), token_classification.NerRequest("good " * 30)),
        (
            question_answering.TASK,
            question_answering.AnswerRequest("who", "a good film"),
            question_answering.AnswerRequest("who", "good " * 20),
        ),
        (fill_mask.TASK, fill_mask.FillMaskRequest("a [MASK] film"), fill_mask.FillMaskRequest("good " * 20 + "[MASK]" * 9)),
    ],
)
def test_no_row_keeps_the_padded_batch_in_memory(models_of_all: dict[str, Model], task: str, request_: Any, longer: Any) -> None:
    """The kept outputs of a text are separate arrays, not views of the padded outputs of the batch."""
    rows = rows_of(models_of_all[task], task, [request_, longer])

    assert all(values.base is None for row in rows for values in row.values())


def test_only_the_best_tokens_of_the_vocabulary_are_kept(models_of_all: dict[str, Model]) -> None:
    (row,) = rows_of(
        models_of_all["fill-mask"], "fill-mask", [fill_mask.FillMaskRequest("[MASK] [MASK]", fill_mask.FillMaskParameters(top_k=3))]
    )

    assert {"tokens": (2, 3), "scores": (2, 3)} == {name: values.shape for name, values in row.items()}


@pytest.mark.parametrize(
    ("path", "task", "body"),
    [
        ("/ner", token_classification.TASK, {"inputs": ["good bad"] * 9}),
        (
            "/answer",
            question_answering.TASK,
            {"inputs": {"question": "a", "context": "good " * 90}, "parameters": {"top_k": 9, "duplicates": "sum"}},
        ),
    ],
)
def test_a_request_that_would_keep_too_many_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, task: str, body: dict[str, Any]
) -> None:
    """The error names how many numbers the request would keep, and the maximum."""
    monkeypatch.setattr("bertserve.service.tasks.cost.MAX_MEMORY", 100)
    tiny.bundle(tmp_path, task=task)

    assert "numbers and 100 " in rejected(call_fresh(tmp_path, "POST", path, json=body), 413, "too_large")


@pytest.mark.parametrize("duplicates", ["best", "sum"])
def test_only_the_spans_of_one_window_are_in_memory_at_a_time(models_of_all: dict[str, Model], duplicates: str) -> None:
    """A passage with ten times as many windows and spans needs little more memory to decode."""
    model = models_of_all["question-answering"]
    peaks = []
    for words in (60, 600):
        request = question_answering.AnswerRequest(
            "who", "good bad " * words, question_answering.AnswerParameters(duplicates=duplicates, max_answer_len=512)
        )
        begun = begin(question_answering, request, model._tokenizer, model.bundle.manifest)
        encodings, cuts = begun.batch.encodings, question_answering.windows_of(request, model._tokenizer).cuts
        rows = [{name: np.zeros(len(item), dtype=np.float32) for name in ("start_logits", "end_logits")} for item in encodings]
        tracemalloc.start()
        begun.finish(rows)
        peaks.append((tracemalloc.get_traced_memory()[1], sum(map(len, cuts)) * 30 * 20))
        tracemalloc.stop()

    assert peaks[1][0] - peaks[0][0] < peaks[1][1] / 4  # a span has 20 bytes; a window of 30 tokens has 465 spans


# Pauses for other requests


def each_pause(task: Any, request: Any, model: TaskModel, output: Callable[[int], dict[str, Any]]) -> Iterator[None]:
    """Runs a task with one batch, and yields at each pause after the batch. `output` returns the outputs for a number of tokens."""
    run = task.SPEC.run(request, model)
    batch = first_of(run)
    step = next_of(run, kept(batch, [output(len(encoding)) for encoding in batch.encodings]))
    while step is PAUSE:
        yield
        step = next_of(run, [])


def next_of(run: TaskRun, rows: Sequence[Any]) -> Batch | None:
    try:
        return run.send(rows)
    except StopIteration:
        return None


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("ignored", [[], ["O"]], ids=["one entity", "no entity"])
def test_token_classification_pauses_even_without_entities(
    models_of_all: dict[str, Model], monkeypatch: pytest.MonkeyPatch, strategy: Any, ignored: list[str]
) -> None:
    """Long entities and ignored labels do not delay the pauses, which depend only on the number of tokens or words."""
    labeled: list[int] = []
    label = token_classification._label
    monkeypatch.setattr(token_classification, "_label", lambda *arguments: labeled.append(1) or label(*arguments))
    monkeypatch.setattr(token_classification, "TOKENS_PER_PAUSE", 8)
    parameters = token_classification.NerParameters(aggregation_strategy=strategy, ignore_labels=ignored)
    model = TaskModel(models_of_all["token-classification"]._tokenizer, Head(labels=("O", "B-X")), Budget())
    request = token_classification.NerRequest("good " * 80, parameters)
    looked_at = [len(labeled) for _ in each_pause(token_classification, request, model, lambda n: {"logits": np.zeros((n, 2), np.float32)})]

    assert 10 == len(looked_at)
    if strategy not in ("none", "simple"):
        assert list(range(8, 81, 8)) == looked_at


@pytest.mark.parametrize("duplicates", ["best", "sum"])
def test_decoding_pauses_within_one_window(models_of_all: dict[str, Model], monkeypatch: pytest.MonkeyPatch, duplicates: Any) -> None:
    monkeypatch.setattr(decoding, "STEPS_PER_PAUSE", 40)
    parameters = question_answering.AnswerParameters(top_k=1000, max_answer_len=512, duplicates=duplicates)
    model = TaskModel(models_of_all["question-answering"]._tokenizer, Head(), Budget())
    request = question_answering.AnswerRequest("who", "good " * 20, parameters)
    row = lambda n: dict.fromkeys(("start_logits", "end_logits"), np.zeros(n, np.float32))  # noqa: E731 - of a number of tokens
    steps = [model.budget.steps for _ in each_pause(question_answering, request, model, row)]

    assert 210 * decoding.ANSWER_STEPS == model.budget.steps  # 210 spans
    assert list(range(40, 841, 40)) == steps[:-1]  # the last pause is at the end of the window
