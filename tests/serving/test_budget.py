"""The limits of one request in addition to its tokens: characters, memory, decoding work and response bytes, for all tasks."""

from typing import Any

import pytest

from support.app_client import Send, error_of, error_of_inputs, post, result_of


@pytest.fixture(name="limit_bytes")
def response_limit(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda count: monkeypatch.setattr("bertserve.service.tasks.cost.MAX_RESPONSE_BYTES", count)


def too_large(api: Send, path: str, **body: Any) -> str:
    return error_of(post(api, body, path=path), 413, "too_large")


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
        ("/similarity", {"inputs": {"source_sentence": "good", "sentences": ["film"] * 50}}),
        ("/embed", {"inputs": ["film"] * 10}),
        ("/embed", {"inputs": ["film"] * 10, "encoding_format": "base64"}),
        ("/embed", {"inputs": "a good film", "pooling": "none", "layers": "last_four"}),
        ("/attention", {"inputs": ["a good film"] * 4}),
        ("/v1/embeddings", {"input": ["film"] * 10}),
        ("/embed_all", {"inputs": "film " * 20}),
        ("/v2/models/nli/infer", {"inputs": [{"name": "inputs", "shape": [64], "datatype": "BYTES", "data": ["good"] * 64}]}),
        ("/v1/models/nli:predict", {"instances": ["good"] * 64}),
        ("/classify", {"inputs": "good film " * 10, "model": "nli", "parameters": {"explain": True}}),
        ("/classify", {"inputs": ["good"] * 64, "model": "nli", "parameters": {"decide": True, "threshold": 1}}),
        ("/ner", {"inputs": "good film " * 20, "parameters": {"ignore_labels": [], "decide": True, "threshold": 0}}),
        ("/rerank", {"query": "good", "texts": ["film"] * 20, "parameters": {"decide": True, "threshold": 0}}),
        ("/zero-shot", {"inputs": "good", "parameters": {"candidate_labels": [*"abcdefgh"], "decide": True, "threshold": 1}}),
    ],
)
def test_the_bytes_of_every_response_are_limited(api: Send, limit_bytes: Any, path: str, body: dict[str, Any]) -> None:
    whole = post(api, body, path=path)
    assert whole.status_code == 200, whole.text
    limit_bytes(len(whole.content) // 2)
    response = post(api, body, path=path)
    assert (response.status_code, response.json()["error_type"]) == (413, "too_large")
    assert f"bytes and {len(whole.content) // 2} " in response.text
    limit_bytes(4 * len(whole.content))
    assert post(api, body, path=path).status_code == 200


def test_answers_count_with_their_own_length(api: Send, limit_bytes: Any) -> None:
    """Many short answers of a long passage are accepted. As many long answers of the same passage are refused."""
    limit_bytes(2**16)
    passage = {"question": "good", "context": " ".join(f"{i:03}" * 60 for i in range(100))}
    assert len(result_of(api, "/answer", passage, top_k=50, max_answer_len=1)) == 50
    assert "bytes and 65536 " in too_large(api, "/answer", inputs=passage, parameters={"top_k": 50, "max_answer_len": 20})


@pytest.mark.parametrize(
    ("path", "limit_us", "inputs", "accepted", "refused"),
    [
        ("/answer", 40_000, {"question": "good", "context": "film " * 3000}, {"top_k": 10}, {"top_k": 1000}),
        ("/answer", 40_000, {"question": "good", "context": "film " * 1000}, {"max_seq_len": 30}, {"max_seq_len": 5, "doc_stride": 0}),
        ("/ner", 5_000, "good " * 1000, {"aggregation_strategy": "none"}, {"aggregation_strategy": "average"}),
    ],
    ids=["different answers of a passage that repeats a word", "windows", "grouped tokens"],
)
def test_the_work_of_decoding_has_a_limit(
    api: Send, path: str, limit_us: int, inputs: Any, accepted: dict[str, Any], refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertserve.service.tasks.cost.MAX_DECODE_US", limit_us)
    assert post(api, {"inputs": inputs, "parameters": accepted}, path=path).status_code == 200
    assert "`max_answer_len`" in too_large(api, path, inputs=inputs, parameters=refused)


def test_the_characters_of_a_question_count_for_each_choice(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertserve.service.tasks.cost.MAX_TOKENIZED_CHARS", 1000)
    few, many = ({"question": "good " * 60, "context": "film", "choices": ["a"] * count} for count in (2, 4))
    assert len(result_of(api, "/choose", few)) == 2
    assert "1340 characters" in error_of(post(api, {"inputs": many}, path="/choose"), 413, "too_large")


def test_all_targets_together_have_a_limit_of_characters(api: Send) -> None:
    assert "16384 characters" in error_of_inputs(api, "/fill-mask", "a [MASK]", targets=["x" * 256] * 65)
