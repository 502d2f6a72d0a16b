"""tritonclient over HTTP: texts in binary and JSON tensors, metadata and probes."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

TEXTS = ["A warm, funny film.", "Dull."]


@pytest.fixture(name="client")
def connected(url: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        yield client


def text_input(name: str, *texts: str, binary: bool = True, column: bool = False) -> triton.InferInput:
    values = np.array([text.encode() for text in texts], object)
    values = values[:, None] if column else values
    return triton.InferInput(name, list(values.shape), "BYTES").set_data_from_numpy(values, binary_data=binary)


def own(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("column", [True, False])
def test_texts_are_classified(client: triton.InferenceServerClient, url: str, binary: bool, column: bool) -> None:
    answer = client.infer("sentiment", [text_input("inputs", *TEXTS, binary=binary, column=column)], request_id="7", timeout=5_000_000)
    expected = own(url, "/models/sentiment", inputs=TEXTS)

    assert answer.as_numpy("label").tolist() == [result[0]["label"].encode() for result in expected]
    assert [json.loads(text) for text in answer.as_numpy("json")] == expected
    assert answer.as_numpy("scores").shape == (2, 2)
    assert answer.as_numpy("score").dtype == np.float32
    assert (answer.get_response()["id"], answer.get_response()["model_name"]) == ("7", "sentiment")


def test_outputs_have_the_requested_form(client: triton.InferenceServerClient) -> None:
    answer = client.infer("sentiment", [text_input("inputs", *TEXTS)], outputs=[triton.InferRequestedOutput("label", binary_data=False)])

    assert answer.as_numpy("label").tolist() == ["positive", "negative"]
    assert answer.as_numpy("scores") is None


def test_questions_are_answered_and_texts_are_embedded(client: triton.InferenceServerClient) -> None:
    inputs = [text_input("question", "Where was the bridge built?"), text_input("context", "The bridge was built in Porto in 1886.")]
    answer = client.infer("qa", inputs, parameters={"top_k": 2})
    vectors = client.infer("embed", [text_input("inputs", *TEXTS)], parameters={"normalize": True}).as_numpy("embedding")

    assert [(answers := json.loads(answer.as_numpy("json")[0]))[0]["answer"], len(answers)] == ["Porto", 2]
    np.testing.assert_allclose([1, 1], np.linalg.norm(vectors, axis=1), atol=1e-5)


def test_errors_have_a_message_and_a_status(client: triton.InferenceServerClient) -> None:
    for call, value, status in (
        (lambda: client.infer("sentiment", [text_input("input", "a")]), "`inputs`", "422"),
        (lambda: client.infer("sentimental", [text_input("inputs", "a")]), "`sentiment`", "404"),
        (lambda: client.infer("sentiment", [text_input("inputs", "a")], priority=1), "`parameters.priority`", "422"),
        (lambda: client.infer("sentiment", [text_input("inputs", "a")], request_compression_algorithm="gzip"), "gzip", "415"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            call()
        assert value in raised.value.message()
        assert raised.value.status() == status


def test_a_client_that_accepts_gzip_reads_the_response(client: triton.InferenceServerClient) -> None:
    answer = client.infer("sentiment", [text_input("inputs", *TEXTS)], response_compression_algorithm="gzip")

    assert answer.as_numpy("label").tolist() == [b"positive", b"negative"]


def test_the_other_routes_of_the_protocol_answer(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("sentiment")
    assert not client.is_model_ready("none")
    assert client.get_server_metadata()["name"] == "bertserve"
    metadata = client.get_model_metadata("sentiment")
    assert [field["name"] for field in metadata["inputs"]] == ["inputs", "text_pair"]


def test_concurrent_calls_are_answered(client: triton.InferenceServerClient, url: str) -> None:
    handle = client.async_infer("sentiment", [text_input("inputs", *TEXTS)])

    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(url.removeprefix("http://")) as other:
            assert await other.is_server_live()
            assert (await other.get_model_metadata("sentiment"))["name"] == "sentiment"
            answers = await asyncio.gather(*(other.infer("sentiment", [text_input("inputs", text)]) for text in TEXTS * 4))
            with pytest.raises(InferenceServerException, match="`inputs`"):
                await other.infer("sentiment", [text_input("input", "a")])
            return [answer.as_numpy("label")[0] for answer in answers]

    assert asyncio.run(ask()) == [b"positive", b"negative"] * 4
    assert handle.get_result().as_numpy("label").tolist() == [b"positive", b"negative"]
