"""The Open Inference Protocol and KServe's V1 protocol over HTTP: texts in binary and JSON tensors, wrong requests, metadata, probes."""

import json
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from support import tiny
from support.app_client import Send, assert_same, error_of, result

TEXTS = ["good film", "a very bad book"]
QUESTION, CONTEXT = "good ?", "a good film , not a bad book"
HEADER = "inference-header-content-length"


def texts(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def infer(api: Send, model: str, *inputs: dict[str, Any], headers: Any = None, **body: Any) -> httpx.Response:
    return api("POST", f"/v2/models/{model}/infer", json={"inputs": list(inputs), **body}, headers=headers)


def outputs(response: httpx.Response) -> dict[str, Any]:
    """Returns the outputs of a response by name, as arrays of their shape."""
    assert response.status_code == 200, response.text
    return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in response.json()["outputs"]}


def error_of_response(response: httpx.Response) -> str:
    return error_of(response, 422, "invalid_value")


def decode_json(values: Any) -> list[Any]:
    return [json.loads(value) for value in values]


def in_order(result: list[dict[str, Any]], labels: Sequence[str]) -> list[float]:
    """Returns the scores of a result in the order of the labels."""
    return [{item["label"]: item["score"] for item in result}[label] for label in labels]


def test_texts_are_classified(api: Send) -> None:
    response = infer(api, "classifier", texts("inputs", *TEXTS), id="7")
    actual, expected = outputs(response), result(api, "/models/classifier", inputs=TEXTS)

    assert list(actual) == ["label", "score", "scores", "json"]
    assert actual["label"].tolist() == [result[0]["label"] for result in expected]
    assert decode_json(actual["json"]) == expected
    assert_same(actual["scores"].tolist(), [in_order(result, tiny.LABELS) for result in expected])
    assert_same(actual["score"].tolist(), [result[0]["score"] for result in expected])
    body = response.json()
    assert (body["model_name"], body["id"]) == ("classifier", "7")
    assert [output["datatype"] for output in body["outputs"]] == ["BYTES", "FP32", "FP32", "BYTES"]
    assert response.headers["x-model"] == "classifier"


def test_equivalent_shapes_of_texts_give_the_same_scores(api: Send) -> None:
    column = {"name": "inputs", "shape": [2, 1], "datatype": "BYTES"}
    expected = outputs(infer(api, "classifier", texts("inputs", *TEXTS)))["scores"].tolist()

    assert outputs(infer(api, "classifier", {**column, "data": TEXTS}))["scores"].tolist() == expected
    assert outputs(infer(api, "classifier", {**column, "data": [[text] for text in TEXTS]}))["scores"].tolist() == expected


def test_an_empty_tensor_gives_empty_outputs(api: Send) -> None:
    actual = outputs(infer(api, "classifier", texts("inputs")))

    assert {name: value.shape for name, value in actual.items()} == {"label": (0,), "score": (0,), "scores": (0, 3), "json": (0,)}


def test_null_is_the_same_as_no_value(api: Send) -> None:
    """Clients that write all fields of the protocol, such as MLServer's, send null for unset ones."""
    nulls = {"id": None, "parameters": None, "outputs": [{"name": "label", "parameters": None}]}
    tensor = texts("inputs", *TEXTS) | {"parameters": None}
    expected = outputs(infer(api, "classifier", texts("inputs", *TEXTS)))["label"]
    assert outputs(infer(api, "classifier", tensor, **nulls))["label"].tolist() == expected.tolist()
    assert "label" in outputs(infer(api, "classifier", tensor, outputs=None))


def test_pairs_are_classified(api: Send) -> None:
    pairs = [{"text": "good", "text_pair": "film"}, {"text": "bad", "text_pair": "book"}]
    actual = outputs(infer(api, "classifier", texts("inputs", "good", "bad"), texts("text_pair", "film", "book")))

    assert decode_json(actual["json"]) == result(api, "/models/classifier", inputs=pairs)


