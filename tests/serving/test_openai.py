"""OpenAI's paths below `/v1`, and the rerank formats of Cohere and Jina; tests/clients runs the client libraries themselves."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bertserve.service.auth import Authenticator
from support import tiny
from support.app_client import Send, call_once, keys, open_api, post, result, state_of

EMBEDDINGS = "/v1/embeddings"
RERANKS = ["/v1/rerank", "/v2/rerank"]


@pytest.fixture(name="api", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Send:
    """Returns a client of a service with two embedding models, a reranker and a classifier."""
    models = tmp_path_factory.mktemp("models")
    tiny.bundle(models, "vectors", task="feature-extraction")
    tiny.bundle(models, "tokens", task="feature-extraction", embedding=tiny.EMBEDDING | {"pooling": "none"})
    tiny.bundle(models, "ranker", labels=("LABEL_0",), activation="none")
    tiny.bundle(models, "classes")
    return open_api(models)


def openai_error(response: httpx.Response, status: int, kind: str, code: str) -> str:
    """Returns the message of an error after checking its status and OpenAI's format."""
    assert response.status_code == status, response.text
    body = response.json()
    message = body["error"].pop("message")
    assert body["error"] == {"type": kind, "param": None, "code": code}
    assert body == {"error": body["error"], "error_type": code, "request_id": response.headers["x-request-id"]}
    return str(message)


def test_embeddings_equal_those_of_embed(api: Send) -> None:
    expected = result(api, "/embed", inputs=["good film", "bad"], normalize=True, model="vectors")
    actual = result(api, EMBEDDINGS, input=["good film", "bad"], model="vectors")

    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(expected)]
    assert actual == {"object": "list", "data": data, "model": "vectors", "usage": {"prompt_tokens": 7, "total_tokens": 7}}


def test_embeddings_can_be_shortened_and_encoded_as_base64(api: Send) -> None:
    """The base64 text has float32 values. `dimensions` keeps the first ones, with length 1. `user` and null keys have no effect."""
    whole = np.array(result(api, EMBEDDINGS, input="good", model="vectors")["data"][0]["embedding"])
    assert np.linalg.norm(whole) == pytest.approx(1, abs=1e-6)  # whatever the model's own setting
    first = whole[:3]
    more = {"user": "me", "encoding_format": "base64", "dimensions": 3, "unknown": None}
    base64_text = result(api, EMBEDDINGS, input="good", model="vectors", **more)["data"][0]["embedding"]

    assert np.frombuffer(base64.b64decode(base64_text), "<f4") == pytest.approx(first / np.linalg.norm(first), abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        *((EMBEDDINGS, {"input": ids, "model": "vectors"}, "`check_embedding_ctx_length=False`") for ids in ([1, 2], [[1, 2], [3]], [[]])),
        (EMBEDDINGS, {"input": "good", "encodingformat": "float"}, "`encoding_format`"),
        (EMBEDDINGS, {"input": "good", "parameters": {}}, "`parameters`"),
        (EMBEDDINGS, {"inputs": "good"}, "`input`"),
        (EMBEDDINGS, {"input": "good", "dimensions": 999, "model": "vectors"}, "`dimensions` is 999"),
        (EMBEDDINGS, {"input": ["good", None]}, "`input[1]`"),
        (EMBEDDINGS, {}, "`input`"),
        (EMBEDDINGS, {"input": "good", "model": "tokens"}, "/embed"),
        (EMBEDDINGS, {"input": "good", "model": "classes"}, "text-classification"),
        ("/v1/rerank", {"query": "good", "documents": ["a"], "top_k": 1}, "`top_n`"),
        ("/v1/rerank", {"query": "good", "documents": [{}]}, "`documents[0].text`"),
        ("/v1/rerank", {"query": "good", "documents": [{"text": "a", "page": 2**64}], "return_documents": True}, "64 bits"),
        ("/v1/rerank", {"query": "good", "documents": ["a", 1]}, "`documents[1]`"),
        ("/v1/rerank", {"query": "good", "documents": ["a"], "max_tokens_per_doc": 100}, "`max_tokens_per_doc`"),
        ("/v1/rerank", {"query": "good", "documents": ["a"], "model": "vectors"}, "feature-extraction"),
    ],
)
def test_invalid_bodies_are_bad_requests(api: Send, path: str, body: dict[str, Any], word: str) -> None:
    """The status is 400 instead of 422, because OpenAI's clients raise BadRequestError for 400; the message is in `error.message`.

    Ids from an OpenAI vocabulary would be other words here; their message names the LangChain option to set.
    """
    assert word in openai_error(post(api, body, path=path), 400, "invalid_request_error", "invalid_value")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "code"),
    [
        ("GET", "/v1/nowhere", b"", 404, "not_found_error", "not_found"),
        ("POST", "/v1/chat/completions", b"{}", 404, "not_found_error", "not_found"),
        ("GET", "/v1/models/nowhere", b"", 404, "not_found_error", "not_found"),
        ("POST", EMBEDDINGS, b'{"input": "a", "model": "text-embedding-3-small"}', 404, "not_found_error", "not_found"),
        ("GET", EMBEDDINGS, b"", 405, "invalid_request_error", "method_not_allowed"),
        ("POST", EMBEDDINGS, b"{", 400, "invalid_request_error", "malformed"),
        ("POST", EMBEDDINGS, b" " * 9_000_000, 413, "invalid_request_error", "too_large"),
        ("POST", EMBEDDINGS, b'{"input": [' + b'"a",' * 600 + b'"a"]}', 413, "invalid_request_error", "too_large"),
    ],
)
def test_errors_below_v1_have_the_openai_format(api: Send, method: str, path: str, body: bytes, status: int, kind: str, code: str) -> None:
    openai_error(api(method, path, content=body), status, kind, code)


