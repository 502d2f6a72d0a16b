"""The official client, unmodified, against a running service: results, errors and warnings of every task, as its user sees them."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from support import ROOT, tiny
from support.app_client import assert_same
from support.replica import running

KEY = "swordfish"
HEADERS = {"authorization": f"Bearer {KEY}"}
TEXT = "Ada Lovelace wrote to Charles Babbage from London."
PASSAGE = "The bridge was built in Porto in 1886 by a company of engineers, and it was painted blue in 1990."
QUESTION = "Where was the bridge built?"
BUILT = {"question": QUESTION, "context": PASSAGE}
LONG = "The river is long and the valley is wide. " * 70  # several windows
SENTENCES = {"sentence": "a good film", "other_sentences": ["a great film", "bad"]}
LABELS = {"text": "a good film", "candidate_labels": ["good", "bad", "a dull book"]}
# method -> path, model and default arguments
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text_classification": ("classify", "sentiment", {"text": "A warm, funny and thoroughly engaging film."}),
    "token_classification": ("ner", "ner", {"text": TEXT}),
    "question_answering": ("answer", "qa", BUILT),
    "fill_mask": ("fill-mask", "fill-mask", {"text": "The king of [MASK] died in 1066."}),
    "feature_extraction": ("embed", "vectors", {"text": "a good film"}),
    "sentence_similarity": ("similarity", "vectors", SENTENCES),
    "zero_shot_classification": ("zero-shot", "nli", LABELS),
}
# method, arguments that replace defaults, parameters
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        ("text_classification", {}, parameters)
        for parameters in ({}, {"top_k": 1}, {"top_k": 2, "function_to_apply": "none"}, {"function_to_apply": "sigmoid"})
    ),
    *(("text_classification", {"text": text}, {}) for text in ("", "日本 é 😀", '"quoted" \\ back\nslash', "a [SEP] b")),
    ("token_classification", {}, {}),
    *(("token_classification", {}, {"aggregation_strategy": name}) for name in ("none", "simple", "first", "average", "max")),
    ("token_classification", {}, {"ignore_labels": [], "aggregation_strategy": "first"}),
    ("token_classification", {"text": LONG + TEXT}, {"stride": 16}),
    ("token_classification", {"text": f"\U0001f600 Jose\u0301 lives in 東京,\r\nand {TEXT}"}, {}),
    ("question_answering", {}, {}),
    ("question_answering", {}, {"top_k": 3}),
    ("question_answering", {}, {"top_k": 3, "handle_impossible_answer": True, "align_to_words": False}),
    ("fill_mask", {}, {}),
    ("fill_mask", {}, {"targets": ["england", "france", "spain"], "top_k": 2}),
    ("fill_mask", {"text": "The [MASK] of England [MASK] in 1066."}, {"top_k": 3}),
    ("fill_mask", {"text": f"{LONG} The king of [MASK] died in 1066."}, {"top_k": 1}),
    *(
        ("feature_extraction", {"text": text}, parameters)
        for text in ("a good film", ["a good film"], ["a good film", "", "bad"])
        for parameters in (
            {},
            {"normalize": True},
            {"normalize": False, "truncate": True, "truncation_direction": "left"},
            {"dimensions": 2, "normalize": True},
            {"prompt_name": "query", "encoding_format": "float"},
        )
    ),
    ("sentence_similarity", {}, {}),
    ("zero_shot_classification", {}, {}),
    ("zero_shot_classification", {}, {"multi_label": True}),
    ("zero_shot_classification", {}, {"hypothesis_template": "the film was {} !"}),
]


@pytest.fixture(scope="module", name="url")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the URL of a service with an API key, the included models and tiny models."""
    folder = tmp_path_factory.mktemp("client")
    prompts = {"prompts": {"query": "the book "}}
    tiny.bundle(folder / "models", "vectors", task="feature-extraction", embedding=tiny.EMBEDDING | prompts)
    tiny.bundle(folder / "models", "ranker", labels=("LABEL_0",), activation="none")
    tiny.bundle(folder / "models", "tags", labels=("fun", "long", "old"), activation="sigmoid")
    (folder / "key").write_text(KEY)
    defaults = ",".join(f"{path}={model}" for path, model, _ in METHODS.values())
    flags = ("--models", str(folder / "models"), "--default", defaults, "--allow-implicit-default", "--api-key-file", str(folder / "key"))
    included = (ROOT / "models" / name for name in ("sentiment", "ner", "qa", "fill-mask", "nli"))
    with running(next(included), folder / "log", "--models", ",".join(map(str, included)), *flags) as server:
        yield server.url