def test_parameters_of_the_task_are_supported(api: Send) -> None:
    """Parameters work as on other paths. With `top_k` there are no `scores` of all labels."""
    parameters = {"top_k": 1, "function_to_apply": "none"}
    actual = outputs(infer(api, "classifier", texts("inputs", *TEXTS), parameters=parameters))

    assert list(actual) == ["label", "score", "json"]
    assert decode_json(actual["json"]) == result(api, "/models/classifier", inputs=TEXTS, parameters=parameters)
    assert_same(actual["score"].tolist(), [result[0]["score"] for result in decode_json(actual["json"])])


def test_texts_are_embedded(api: Send) -> None:
    actual = outputs(infer(api, "vectors", texts("inputs", *TEXTS), parameters={"normalize": True}))
    ragged = outputs(infer(api, "vectors", texts("inputs", *TEXTS), parameters={"pooling": "none"}))

    assert result(api, "/embed", inputs=TEXTS, normalize=True) == actual["embedding"].tolist() == decode_json(actual["json"])
    assert list(ragged) == ["json"]
    assert decode_json(ragged["json"]) == result(api, "/embed", inputs=TEXTS, pooling="none")


def test_derived_tasks_give_the_results_of_the_json_api(api: Send) -> None:
    query, sentences = "good ?", ["a bad book", "a good film"]
    ranking = outputs(infer(api, "ranker", texts("query", query), texts("texts", *sentences), parameters={"raw_scores": True}))
    similarities = outputs(infer(api, "vectors", texts("source_sentence", query), texts("sentences", *sentences)))
    labels = {"candidate_labels": "dull,great", "multi_label": True}
    label_scores = outputs(infer(api, "nli", texts("inputs", *TEXTS), parameters=labels))

    expected = result(api, "/models/ranker", query=query, texts=sentences, raw_scores=True)
    assert decode_json(ranking["json"]) == [expected]
    assert_same(ranking["score"].tolist(), [{i["index"]: i["score"] for i in expected}[place] for place in range(2)])
    similar = result(api, "/models/vectors", inputs={"source_sentence": query, "sentences": sentences})
    assert decode_json(similarities["json"]) == [similar]
    assert_same(similarities["score"].tolist(), similar)
    zero_shot = result(api, "/models/nli", inputs=TEXTS, parameters=labels)
    assert_same(decode_json(label_scores["json"]), zero_shot)
    assert_same(label_scores["scores"].tolist(), [in_order(result, ["dull", "great"]) for result in zero_shot])


def test_a_request_can_select_and_order_outputs(api: Send) -> None:
    actual = outputs(infer(api, "classifier", texts("inputs", *TEXTS), outputs=[{"name": "score"}, {"name": "label"}]))

    assert list(actual) == ["score", "label"]


