"""The limits of one request in addition to its tokens: characters, memory, decoding work and response bytes, for all tasks."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiny
from application import Send, answered, ask, faked, play, post, rejected
from bertserve.service.bundle import files
from bertserve.service.errors import TooLargeError
from bertserve.service.http.responses import LONG_BYTES, content_of
from bertserve.service.tasks import classify, fill_mask, question_answering, token_classification
from bertserve.service.tasks.batch import Batch, TaskModel, TaskRun, begin
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import NOTHING, Budget, Cost, text_bytes
from bertserve.service.text.tokenizer import Tokenizer, Tokens
from bertserve.service.wire.json_text import to_json
from fakes import FakeEngine, Head
from task_runs import encode

HUGE = 2**64


@pytest.fixture(name="allowed")
def allowed_bytes(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda count: monkeypatch.setattr("bertserve.service.tasks.cost.MAX_ANSWER_BYTES", count)


def too_large(api: Send, path: str, **body: Any) -> str:
    return rejected(post(api, body, path=path), 413, "too_large")


# ---- Cost


def test_a_batch_must_have_a_cost() -> None:
    with pytest.raises(TypeError, match="cost"):
        Batch(encodings=[])  # type: ignore[call-arg]


def test_costs_add_up() -> None:
    both = Cost(answer_bytes=1, steps=320, memory=3, reserved_tokens=4) + Cost(answer_bytes=10, steps=320, memory=30, reserved_tokens=40)
    assert Cost(answer_bytes=11, steps=640, memory=33, reserved_tokens=44) == both == both + NOTHING
    assert 44 + 640 // 32 == both.queue_tokens


@pytest.mark.parametrize("text", ["", "good", 'a "good" film\\', "Größe", "日本", "\x00\n\x1f", "\U0001f600é"])
def test_text_bytes_is_an_upper_bound_of_the_size_in_json(text: str) -> None:
    assert len(to_json(text)) <= text_bytes(text) <= len(to_json(text)) + 5 * len(text)


# ---- response bytes


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"inputs": ["good"] * 64, "model": "nli"}),
        ("/predict", {"inputs": [["good"]] * 64, "model": "nli"}),
        ("/zero-shot", {"inputs": "good", "parameters": {"candidate_labels": [*"abcdefgh"]}}),
        ("/ner", {"inputs": "good film " * 20, "parameters": {"ignore_labels": []}}),
        ("/ner", {"inputs": "good film " * 20, "parameters": {"ignore_labels": [], "aggregation_strategy": "none"}}),
        ("/ner", {"inputs": ["good film"] * 20, "parameters": {"ignore_labels": [], "aggregation_strategy": "max"}}),
        ("/answer", {"inputs": {"question": "good", "context": "good film " * 20}, "parameters": {"top_k": 10}}),
        ("/fill-mask", {"inputs": "a [MASK]" + " good" * 200}),
        ("/fill-mask", {"inputs": "[MASK] " * 10}),
        ("/fill-mask", {"inputs": "[MASK] [MASK]", "parameters": {"joint": True, "top_k": 10}}),
        ("/choose", {"inputs": {"prompt": "good", "choices": ["film " * 100, "book " * 100]}}),
        ("/rerank", {"query": "good", "texts": ["film " * 200], "return_text": True}),
        ("/rerank", {"query": "good", "texts": ["film"] * 20}),
        ("/v1/rerank", {"query": "good", "documents": ["film " * 200], "return_documents": True}),
        ("/v1/rerank", {"query": "good", "documents": [{"text": "film", "prices": [1e15] * 50}] * 4, "return_documents": True}),
        ("/similarity", {"inputs": {"source_sentence": "good", "sentences": ["film"] * 50}}),
        ("/embed", {"inputs": ["film"] * 10}),
        ("/v1/embeddings", {"input": ["film"] * 10}),
        ("/embed_all", {"inputs": "film " * 20}),
        ("/v2/models/nli/infer", {"inputs": [{"name": "inputs", "shape": [64], "datatype": "BYTES", "data": ["good"] * 64}]}),
        ("/v1/models/nli:predict", {"instances": ["good"] * 64}),
        ("/classify", {"inputs": "good film " * 10, "model": "nli", "parameters": {"explain": True}}),
    ],
)
def test_the_bytes_of_every_response_are_limited(api: Send, allowed: Any, path: str, body: dict[str, Any]) -> None:
    """In every task and format, a limit of half the response's bytes refuses the request; a limit of four times its bytes accepts it."""
    whole = post(api, body, path=path)
    assert 200 == whole.status_code, whole.text
    allowed(len(whole.content) // 2)
    response = post(api, body, path=path)
    assert (413, "too_large") == (response.status_code, response.json()["error_type"])
    assert f"bytes and {len(whole.content) // 2} " in response.text
    allowed(4 * len(whole.content))
    assert 200 == post(api, body, path=path).status_code


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fill-mask", {"inputs": "a [MASK]" + " good" * 100, "parameters": {"top_k": 20}}),
        ("/answer", {"inputs": {"question": "good", "context": "a" * 2000}, "parameters": {"top_k": 10, "max_answer_len": 512}}),
        ("/classify", {"inputs": ["good"] * 60, "model": "nli"}),
    ],
)
def test_a_response_of_known_size_is_refused_before_the_run(
    api: Send, allowed: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    allowed(1000)
    spec = next(spec for spec in TASKS.values() if path == f"/{spec.path}")
    begun: list[int] = []
    decoded: list[int] = []
    run = spec.run

    def noted(request: Any, model: TaskModel) -> TaskRun:
        begun.append(1)
        yield begin(run(request, model))
        decoded.append(1)

    object.__setattr__(spec, "run", noted)
    try:
        too_large(api, path, **body)
    finally:
        object.__setattr__(spec, "run", run)
    assert begun
    assert [] == decoded


def test_answers_count_with_their_maximum_length(api: Send, allowed: Any) -> None:
    """Many short answers of a long passage are accepted. The same number is refused if each answer could be the whole passage."""
    allowed(2**18)
    words, whole = ({"question": "good", "context": context} for context in ("good film " * 1000, f"{'a' * 200} " * 100))
    parameters = {"top_k": 100, "max_answer_len": 3}
    assert 2 <= len(answered(api, "/answer", words, **parameters))
    assert 413 == ask(api, "/answer", whole, **parameters | {"max_answer_len": 512}).status_code


def test_long_responses_are_built_outside_the_event_loop(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop serves other requests meanwhile. Short responses are built in the event loop."""
    threads: list[bool] = []
    shape = classify.ClassifyBody.answer

    def noted(body: Any, results: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return shape(body, results)

    monkeypatch.setattr(classify.ClassifyBody, "answer", noted)
    whole = answered(api, "/models/nli", "good")
    monkeypatch.setattr("bertserve.service.http.responses.LONG_BYTES", 0)
    assert whole == answered(api, "/models/nli", "good")
    assert [True, False] == threads


async def test_one_long_response_is_built_at_a_time() -> None:
    """Each further thread that builds one would make short requests wait longer for the GIL."""
    running: list[Any] = []
    most = 0

    def answer(prediction: Any) -> Any:
        nonlocal most
        running.append(prediction)
        most = max(most, len(running))
        time.sleep(0.02)
        running.pop()
        return []

    prediction: Any = SimpleNamespace(answer_bytes=LONG_BYTES + 1)
    call: Any = SimpleNamespace(answer=answer, model=SimpleNamespace(has_short_requests=False))
    contents = await asyncio.gather(*(content_of(call, prediction) for _ in range(3)))
    assert [[b"[]"]] * 3 == [content.pieces for content in contents]
    assert 1 == most


@pytest.mark.parametrize("has_short_requests", [True, False])
async def test_a_long_response_leaves_half_of_the_time_to_short_requests(monkeypatch: pytest.MonkeyPatch, has_short_requests: bool) -> None:
    """A pause follows each piece and takes as long as the piece."""
    pauses: list[float] = []
    worked = itertools.count(step=0.25)
    clock = SimpleNamespace(thread_time=lambda: next(worked), sleep=pauses.append)
    monkeypatch.setattr("bertserve.service.http.responses.time", clock)

    prediction: Any = SimpleNamespace(answer_bytes=LONG_BYTES + 1)
    call: Any = SimpleNamespace(answer=lambda _: ["a" * 50_000] * 9, model=SimpleNamespace(has_short_requests=has_short_requests))
    content = await content_of(call, prediction)

    assert 9 == len(content.pieces)
    assert [0.25] * 9 * has_short_requests == pauses


# ---- decoding work


def test_the_estimate_includes_the_decoding(tmp_path: Path) -> None:
    """The estimate of a fill-mask text includes the requested candidates, and is within a factor of two of their actual cost."""
    tiny.bundle(tmp_path, task="fill-mask")
    manifest = _bundle(tmp_path).manifest
    few, many = (
        fill_mask.FillMaskRequest("a [MASK] film", fill_mask.FillMaskParameters(top_k=count)) for count in (1, len(tiny.VOCABULARY))
    )
    tokenizer = Tokenizer(_bundle(tmp_path).tokenizer_path, manifest.tokenizer)
    real = encode(fill_mask, many, tokenizer, manifest).cost.queue_tokens
    guessed = fill_mask.estimate(many, 32) - fill_mask.estimate(few, 32)
    assert real > 0
    assert real / 2 <= guessed <= 2 * real


def test_a_fill_mask_request_that_waits_keeps_only_the_ids_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets and pieces of hundreds of long texts would take tens of megabytes."""
    tiny.bundle(tmp_path, task="fill-mask")
    loaded = _bundle(tmp_path)
    tokenize, made = Tokenizer.tokenize, list[weakref.ref[Tokens]]()

    def noted(self: Tokenizer, texts: Any) -> Any:
        tokens = tokenize(self, texts)
        made.extend(weakref.ref(each) for each in tokens)
        return tokens

    monkeypatch.setattr(Tokenizer, "tokenize", noted)
    model = TaskModel(Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer), loaded.manifest, Budget())
    run = fill_mask.fill_masks(fill_mask.FillMaskRequest("a [MASK] film"), model)
    assert isinstance(next(run), Batch)
    assert [None] == [each() for each in made]


def _bundle(folder: Path) -> Any:
    return files.load_bundle(folder / "tiny")


def test_decoding_counts_in_the_queue(tmp_path: Path) -> None:
    """A queue that is large enough for the text refuses it if its decoding needs too many steps."""
    tiny.bundle(tmp_path)
    engine = FakeEngine()
    spec = TASKS[classify.TASK]
    run = spec.run

    def costly(request: Any, model: TaskModel) -> TaskRun:
        batch = begin(run(request, model))
        yield replace(batch, cost=batch.cost + Cost(answer_bytes=0, steps=32 * 256))

    object.__setattr__(spec, "run", costly)
    try:
        message = rejected(
            play(faked(tmp_path, engine, max_queue_tokens=256), lambda client: client.post("/classify", json={"inputs": "good"})),
            413,
            "too_large",
        )
    finally:
        object.__setattr__(spec, "run", run)
    assert "queue holds 256" in message
    assert [] == engine.batches


def test_the_search_for_answers_has_a_limit(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find 1000 different answers in a passage that repeats one word, the search would examine all spans of all windows."""
    passage = {"question": "good", "context": "film " * 3000}
    monkeypatch.setattr("bertserve.service.tasks.cost.MAX_STEPS", 20_000)
    assert 10 == len(answered(api, "/answer", passage, top_k=10, max_answer_len=12))
    assert "`max_answer_len`" in too_large(api, "/answer", inputs=passage, parameters={"top_k": 1000, "max_answer_len": 12})


def test_all_inputs_share_one_budget() -> None:
    budget = Budget()
    budget.spend(answer_bytes=2**23)
    with pytest.raises(TooLargeError, match="16777217 bytes and 16777216 "):
        budget.spend(answer_bytes=2**23 + 1)


def test_a_text_is_decoded_once_for_all_of_its_candidates(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 100 candidates, at most a few times the tokens of the text are decoded. Each candidate has the whole text."""
    decoded: list[int] = []
    decode_all = Tokenizer.decode_all

    def counted(tokenizer: Tokenizer, texts: Any, *, skip_special: bool) -> list[str]:
        decoded.append(sum(map(len, texts)))
        return decode_all(tokenizer, texts, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "decode_all", counted)
    text = "good film " * 1000
    found = answered(api, "/fill-mask", f"{text}[MASK] {text}", top_k=100)
    assert 100 == len(found) == sum(each["sequence"].endswith(f" {text.strip()}") for each in found)
    assert sum(decoded) < 4 * 4000


def test_the_best_summed_answers_equal_a_full_sort() -> None:
    random = np.random.default_rng(3)
    start, end = (random.integers(1, 5, 40).astype(np.float32) for _ in range(2))
    spans = question_answering.score_spans(start, end, range(40), 9)
    order = np.lexsort((spans.ends, spans.starts, -spans.scores))[:30]
    texts = question_answering.SpanTexts("abcdefghij" * 4, [(i, i + 1) for i in range(40)], None)
    found = question_answering.SummedAnswers(texts, limit=30, budget=Budget())
    list(found.add(spans))
    sums: dict[str, float] = {}
    for i in order.tolist():
        text = texts.answer(int(spans.starts[i]), int(spans.ends[i]), 0.0, spans.cut)["answer"]
        sums[text] = sums.get(text, 0.0) + float(spans.scores[i])
    assert sums == {each["answer"]: each["score"] for each in found.answers()}


# ---- characters and memory


def test_the_characters_of_a_question_count_for_each_choice(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertserve.service.serving.model.MAX_CHARS", 1000)
    few, many = ({"question": "good " * 60, "context": "film", "choices": ["a"] * count} for count in (2, 4))
    assert 2 == len(answered(api, "/choose", few))
    assert "1340 characters" in rejected(ask(api, "/choose", many), 413, "too_large")


def test_long_texts_are_tokenized_in_small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of all texts are never in memory together, and the results are the same."""
    tiny.bundle(tmp_path)
    bundle = _bundle(tmp_path)
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    texts = ["good film", "a", "bad book " * 4, "", "film"]
    expected = [tokens.ids for tokens in tokenizer.tokenize(texts)]
    monkeypatch.setattr("bertserve.service.text.tokenizer.GROUP_CHARS", 10)
    sizes: list[int] = []
    tokenize = Tokenizer.tokenize
    monkeypatch.setattr(Tokenizer, "tokenize", lambda self, texts: sizes.append(len(texts)) or tokenize(self, texts))
    assert expected == [tokens.ids for tokens in tokenizer.each(texts)]
    assert [2, 1, 2] == sizes


def test_tokens_of_long_texts_count_as_memory(tmp_path: Path) -> None:
    """Until a text is decoded, NER holds all of its tokens, and one logit per label and token of its window."""
    tiny.bundle(tmp_path, task=token_classification.TASK, max_length=1002)
    bundle = _bundle(tmp_path)
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    assert (
        30_000 + 1002
        == encode(token_classification, token_classification.NerRequest("good " * 1000), tokenizer, Head(labels=("O",))).cost.memory
    )


# ---- returned documents


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_a_document_that_cannot_be_returned_is_refused(api: Send, path: str) -> None:
    body = {"query": "good", "documents": ["film", {"text": "book", "page": {"number": [HUGE]}}]}
    assert 200 == post(api, body, path=path).status_code
    response = post(api, body | {"return_documents": True}, path=path)
    assert "`documents[1]`" in response.text
    assert response.status_code in (400, 422)


def test_documents_are_returned_with_all_fields(api: Send) -> None:
    document = {"text": "film", "page": 3, "more": {"a": [1.5, None, True, "é"]}}
    response = post(api, {"query": "good", "documents": [document, "book"], "return_documents": True}, path="/v1/rerank")
    found = {each["index"]: each["document"] for each in response.json()["results"]}
    assert {0: document, 1: {"text": "book"}} == found
