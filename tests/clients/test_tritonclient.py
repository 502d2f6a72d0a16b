"""tritonclient over HTTP: texts, token ids, binary and JSON tensors, and the other routes of the protocol."""

from __future__ import annotations

import asyncio
import json
import struct
import urllib.error
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


def id_input(name: str, values: Any, *, binary: bool = True) -> triton.InferInput:
    array = np.array(values, np.int64)
    return triton.InferInput(name, list(array.shape), "INT64").set_data_from_numpy(array, binary_data=binary)


def own(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("column", [True, False])
def test_texts_are_classified(client: triton.InferenceServerClient, url: str, binary: bool, column: bool) -> None:
    found = client.infer("sentiment", [text_input("inputs", *TEXTS, binary=binary, column=column)], request_id="7")
    expected = own(url, "/models/sentiment", inputs=TEXTS)

    assert [result[0]["label"].encode() for result in expected] == found.as_numpy("label").tolist()
    assert expected == [json.loads(text) for text in found.as_numpy("json")]
    assert (2, 2) == found.as_numpy("scores").shape
    assert np.float32 == found.as_numpy("score").dtype
    assert ("7", "sentiment") == (found.get_response()["id"], found.get_response()["model_name"])


def test_outputs_have_the_requested_form(client: triton.InferenceServerClient) -> None:
    asked = [
        triton.InferRequestedOutput("label", binary_data=False),
        triton.InferRequestedOutput("scores", class_count=1),
    ]
    found = client.infer("sentiment", [text_input("inputs", *TEXTS)], outputs=asked)

    assert ["positive", "negative"] == found.as_numpy("label").tolist()
    score, index, label = found.as_numpy("scores")[0, 0].decode().split(":")
    assert ("positive", True) == (label, float(score) > 0.9)
    assert "1" == index


def test_questions_are_answered_and_texts_are_embedded(client: triton.InferenceServerClient) -> None:
    context = "The bridge was built in Porto in 1886."
    inputs = [text_input("question", "Where was the bridge built?"), text_input("context", context)]
    found = client.infer("qa", inputs, parameters={"top_k": 2})
    vectors = client.infer("embed", [text_input("inputs", *TEXTS)], parameters={"normalize": True}).as_numpy("embedding")

    assert b"Porto" == found.as_numpy("answer")[0]
    assert "Porto" == context[found.as_numpy("start")[0] : found.as_numpy("end")[0]]
    assert 2 == len(json.loads(found.as_numpy("json")[0]))
    np.testing.assert_allclose([1, 1], np.linalg.norm(vectors, axis=1), atol=1e-5)


def test_token_ids_give_logits(client: triton.InferenceServerClient) -> None:
    ids, mask = [[101, 2204, 2143, 102, 0, 0], [101, 2200, 2919, 102, 0, 0]], [[1, 1, 1, 1, 0, 0]] * 2
    inputs = [id_input("input_ids", ids), id_input("attention_mask", mask)]
    padded = client.infer("sentiment", inputs).as_numpy("logits")
    bare = client.infer("sentiment", [id_input("input_ids", [row[:4] for row in ids], binary=False)]).as_numpy("logits")

    assert (2, 2) == padded.shape
    np.testing.assert_allclose(padded, bare, atol=1e-4)


def test_errors_have_a_message_and_a_status(client: triton.InferenceServerClient) -> None:
    for call, said, status in (
        (lambda: client.infer("sentiment", [text_input("input", "a")]), "did you mean `inputs`?", "422"),
        (lambda: client.infer("sentimental", [text_input("inputs", "a")]), "did you mean `sentiment`?", "404"),
        (lambda: client.infer("sentiment", [text_input("inputs", "a")], model_version="1"), "has no version `1`", "404"),
        (lambda: client.infer("sentiment", [text_input("inputs", "a")], priority=1), "`parameters.priority` is 1", "422"),
        (
            lambda: client.infer("sentiment", [text_input("inputs", "a")], request_compression_algorithm="gzip"),
            "send it uncompressed",
            "415",
        ),
        (lambda: client.load_model("sentiment"), "model management is disabled", "403"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            call()
        assert said in raised.value.message()
        assert status == raised.value.status()


def test_timeouts_are_deadlines(client: triton.InferenceServerClient) -> None:
    assert client.infer("sentiment", [text_input("inputs", "a")], timeout=5_000_000).as_numpy("label").shape == (1,)
    with pytest.raises(InferenceServerException):
        client.infer("sentiment", [text_input("inputs", "a")], timeout=1)


def test_a_client_that_accepts_gzip_reads_the_response(client: triton.InferenceServerClient) -> None:
    found = client.infer("sentiment", [text_input("inputs", *TEXTS)], response_compression_algorithm="gzip")

    assert [b"positive", b"negative"] == found.as_numpy("label").tolist()


def test_the_other_routes_of_the_protocol_answer(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("sentiment")
    assert not client.is_model_ready("sentiment", "1")
    assert "bertserve" == client.get_server_metadata()["name"]
    described = client.get_model_metadata("sentiment")
    assert ["inputs", "text_pair"] == [field["name"] for field in described["inputs"]]
    assert client.is_model_ready("sentiment", described["versions"][0])
    assert "sentiment" == client.get_model_config("sentiment")["name"]
    assert {"sentiment", "embed"} <= {model["name"] for model in client.get_model_repository_index() if model["state"] == "READY"}
    client.infer("sentiment", [text_input("inputs", "a")])
    (statistics,) = client.get_inference_statistics("sentiment")["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] >= 1
    assert len(client.get_inference_statistics()["model_stats"]) > 1


def test_concurrent_calls_are_answered(client: triton.InferenceServerClient, url: str) -> None:
    handle = client.async_infer("sentiment", [text_input("inputs", *TEXTS)])

    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(url.removeprefix("http://")) as other:
            assert await other.is_server_live()
            assert "sentiment" == (await other.get_model_metadata("sentiment"))["name"]
            found = await asyncio.gather(*(other.infer("sentiment", [text_input("inputs", text)]) for text in TEXTS * 4))
            with pytest.raises(InferenceServerException, match="did you mean"):
                await other.infer("sentiment", [text_input("input", "a")])
            return [each.as_numpy("label")[0] for each in found]

    assert [b"positive", b"negative"] * 4 == asyncio.run(ask())
    assert [b"positive", b"negative"] == handle.get_result().as_numpy("label").tolist()


def ask_raw(url: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[bytes, Any]:
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers or {})) as response:
        return response.read(), response.headers


def test_the_requests_of_perf_analyzer_are_answered(url: str) -> None:
    """The perf_analyzer wheel contains no program, so these requests follow its source code (263c5f6e).

    It reads the metadata, the configuration and the statistics. It fills each required input in the shape of the metadata, but with
    its own batch axis. It requests every output as binary data.
    """
    assert "statistics" in json.loads(ask_raw(url, "/v2")[0])["extensions"]
    metadata, config = (json.loads(ask_raw(url, f"/v2/models/sentiment{suffix}")[0]) for suffix in ("", "/config"))
    assert config["max_batch_size"] > 0
    optional = {tensor["name"] for tensor in config["input"] if tensor["optional"]}
    wanted = [field for field in metadata["inputs"] if field["name"] not in optional]
    assert not any(-1 in field["shape"][1:] for field in wanted), "it would ask for --shape"
    data = struct.pack("<I", 4) + b"Dull"
    inputs = [
        {
            "name": field["name"],
            "shape": [1, *field["shape"][1:]],
            "datatype": field["datatype"],
            "parameters": {"binary_data_size": len(data)},
        }
        for field in wanted
    ]
    outputs = [{"name": field["name"], "parameters": {"binary_data": True}} for field in metadata["outputs"]]
    head = json.dumps({"id": "0", "inputs": inputs, "outputs": outputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    before = json.loads(ask_raw(url, "/v2/models/sentiment/stats")[0])["model_stats"][0]
    body, answered = ask_raw(url, "/v2/models/sentiment/infer", head + data * len(inputs), headers)
    after = json.loads(ask_raw(url, "/v2/models/sentiment/stats")[0])["model_stats"][0]

    found = json.loads(body[: int(answered["Inference-Header-Content-Length"])])
    assert [field["name"] for field in metadata["outputs"]] == [output["name"] for output in found["outputs"]]
    assert 1 == after["inference_count"] - before["inference_count"]
    parts = ("compute_input", "compute_infer", "compute_output", "queue", "success")
    assert 1 == len({after["inference_stats"][part]["count"] for part in parts})
    assert {"cache_hit", "cache_miss"} <= set(after["inference_stats"])