def pack(*values: str | bytes) -> bytes:
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def binary(
    api: Send, model: str, parts: dict[str, tuple[str, list[int], bytes]], *, header: str | None = None, **body: Any
) -> httpx.Response:
    """Returns the response to a request of binary tensors: name -> datatype, shape, bytes."""
    inputs = [
        {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, (kind, shape, data) in parts.items()
    ]
    head = json.dumps({"inputs": inputs, **body}).encode()
    content = head + b"".join(data for _, _, data in parts.values())
    return api("POST", f"/v2/models/{model}/infer", content=content, headers={HEADER: header or str(len(head))})


def unpack(response: httpx.Response) -> dict[str, bytes]:
    """Returns the binary outputs of a response by name."""
    assert response.status_code == 200, response.text
    at = int(response.headers[HEADER])
    values = {}
    for output in json.loads(response.content[:at])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            values[output["name"]], at = response.content[at : at + size], at + size
    assert len(response.content) == at
    return values


def test_texts_and_outputs_can_be_binary(api: Send) -> None:
    parts = {"inputs": ("BYTES", [2, 1], pack(*TEXTS))}
    expected = outputs(infer(api, "classifier", texts("inputs", *TEXTS)))
    response = binary(api, "classifier", parts, parameters={"binary_data_output": True})
    actual = unpack(response)
    mixed = binary(api, "classifier", parts, outputs=[{"name": "label"}, {"name": "score", "parameters": {"binary_data": True}}])

    assert response.headers["content-type"] == "application/octet-stream"
    assert actual["label"] == pack(*expected["label"])
    assert actual["json"] == pack(*expected["json"])
    assert actual["scores"] == expected["scores"].astype("<f4").tobytes()
    assert unpack(mixed) == {"score": actual["score"]}


@pytest.mark.parametrize(
    ("data", "shape", "status"),
    [(pack("good") + b"\0", [1], 400), (pack("good")[:-1], [1], 400), (pack("good"), [2], 422), (pack(b"\xff"), [1], 422)],
)
def test_broken_binary_texts_are_refused(api: Send, data: bytes, shape: list[int], status: int) -> None:
    response = binary(api, "classifier", {"inputs": ("BYTES", shape, data)})
    assert response.status_code == status
    assert "`inputs`" in response.json()["error"]


@pytest.mark.parametrize("header", ["0", "-1", "x", "1000000", "٣", "1" * 5000])
def test_an_invalid_length_of_the_json_part_is_refused(api: Send, header: str) -> None:
    response = api("POST", "/v2/models/classifier/infer", content=b"{}", headers=[(HEADER.encode(), header.encode())])

    assert "`Inference-Header-Content-Length` is" in error_of(response, 400, "malformed")


def test_a_tensor_has_its_texts_in_one_place(api: Send) -> None:
    both = texts("inputs", "good") | {"parameters": {"binary_data_size": 0}}
    neither = {"name": "inputs", "datatype": "BYTES", "shape": [1]}
    for tensor in (both, neither):
        assert "`data` and `parameters.binary_data_size`" in error_of_response(infer(api, "classifier", tensor))
    head = json.dumps({"inputs": [GOOD]}).encode()
    longer = api("POST", "/v2/models/classifier/infer", content=head + b"0", headers={HEADER: str(len(head))})
    assert "1 bytes after" in error_of(longer, 400, "malformed")


GOOD = texts("inputs", "good")


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ([], "the body"),
        ({}, "`inputs`"),
        ({"inputs": [GOOD], "output": []}, "`outputs`"),
        ({"inputs": [GOOD | {"parameters": {"shared_memory_region": "a"}}]}, "shared_memory_region"),
        ({"inputs": [GOOD | {"shape": [-1]}]}, "`inputs[0].shape[0]`"),
        ({"inputs": [GOOD | {"shape": [1] * 9}]}, "`inputs[0].shape`"),
        ({"inputs": [GOOD | {"shape": [1, 2]}]}, "[1, 2]"),
        ({"inputs": [GOOD | {"shape": [2]}]}, "[2]"),
        ({"inputs": [GOOD | {"data": [None]}]}, "null"),
        ({"inputs": [GOOD | {"datatype": "INT64", "data": [1]}]}, "`inputs[0].datatype`"),
        ({"inputs": [GOOD, GOOD]}, "`inputs` twice"),
        ({"inputs": [texts("text_pair", "good")]}, "`inputs`"),
        ({"inputs": [GOOD, texts("text_pair", "a", "b")]}, "`text_pair`"),
        ({"inputs": [GOOD], "outputs": [{"name": "logit"}]}, "`logit`"),
        ({"inputs": [GOOD], "outputs": [{"name": "json"}, {"name": "json"}]}, "`outputs`"),
        ({"inputs": [GOOD], "outputs": [{"name": "scores", "parameters": {"classification": 1}}]}, "classification"),
        ({"inputs": [GOOD], "parameters": {"topk": 1}}, "`top_k`"),
        ({"inputs": [GOOD], "parameters": {"binary_data_output": 1}}, "`parameters.binary_data_output`"),
        ({"inputs": [GOOD], "parameters": {"timeout": 10**12}}, "`parameters.timeout`"),
        ({"inputs": [GOOD], "parameters": {"priority": 1}}, "`parameters.priority`"),
        ({"inputs": [GOOD], "parameters": {"sequence_end": True}}, "false"),
        ({"inputs": [GOOD], "id": 5}, "`id`"),
    ],
)
def test_the_error_names_the_invalid_field(api: Send, body: Any, value: str) -> None:
    assert value in error_of_response(api("POST", "/v2/models/classifier/infer", json=body))


