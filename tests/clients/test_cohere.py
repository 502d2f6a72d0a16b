"""The clients of cohere: `Client` calls `/v1/rerank`, and `ClientV2` calls `/v2/rerank`."""

import cohere
import pytest
from cohere.errors import NotFoundError, UnprocessableEntityError

QUERY = "Where was the bridge built?"
DOCUMENTS = ["The film was too long.", "The bridge was built in Porto.", "Cranes rest in the delta in October."]


def test_client_v2_ranks_documents(url: str) -> None:
    answer = cohere.ClientV2(api_key="none", base_url=url).rerank(model="rerank", query=QUERY, documents=DOCUMENTS, top_n=2)

    assert [answer.results[0].index, len(answer.results)] == [1, 2]
    assert answer.results[0].relevance_score > 0.5 > answer.results[1].relevance_score
    assert answer.meta is not None and answer.meta.tokens is not None and answer.meta.tokens.input_tokens


def test_client_v1_ranks_and_returns_documents(url: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "title": "one"}]
    answer = cohere.Client(api_key="none", base_url=url).rerank(model="rerank", query=QUERY, documents=documents, return_documents=True)

    assert [result.index for result in answer.results] == [1, 0]
    assert [result.document.text for result in answer.results] == [DOCUMENTS[1], DOCUMENTS[0]]
    assert answer.results[0].document.title == "one"


def test_errors_raise_the_exceptions_of_the_client(url: str) -> None:
    client = cohere.ClientV2(api_key="none", base_url=url)
    with pytest.raises(NotFoundError, match=r"`rerank-v3\.5`"):
        client.rerank(model="rerank-v3.5", query=QUERY, documents=DOCUMENTS)
    with pytest.raises(UnprocessableEntityError, match="max_tokens_per_doc"):
        client.rerank(model="rerank", query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=10)
