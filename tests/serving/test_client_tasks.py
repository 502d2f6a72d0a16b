"""The official client, unmodified, against the running service with the embedded models: every task, sync and async."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from application import assert_same
from conftest import ROOT, running

TEXT = "Ada Lovelace wrote to Charles Babbage from London."
PASSAGE = "The bridge was built in Porto in 1886 by a company of engineers, and it was painted blue in 1990."
BUILT = {"question": "Where was the bridge built?", "context": PASSAGE}
LONG = "The river is long and the valley is wide. " * 70  # several windows
BASES = {"text_classification": "classify", "token_classification": "ner", "question_answering": "answer", "fill_mask": "fill-mask"}
MODELS = {"text_classification": "sentiment", "token_classification": "ner", "question_answering": "qa", "fill_mask": "fill-mask"}
INPUTS: dict[str, Any] = {
    "text_classification": "A warm, funny and thoroughly engaging film.",
    "token_classification": TEXT,
    "question_answering": BUILT,
    "fill_mask": "The king of [MASK] died in 1066.",
}
# method, what takes the place of the usual input, parameters
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("text_classification", None, {}),
    ("text_classification", None, {"top_k": 1}),
    ("text_classification", None, {"top_k": 2, "function_to_apply": "none"}),
    ("text_classification", "", {"function_to_apply": "sigmoid"}),
    ("token_classification", None, {}),
    *(("token_classification", None, {"aggregation_strategy": name}) for name in ("none", "simple", "first", "average", "max")),
    ("token_classification", None, {"ignore_labels": ["PER"]}),
    ("token_classification", None, {"ignore_labels": [], "aggregation_strategy": "first"}),
    ("token_classification", LONG + TEXT, {"stride": 16}),
    ("token_classification", f"\U0001f600 Jose\u0301 lives in 東京,\r\nand {TEXT}", {}),
    ("token_classification", "", {}),
    ("question_answering", None, {}),
    ("question_answering", None, {"top_k": 1}),
    ("question_answering", None, {"top_k": 3}),
    ("question_answering", None, {"top_k": 3, "handle_impossible_answer": True, "align_to_words": False}),
    ("question_answering", None, {"max_answer_len": 1, "max_question_len": 64, "max_seq_len": 32, "doc_stride": 8}),
    ("question_answering", {"question": BUILT["question"], "context": f"\U0001f600 {LONG}{PASSAGE}"}, {}),
    ("fill_mask", None, {}),
    ("fill_mask", None, {"top_k": 2}),
    ("fill_mask", None, {"targets": ["england", "france"]}),
    ("fill_mask", None, {"targets": ["england", "france", "spain"], "top_k": 2}),
    ("fill_mask", "The [MASK] of England [MASK] in 1066.", {"top_k": 3}),
    ("fill_mask", f"{LONG} The king of [MASK] died in 1066.", {"top_k": 1}),
]


@pytest.fixture(scope="module", name="url")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with the embedded models."""
    with running(ROOT / "models", tmp_path_factory.mktemp("client") / "log") as served:
        yield served.url


def arguments(method: str, given: Any) -> dict[str, Any]:
    """Returns an input as the client's method takes it."""
    given = INPUTS[method] if given is None else given
    return given if method == "question_answering" else {"text": given}


def call(url: str, method: str, given: Any = None, **parameters: Any) -> Any:
    """Returns what the client's method returns at the base URL of its task."""
    return getattr(InferenceClient(model=f"{url}/{BASES[method]}"), method)(**arguments(method, given), **parameters)


