"""The openai client: embeddings, models, and an exception for each error."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from conftest import running

TEXTS = ["A warm, funny film.", "The bridge was built in 1886."]
KEY = "swordfish"


@pytest.fixture(name="client", scope="module")
def client_of_the_service(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(name="protected", scope="module")
def locked_service(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the URL of a service with one API key, which takes one request at a time."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    flags = ["--api-key-file", str(keys), "--max-concurrent", "1"]
    with running(tiny_models, *flags) as url:
        yield url


def test_vectors_are_the_same_in_both_formats(client: openai.OpenAI) -> None:
    """By default, the client requests base64; it reads both formats."""
    base64 = client.embeddings.create(model="embed", input=TEXTS)
    floats = client.embeddings.create(model="embed", input=TEXTS, encoding_format="float")

    assert [item.index for item in base64.data] == [0, 1]
    for one, other in zip(base64.data, floats.data, strict=True):
        assert other.embedding == pytest.approx(one.embedding)
    assert base64.usage.prompt_tokens == base64.usage.total_tokens > 10
    assert base64.model == "embed"


def test_dimensions_shorten_the_vector(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="embed", input=TEXTS[0], dimensions=3, user="me")

    assert [len(item.embedding) for item in answer.data] == [3]


def test_the_async_client_returns_embeddings(url: str) -> None:
    async def ask() -> int:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return len((await client.embeddings.create(model="embed", input=TEXTS)).data)

    assert asyncio.run(ask()) == 2


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert {"embed", "rerank", "nli", "sentiment"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("embed").id == "embed"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="text-embedding-3-small", input="a")
    assert "`text-embedding-3-small`" in caught.value.body["message"]
    assert caught.value.code == "not_found"
    assert "embed" in str(caught.value)
    assert caught.value.request_id is not None


@pytest.mark.parametrize("changes", [{"dimensions": 10_000}, {"input": [1, 2]}, {"extra_body": {"truncation": True}}])
def test_invalid_values_are_bad_requests(client: openai.OpenAI, changes: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(**{"model": "embed", "input": "a"} | changes)
    assert caught.value.type == "invalid_request_error"


def test_other_paths_are_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.chat.completions.create(model="embed", messages=[{"role": "user", "content": "hello"}])


def test_a_wrong_key_is_an_authentication_error(protected: str) -> None:
    with openai.OpenAI(base_url=f"{protected}/v1", api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with openai.OpenAI(base_url=f"{protected}/v1", api_key=KEY) as client:
        assert client.models.list().data


def test_the_client_retries_a_refused_request(protected: str) -> None:
    host, _, port = protected.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as other:
        head = f"POST /classify HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\ncontent-length: 2\r\n\r\n{{"
        other.sendall(head.encode())
        with openai.OpenAI(base_url=f"{protected}/v1", api_key=KEY) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                while True:  # until the other request is in progress
                    client.with_options(max_retries=0).embeddings.create(model="embed", input="a")
            assert caught.value.response.headers["retry-after"] == "1"
            threading.Timer(0.2, lambda: other.sendall(b"}")).start()
            assert len(client.with_options(max_retries=2).embeddings.create(model="embed", input="a").data) == 1
