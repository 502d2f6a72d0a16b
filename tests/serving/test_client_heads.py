"""The official client, unmodified, for embeddings, similarity, zero-shot labels, regression, multi-label and "no answer"."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

import tiny
from application import assert_same
from conftest import running

TEXT = "a good film"
LABELS = ["good", "bad", "a dull book"]


@pytest.fixture(scope="module", name="url")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with a tiny model of each kind."""
    folder = tmp_path_factory.mktemp("client")
    models = folder / "models"
    prompts = {"prompts": {"query": "the book "}, "default_prompt": None}
    tiny.bundle(models, "vectors", task="feature-extraction", embedding=tiny.EMBEDDING | prompts)
    tiny.bundle(models, "nli", labels=("entailment", "neutral", "contradiction"))
    tiny.bundle(models, "stars", labels=("score",), activation="none")
    tiny.bundle(models, "tags", labels=("fun", "long", "old"), activation="sigmoid")
    tiny.bundle(models, "squad2", task="question-answering")
    with running(models, folder / "log", "--allow-implicit-default") as served:
        yield served.url


def raw(url: str, path: str, body: Any) -> Any:
    """Returns the body of the answer without the client."""
    response = httpx.post(f"{url}/{path}", json=body, timeout=30, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("base", ["embed", "models/vectors"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": True},
        {"normalize": False, "truncate": True, "truncation_direction": "left"},
        {"dimensions": 2, "normalize": True},
        {"prompt_name": "query", "encoding_format": "float"},
    ],
)
@pytest.mark.parametrize("text", [TEXT, [TEXT], [TEXT, "", "bad"]])
def test_the_client_gets_vectors(url: str, base: str, options: dict[str, Any], text: Any) -> None:
    """`feature_extraction` returns an array with a row for each text, with every option that it has."""
    found = InferenceClient(model=f"{url}/{base}").feature_extraction(text, **options)
    rows = len(text) if isinstance(text, list) else 1
    assert (rows, options.get("dimensions", tiny.HIDDEN)) == found.shape
    assert np.float32 == found.dtype
    np.testing.assert_allclose(raw(url, "embed", {"inputs": text, **options}), found, rtol=0, atol=1e-5)
    if options.get("normalize"):
        np.testing.assert_allclose(np.ones(rows), np.linalg.norm(found, axis=1), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding_format": "base64"}, "`encoding_format` is `base64`, which huggingface_hub cannot read"),
        ({"prompt_name": "passage"}, "unknown prompt `passage`"),
        ({"dimensions": 99}, "this model's vectors have 8"),
    ],
)
def test_the_client_shows_what_is_not_there(url: str, options: dict[str, Any], message: str) -> None:
    """An option that this model does not have reaches the client's user as our sentence."""
    with pytest.raises(HfHubHTTPError) as failed:
        InferenceClient(model=f"{url}/embed").feature_extraction(TEXT, **options)
    assert message in str(failed.value)


@pytest.mark.parametrize("base", ["similarity", "models/vectors"])
def test_the_client_gets_similarities(url: str, base: str) -> None:
    """`sentence_similarity` returns a number for each sentence: the cosine of what `feature_extraction` returns."""
    client = InferenceClient(model=f"{url}/{base}")
    found = client.sentence_similarity(TEXT, ["a great film", "bad"])
    vectors = InferenceClient(model=f"{url}/embed").feature_extraction([TEXT, "a great film", "bad"], normalize=True)
    assert pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5) == found


@pytest.mark.parametrize("base", ["zero-shot", "models/nli"])
@pytest.mark.parametrize("options", [{}, {"multi_label": True}, {"hypothesis_template": "the film was {} !"}])
def test_the_client_gets_zero_shot_labels(url: str, base: str, options: dict[str, Any]) -> None:
    """`zero_shot_classification` returns labels with scores, best first, with every option that it has."""
    found = InferenceClient(model=f"{url}/{base}").zero_shot_classification(TEXT, LABELS, **options)
    expected = raw(url, "zero-shot", {"inputs": TEXT, "parameters": {"candidate_labels": LABELS, **options}})
    assert_same(expected, [{"label": item.label, "score": item.score} for item in found])
    assert sorted(LABELS) == sorted(item.label for item in found)