def test_errors_of_other_paths_have_the_service_format(api: Send) -> None:
    """Clients of KServe and of Cohere's version 2 read `error` as a text."""
    paths = ("/v1/models/nowhere:predict", "/v2/rerank", "/v1beta", "/v1")
    for method, path in (*(("POST", path) for path in paths), ("PUT", "/v1/models/nowhere:predict")):
        assert isinstance(api(method, path, content=b"{}").json()["error"], str), path


def test_a_missing_key_has_an_error_in_the_openai_format(models: Path) -> None:
    auth = Authenticator(keys(models.parent, "swordfish"))
    answer = call_once(state_of(models), "GET", "/v1/models", auth=auth)

    assert "Authorization" in openai_error(answer, 401, "authentication_error", "unauthorized")


def test_models_are_listed(api: Send) -> None:
    page = api("GET", "/v1/models").json()
    one = api("GET", "/v1/models/vectors").json()

    assert [model["id"] for model in page["data"]] == page["models"] == ["classes", "ranker", "tokens", "vectors"]
    assert page["object"] == "list"
    assert isinstance(one.pop("created"), int)
    expected = {"id": "vectors", "object": "model", "owned_by": "bertserve", "task": "feature-extraction", "name": "vectors", "ready": True}
    assert one == expected


@pytest.mark.parametrize("path", RERANKS)
def test_documents_are_ranked_like_the_texts_of_rerank(api: Send, path: str) -> None:
    texts = ["bad", "good film", "film"]
    expected = result(api, "/rerank", query="good", texts=texts)[:2]
    documents = [{"text": "bad", "id": "7"}, {"text": "good film", "page": 8, "more": {"tags": [None, 0.5]}}, "film"]
    actual = result(api, path, query="good", documents=documents, top_n=2, return_documents=True, model="ranker")

    objects = [*documents[:2], {"text": "film"}]
    results = [{"index": item["index"], "relevance_score": item["score"], "document": objects[item["index"]]} for item in expected]
    assert actual.pop("results") == results
    tokens = 3 * 4 + 4  # [CLS] good [SEP] and a last [SEP] for each of 3 texts, which have 4 tokens
    assert {key: actual[key] for key in ("model", "usage", "meta")} == {
        "model": "ranker",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"tokens": {"input_tokens": tokens}},
    }


def test_an_answer_has_the_id_of_its_request(api: Send) -> None:
    answer = post(api, {"query": "good", "documents": ["bad"]}, path="/v2/rerank")

    assert answer.headers["x-request-id"] == answer.json()["id"]
    assert [{"index": item["index"]} for item in answer.json()["results"]] == [{"index": 0}]
    assert result(api, "/v2/rerank", query="good", documents=[])["results"] == []