def raw(url: str, method: str, given: Any = None, **parameters: Any) -> Any:
    """Returns the body of the answer to the same request without the client."""
    inputs = INPUTS[method] if given is None else given
    response = httpx.post(f"{url}/{BASES[method]}", json={"inputs": inputs, "parameters": parameters}, timeout=30, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()[0] if method == "text_classification" else response.json()


def plain(parsed: Any) -> Any:
    """Returns what the client parsed as JSON, without the fields that it filled up with None."""
    if isinstance(parsed, list):
        return [plain(item) for item in parsed]
    return {key: value for key, value in vars(parsed).items() if value is not None}


def warnings_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Makes the client log every topic anew, where pytest sees it."""
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http, "_WARNED_TOPICS", set())
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="huggingface_hub")
    return caplog


@pytest.mark.parametrize(("method", "given", "parameters"), CASES)
def test_the_client_parses_the_answer(url: str, method: str, given: Any, parameters: dict[str, Any]) -> None:
    """Each method, with each of its parameters, returns the fields that the service sent."""
    assert_same(raw(url, method, given, **parameters), plain(call(url, method, given, **parameters)), tolerance=1e-4)


@pytest.mark.full_grid
def test_the_asynchronous_client_parses_the_answer(url: str) -> None:
    """AsyncInferenceClient returns the same for all of them, asked at once."""

    async def ask(method: str, given: Any, parameters: dict[str, Any]) -> Any:
        async with AsyncInferenceClient(model=f"{url}/{BASES[method]}") as client:
            return await getattr(client, method)(**arguments(method, given), **parameters)

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(ask(*case) for case in CASES))

    for (method, given, parameters), answer in zip(CASES, asyncio.run(ask_all()), strict=True):
        assert_same(raw(url, method, given, **parameters), plain(answer), tolerance=1e-4)


@pytest.mark.parametrize("method", list(BASES))
def test_a_models_path_is_a_base_too(url: str, method: str) -> None:
    """The client gets the same at /models/{name}, with the URL given by the call."""
    answer = getattr(InferenceClient(), method)(**arguments(method, None), model=f"{url}/models/{MODELS[method]}")
    assert_same(plain(call(url, method)), plain(answer), tolerance=1e-4)


def test_entities_are_found(url: str) -> None:
    """People and places come with their group and their place in the text; with `none` tokens come with label and index."""
    found = [(item.entity_group, item.word, item.start, item.end) for item in call(url, "token_classification")]
    assert [("PER", "Ada Lovelace", 0, 12), ("PER", "Charles Babbage", 22, 37), ("LOC", "London", 43, 49)] == found
    tokens = call(url, "token_classification", aggregation_strategy="none")
    assert ("B-PER", 1, "ada", None) == (tokens[0].entity, tokens[0].index, tokens[0].word, tokens[0].entity_group)


def test_ignored_labels_are_left_out(url: str) -> None:
    """`ignore_labels` reaches the service, in place of its default."""
    groups = {item.entity_group for item in call(url, "token_classification", ignore_labels=["PER"])}
    assert {"O", "LOC"} == groups


def test_entities_at_the_end_of_a_long_text_are_found(url: str) -> None:
    """A text of several windows has its last entity found at its place in the whole text."""
    text = LONG + TEXT
    last = call(url, "token_classification", text, stride=16)[-1]
    assert ("London", len(text) - 7, len(text) - 1) == (last.word, last.start, last.end)


def test_one_answer_is_an_object(url: str) -> None:
    """`top_k` absent or 1 gives one answer with its place in the passage."""
    for parameters in ({}, {"top_k": 1}):
        answer = call(url, "question_answering", **parameters)
        assert ("Porto", 24, 29) == (answer.answer, answer.start, answer.end)
        assert 0.5 < answer.score <= 1


def test_several_answers_are_a_list(url: str) -> None:
    """`top_k` 3 gives three answers by falling score, the best as it comes alone."""
    answers = call(url, "question_answering", top_k=3)
    assert 3 == len(answers)
    assert sorted((answer.score for answer in answers), reverse=True) == [answer.score for answer in answers]
    assert_same(plain(call(url, "question_answering")), plain(answers[0]), tolerance=1e-4)


def test_parameters_of_answers_reach_the_service(url: str) -> None:
    """An impossible question may have no answer, and a short answer stays short."""
    nothing = {"question": "Who won the football match?", "context": "The river is long."}
    answers = call(url, "question_answering", nothing, top_k=50, handle_impossible_answer=True)
    assert "" in [answer.answer for answer in answers]
    assert "" not in [answer.answer for answer in call(url, "question_answering", nothing, top_k=50)]
    assert all(" " not in answer.answer for answer in call(url, "question_answering", top_k=5, max_answer_len=1))


def test_targets_limit_the_tokens(url: str) -> None:
    """Only targets are returned, best first, `top_k` of them at most."""
    assert ["england", "france"] == [item.token_str for item in call(url, "fill_mask", targets=["france", "england"])]
    assert ["england"] == [item.token_str for item in call(url, "fill_mask", targets=["france", "england"], top_k=1)]


def test_several_masks_are_a_list_each(url: str) -> None:
    """Two masks give two lists, which the client parses as such."""
    first, second = call(url, "fill_mask", "The [MASK] of England [MASK] in 1066.", top_k=2)
    assert [2, 2] == [len(first), len(second)]
    assert first[0].sequence.startswith(f"[CLS] the {first[0].token_str} of england [MASK]")


@pytest.mark.parametrize(
    ("method", "given", "parameters", "message"),
    [
        ("text_classification", None, {"top_k": 0}, "`parameters.top_k` is wrong"),
        ("token_classification", None, {"aggregation_strategy": "fast"}, "`parameters.aggregation_strategy` is wrong"),
        ("token_classification", LONG, {"stride": 510}, "inputs: `stride` is 510, which is too large for windows of 510 tokens"),
        ("question_answering", {"question": "", "context": "x"}, {}, "inputs: `question` is empty"),
        ("question_answering", None, {"max_seq_len": 513}, "inputs: `max_seq_len` is 513 and the model takes 512"),
        ("question_answering", {**BUILT, "context": LONG}, {"doc_stride": 380}, "`doc_stride` is 380, but"),
        ("fill_mask", "No mask.", {}, "inputs: the text has no mask; write `[MASK]`"),
        ("fill_mask", "The <mask> died.", {}, "`<mask>` is not this model's mask; write `[MASK]`"),
        ("fill_mask", "The [mask] died.", {}, "`[mask]` is not this model's mask; write `[MASK]`"),
        ("fill_mask", "The [ MASK ] died.", {}, "`[ MASK ]` is not this model's mask; write `[MASK]`"),
        ("fill_mask", None, {"targets": [""]}, "`targets` has no word"),
    ],
)
def test_the_client_shows_our_error(url: str, method: str, given: Any, parameters: dict[str, Any], message: str) -> None:
    """An error reaches the user of either client as 422 with our sentence and the request's id."""
    base, headers = f"{url}/{BASES[method]}", {"x-request-id": "my-request"}

    async def ask() -> Any:
        async with AsyncInferenceClient(model=base, headers=headers) as client:
            return await getattr(client, method)(**arguments(method, given), **parameters)

    with pytest.raises(HfHubHTTPError) as failed:
        getattr(InferenceClient(model=base, headers=headers), method)(**arguments(method, given), **parameters)
    with pytest.raises(HfHubHTTPError) as failed_too:
        asyncio.run(ask())
    for error in (failed.value, failed_too.value):
        assert 422 == error.response.status_code
        assert message in str(error)
        assert "my-request" in str(error)


@pytest.mark.parametrize(
    ("method", "base", "status", "message"),
    [
        ("token_classification", "models/nerr", 404, "no model `nerr` is loaded; did you mean `ner`?"),
        ("fill_mask", "answer", 422, "`inputs` is wrong: must be {question, context} or a list of these"),
        ("question_answering", "models/ner", 422, "`inputs` is wrong: must be a text or a list of texts"),
        ("fill_mask", "fillmask", 404, "there is no path `/fillmask`"),
    ],
)
def test_the_client_shows_a_wrong_address(url: str, method: str, base: str, status: int, message: str) -> None:
    """A model or a path that is not there, or is for another task, is said."""
    with pytest.raises(HfHubHTTPError) as failed:
        getattr(InferenceClient(model=f"{url}/{base}"), method)(**arguments(method, None))
    assert status == failed.value.response.status_code
    assert message in str(failed.value)


def test_the_client_warns_of_targets(url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that are no vocabulary entries make the client log our warning."""
    warned = warnings_of(caplog, monkeypatch)
    call(url, "fill_mask", targets=["england", "Zwickau"])
    assert ["1 of 2 are not in the vocabulary, so their first tokens are used: z"] == warned.messages


def test_the_client_warns_of_a_cut_text(url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is cut, with a warning, by classification alone: the others read it in windows."""
    warned = warnings_of(caplog, monkeypatch)
    call(url, "token_classification", LONG)
    call(url, "question_answering", {"question": "What is long?", "context": LONG})
    call(url, "fill_mask", f"{LONG} [MASK]")
    assert [] == warned.messages
    call(url, "text_classification", LONG)
    assert ["cut to the model's 512 tokens: inputs"] == warned.messages


@pytest.mark.parametrize("method", list(BASES))
def test_the_client_asks_for_info_and_health(url: str, method: str) -> None:
    """`get_endpoint_info` and `health_check` work below every base."""
    for base in (BASES[method], f"models/{MODELS[method]}"):
        client = InferenceClient(model=f"{url}/{base}", provider="hf-inference")
        assert MODELS[method] == client.get_endpoint_info()["name"]
        assert client.health_check() is True