def test_the_asynchronous_client_gets_the_same(url: str) -> None:
    """AsyncInferenceClient returns what the other one does."""

    async def ask() -> tuple[Any, Any, Any]:
        async with AsyncInferenceClient() as client:
            return await asyncio.gather(
                client.feature_extraction(TEXT, model=f"{url}/embed"),
                client.sentence_similarity(TEXT, ["bad"], model=f"{url}/similarity"),
                client.zero_shot_classification(TEXT, LABELS, model=f"{url}/zero-shot"),
            )

    client = InferenceClient()
    vectors, similarities, labels = asyncio.run(ask())
    np.testing.assert_allclose(client.feature_extraction(TEXT, model=f"{url}/embed"), vectors, rtol=0, atol=1e-6)
    assert pytest.approx(client.sentence_similarity(TEXT, ["bad"], model=f"{url}/similarity"), abs=1e-6) == similarities
    expected = client.zero_shot_classification(TEXT, LABELS, model=f"{url}/zero-shot")
    assert [item.label for item in expected] == [item.label for item in labels]


def test_a_model_of_no_inference_is_said(url: str) -> None:
    """Zero-shot at a classifier's path is refused with the model that can."""
    with pytest.raises(HfHubHTTPError) as failed:
        InferenceClient(model=f"{url}/models/tags").zero_shot_classification(TEXT, LABELS)
    assert "does not support zero-shot-classification" in str(failed.value)
    assert "Models for zero-shot-classification: `nli`." in str(failed.value)


def test_a_regression_gives_its_raw_score(url: str) -> None:
    """A model of one label without activation gives the logit, whatever its size, and `sigmoid` on request."""
    client = InferenceClient(model=f"{url}/models/stars")
    [score] = client.text_classification(TEXT)
    [share] = client.text_classification(TEXT, function_to_apply="sigmoid")
    assert ("score", "score") == (score.label, share.label)
    assert pytest.approx(1 / (1 + np.exp(-score.score)), abs=1e-6) == share.score
    [[plain]] = raw(url, "models/stars", {"inputs": TEXT, "parameters": {"function_to_apply": "none"}})
    assert pytest.approx(plain["score"], abs=1e-6) == score.score


def test_a_multi_label_model_scores_each_label(url: str) -> None:
    """Sigmoids, one a label: they do not add up to 1, and equal those of the logits."""
    client = InferenceClient(model=f"{url}/models/tags")
    scores = {item.label: item.score for item in client.text_classification(TEXT)}
    logits = {item.label: item.score for item in client.text_classification(TEXT, function_to_apply="none")}
    assert {"fun", "long", "old"} == set(scores)
    assert {label: pytest.approx(1 / (1 + np.exp(-value)), abs=1e-6) for label, value in logits.items()} == scores
    assert abs(sum(scores.values()) - 1) > 0.01
    assert [max(scores, key=lambda label: scores[label])] == [item.label for item in client.text_classification(TEXT, top_k=1)]


def test_no_answer_reaches_the_client(url: str) -> None:
    """With `handle_impossible_answer` the empty answer is among the answers, and is the answer where nothing is as likely."""
    client = InferenceClient(model=f"{url}/answer")
    passage = "the book was long and the film was not good"
    found: Any = client.question_answering(question="who?", context=passage, top_k=1000, handle_impossible_answer=True)
    [null] = [item for item in found if item.answer == ""]
    assert (0, 0) == (null.start, null.end)
    without: Any = client.question_answering(question="who?", context=passage, top_k=1000)
    assert "" not in [item.answer for item in without]
    best: Any = client.question_answering(question="who?", context=passage, handle_impossible_answer=True)
    expected = found[0]
    assert (expected.answer, expected.score) == (best.answer, pytest.approx(best.score))
    assert (best.answer == "") is (null.score >= without[0].score)


@pytest.mark.parametrize(("base", "name"), [("embed", "vectors"), ("similarity", "vectors"), ("zero-shot", "nli"), ("rerank", "stars")])
def test_the_client_asks_for_info_and_health(url: str, base: str, name: str) -> None:
    """`get_endpoint_info` and `health_check` work below every base."""
    client = InferenceClient(model=f"{url}/{base}", provider="hf-inference")
    assert name == client.get_endpoint_info()["name"]
    assert client.health_check() is True