def test_a_request_can_have_its_deadline_in_microseconds(api: Send) -> None:
    """Other parameters of the protocol are accepted with the values that have no effect."""
    unused = {"priority": 0, "sequence_id": 0, "sequence_start": False, "sequence_end": False}
    assert "label" in outputs(infer(api, "classifier", GOOD, parameters=unused | {"timeout": 5_000_000}))
    assert "label" in outputs(infer(api, "classifier", GOOD, parameters={"timeout": 0, "sequence_id": ""}))
    assert infer(api, "classifier", GOOD, parameters={"timeout": 1}).status_code in {429, 504}


@pytest.mark.parametrize("shape", [[10**12, 1], [2**62] * 8, [10**4299]])
def test_a_huge_shape_is_refused(api: Send, shape: list[int]) -> None:
    response = api("POST", "/v2/models/classifier/infer", content=json.dumps({"inputs": [GOOD | {"shape": shape}]}).encode())
    assert response.status_code == 413 or "shape" in error_of_response(response)


def test_too_many_tensors_or_texts_are_refused(api: Send) -> None:
    assert "`inputs`" in error_of_response(infer(api, "classifier", *(texts(f"a{i}", "good") for i in range(17))))
    assert "5000" in error_of(infer(api, "classifier", texts("inputs", *["a"] * 5000)), 413, "too_large")


def test_server_metadata_and_health_are_served(api: Send) -> None:
    assert api("GET", "/v2").json()["name"] == api("GET", "/v2/").json()["name"] == "bertserve"
    assert api("GET", "/v2/health/live").json() == {"live": True}
    assert api("GET", "/v2/health/ready").json() == {"ready": True, "live": True}
    assert api("GET", "/v2/models/nli/ready").status_code == 200
    error_of(api("GET", "/v2/models/none/ready"), 404, "not_found")


@pytest.mark.parametrize("model", ["classifier", "names", "passages", "masks", "choices", "vectors", "ranker", "nli"])
def test_model_metadata_match_the_requests_and_responses(api: Send, model: str) -> None:
    """A request with all inputs of the metadata returns all its outputs with the same ranks."""
    metadata = api("GET", f"/v2/models/{model}").json()
    text = "a [MASK] film" if model == "masks" else "good film"
    actual = infer(
        api, model, *(texts(field["name"], *[text] * (1 + (field["name"] == "choices"))) for field in metadata["inputs"])
    ).json()["outputs"]

    def summary(fields: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
        return [(field["name"], field["datatype"], len(field["shape"])) for field in fields]

    assert (metadata["name"], metadata["platform"]) == (model, "onnx_onnxv1")
    assert summary(actual) == summary(metadata["outputs"])


def test_instances_give_predictions(api: Send) -> None:
    """Each prediction equals the result of `/models/NAME` with the same parameters; `candidate_labels` selects zero-shot classification."""
    question = {"question": QUESTION, "context": CONTEXT}
    labels = {"candidate_labels": ["dull", "great"]}

    def predictions(model: str, instances: Any, **parameters: Any) -> Any:
        return result(api, f"/v1/models/{model}:predict", instances=instances, parameters=parameters)["predictions"]

    assert predictions("classifier", TEXTS, top_k=1) == result(api, "/models/classifier", inputs=TEXTS, parameters={"top_k": 1})
    assert predictions("passages", [question]) == [result(api, "/models/passages", inputs=question)]
    assert predictions("nli", TEXTS, **labels) == result(api, "/models/nli", inputs=TEXTS, parameters=labels)
    assert predictions("classifier", []) == []


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ({"instances": "good"}, "`instances`"),
        ({"inputs": ["good"]}, "`instances`"),
        ({"instances": ["good"], "parameter": {}}, "did you mean `parameters`?"),
        ({"instances": [5]}, "must be"),
        ({"instances": ["good"], "parameters": False}, "`parameters`"),
    ],
)
def test_invalid_instances_are_refused(api: Send, body: Any, value: str) -> None:
    assert value in error_of_response(api("POST", "/v1/models/classifier:predict", json=body))