def call(client: Any, method: str, arguments: dict[str, Any], parameters: dict[str, Any], **more: Any) -> Any:
    return getattr(client, method)(**METHODS[method][2] | arguments, **parameters, **more)


def client_of(url: str, method: str) -> InferenceClient:
    return InferenceClient(model=f"{url}/{METHODS[method][0]}", token=KEY)


def raw(url: str, method: str, arguments: dict[str, Any], parameters: dict[str, Any]) -> Any:
    """Returns the response body for the same request, sent without the client."""
    values = METHODS[method][2] | arguments
    inputs = values if method == "question_answering" else values.get("text")
    if method == "sentence_similarity":
        inputs = {"source_sentence": values["sentence"], "sentences": values["other_sentences"]}
    labels = {"candidate_labels": values["candidate_labels"]} if method == "zero_shot_classification" else {}
    body = {"inputs": inputs, "parameters": parameters | labels}
    response = httpx.post(f"{url}/{METHODS[method][0]}", json=body, headers=HEADERS, timeout=30, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()[0] if method == "text_classification" else response.json()


def plain(output: Any) -> Any:
    """Returns a result of the client as JSON values, without the fields that the client sets to None."""
    if isinstance(output, np.ndarray):
        assert output.dtype == np.float32
        return output.tolist()
    if isinstance(output, list):
        return [plain(item) for item in output]
    return output if isinstance(output, float) else {key: value for key, value in vars(output).items() if value is not None}


@pytest.mark.parametrize(("method", "arguments", "parameters"), CASES)
def test_the_client_parses_the_response(url: str, method: str, arguments: dict[str, Any], parameters: dict[str, Any]) -> None:
    expected = raw(url, method, arguments, parameters)
    assert_same(plain(call(client_of(url, method), method, arguments, parameters)), expected, tolerance=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_path_of_a_model_can_be_the_base_url(url: str, method: str) -> None:
    path, model, _ = METHODS[method]
    expected = raw(url, method, {}, {})
    for base in (path, f"models/{model}"):
        assert_same(plain(call(InferenceClient(token=KEY), method, {}, {}, model=f"{url}/{base}")), expected, tolerance=1e-4)
        assert_same(plain(call(InferenceClient(base_url=f"{url}/{base}", api_key=KEY), method, {}, {})), expected, tolerance=1e-4)
        client = InferenceClient(model=f"{url}/{base}", provider="hf-inference", token=KEY)
        assert client.get_endpoint_info()["name"] == model
        assert client.health_check() is True


@pytest.mark.parametrize(
    ("method", "base", "arguments", "parameters", "status", "value"),
    [
        ("text_classification", "", {}, {"top_k": 0}, 422, "`parameters.top_k`"),
        ("token_classification", "models/nerr", {}, {}, 404, "did you mean `ner`?"),
        ("question_answering", "", {"question": ""}, {}, 422, "inputs: `question`"),
        ("fill_mask", "", {"text": "No mask."}, {}, 422, "`[MASK]`"),
        ("fill_mask", "fillmask", {}, {}, 404, "`/fillmask`"),
        ("feature_extraction", "", {}, {"prompt_name": "passage"}, 422, "`passage`"),
        ("zero_shot_classification", "models/tags", {}, {}, 422, "zero-shot-classification: `nli`"),
    ],
)
def test_the_client_shows_the_error_of_the_service(
    url: str, method: str, base: str, arguments: dict[str, Any], parameters: dict[str, Any], status: int, value: str
) -> None:
    client = InferenceClient(model=f"{url}/{base or METHODS[method][0]}", token=KEY, headers={"x-request-id": "my-request"})
    with pytest.raises(HfHubHTTPError) as error:
        call(client, method, arguments, parameters)
    assert error.value.response.status_code == status
    assert value in str(error.value)
    assert "my-request" in str(error.value)


def test_the_client_logs_the_warning_of_the_service(url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns once per process and topic, so no other test of this file has a truncated text."""
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="huggingface_hub")
    call(client_of(url, "token_classification"), "token_classification", {"text": LONG}, {})
    call(client_of(url, "text_classification"), "text_classification", {"text": LONG}, {})
    assert re.findall(r"\d+", " ".join(caplog.messages)) == ["512"]
