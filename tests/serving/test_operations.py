"""The answers for operators and clients other than predictions: models, health, limits, docs, OpenAPI and request ids."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bertserve.service import __version__
from bertserve.service.api.application import FORMATS
from bertserve.service.api.formats.open_inference import BINARY_TYPE
from bertserve.service.api.routing import InferenceRoute
from support import tiny
from support.app_client import call, post, serving, state_of

PROBES = ("/health", "/health/live", "/health/ready", "/classify/health", "/models/tiny/health", "/ping")


def test_a_model_is_described(models: Path) -> None:
    page = call(models, "GET", "/models/tiny").json()
    assert call(models, "GET", "/models/tiny/info").json() == page
    assert (page["name"], page["task"], page["labels"]) == ("tiny", "text-classification", list(tiny.LABELS))
    assert (page["provider"], page["precision"]) == ("cpu", "fp32")
    assert page["limits"]["max_tokens"] == 32
    assert page["validation"]["worst_abs_error"] == 0.0


def test_all_models_are_listed(tmp_path: Path) -> None:
    """The page of a fill-mask model also has its mask token, which clients need to build texts."""
    tiny.bundle(tmp_path, "b", task="fill-mask")
    tiny.bundle(tmp_path, "a")
    response = call(tmp_path, "GET", "/models")
    assert len(response.text.splitlines()) == 2
    assert all(len(line) < 400 for line in response.text.splitlines())
    pages = [call(tmp_path, "GET", f"/models/{name}").json() for name in ("a", "b")]
    assert [{name: page[name] for name in response.json()[0]} for page in pages] == response.json()
    short = {"name", "task", "endpoints", "default_of", "version", "provider", "precision", "max_tokens"}
    assert [set(model) for model in response.json()] == [short, short]
    assert {"validation", "metrics", "source", "labels"} < set(pages[0])
    assert [page.get("mask_token") for page in pages] == [None, "[MASK]"]


def test_info_has_the_limits(models: Path) -> None:
    limits = {
        "max_inputs": 7,
        "max_chars": 1000,
        "max_body_bytes": 4096,
        "max_stream_requests": 4,
        "max_concurrent": 1024,
        "max_concurrent_per_key": None,
        "max_header_bytes": 32768,
        "max_top_k": 100,
        "timeout_ms": 5,
        "max_timeout_ms": 6,
        "max_batch_tokens": 64,
        "max_queue_tokens": 128,
        "threads": 3,
    }
    page = call(models, "GET", "/info", settings=limits).json()
    assert limits == page["limits"]
    assert __version__ == page["version"]
    assert page["models"] == {"tiny": "text-classification"}


def test_a_valid_request_id_is_returned_once_and_another_one_replaced(models: Path) -> None:
    for request_id in ("a", "A-1._z", "x" * 128):
        assert post(models, {"inputs": "good"}, headers={"x-request-id": request_id}).headers.get_list("x-request-id") == [request_id]
    for request_id in ("", "x" * 129, "a b", "é", "a\tb", "<script>"):
        response = post(models, {"inputs": "good"}, headers={"x-request-id": request_id.encode()})
        assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])
    assert re.fullmatch(r"[0-9a-f]{32}", post(models, {"inputs": "good"}).headers["x-request-id"])


@pytest.mark.parametrize("path", ["/", "/docs", "/info", "/metrics", "/health", "/nowhere", "/docs/static/swagger-ui.css"])
def test_every_answer_has_a_request_id(models: Path, path: str) -> None:
    assert call(models, "GET", path, headers={"x-request-id": "r-1"}).headers.get_list("x-request-id") == ["r-1"]


@pytest.mark.parametrize("log_probes", [False, True])
async def test_the_access_log_has_probes_only_on_request(models: Path, caplog: pytest.LogCaptureFixture, log_probes: bool) -> None:
    probes = [*PROBES, "/metrics", "/v2/models/tiny/ready"]

    caplog.set_level("INFO", logger="bertserve.access")
    async with serving(state_of(models, access_log=True, log_probes=log_probes)) as client:
        assert {(await client.get(path)).status_code for path in (*probes, "/info")} == {200}
        assert (await client.get("/models/ready")).status_code == 404  # not a probe, but a model of that name
    assert len([record for record in caplog.records if record.name == "bertserve.access"]) == 2 + len(probes) * log_probes


def test_the_description_has_an_id_of_each_operation_and_its_errors_by_status(models: Path) -> None:
    document = call(models, "GET", "/openapi.json").json()
    names = {(method, path): entry["operationId"] for path, methods in document["paths"].items() for method, entry in methods.items()}

    assert len(set(names.values())) == len(names)
    assert (names["post", "/classify"], names["post", "/fill-mask"]) == ("classify", "fill_mask")
    assert (names["post", "/models/{name}"], names["get", "/models/{name}"]) == ("models_by_name", "get_models_by_name")
    assert [name for name in names.values() if not re.fullmatch("[a-z][a-z0-9_]*", name)] == []
    own, openai, load = (document["paths"][path]["post"]["responses"] for path in ("/classify", "/v1/embeddings", "/models/{name}/load"))
    assert own.keys() - openai.keys() == {"422"}
    assert {"401", "413", "429", "503", "504"} - openai.keys() == set()
    error, error_object = (
        document["components"]["schemas"][responses["429"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
        for responses in (own, openai)
    )
    assert error["properties"]["error"] == {"type": "string"}
    assert error_object["properties"]["error"]["required"] == ["message", "type", "param", "code"]
    assert load.keys() == {"200", "401", "403", "404", "409", "422", "default"}
    infer = document["paths"]["/v2/models/{name}/infer"]["post"]
    assert infer["requestBody"]["content"].keys() == infer["responses"]["200"]["content"].keys() == {"application/json", BINARY_TYPE}
    assert '"docExpansion": "none"' in call(models, "GET", "/docs").text  # its sections are folded


def shape(value: Any) -> Any:
    """Returns a JSON value without its numbers and texts; of a list only the first item."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    return [shape(item) for item in value[:1]] if isinstance(value, list) else None


def test_every_openapi_example_is_answered(tmp_path: Path) -> None:
    """An answer has the shape of its example."""
    folder = tiny.every_kind(tmp_path, max_length=64)
    settings = {"default": {"text-classification": "classifier"}}
    document = call(folder, "GET", "/openapi.json", settings=settings).json()
    models = {task: model["name"] for model in call(folder, "GET", "/models", settings=settings).json() for task in model["default_of"]}
    answers, shapes = {}, {}
    routes = chain.from_iterable(wire_format.routes() for wire_format in FORMATS)
    for route in (route for route in routes if isinstance(route, InferenceRoute)):
        content = document["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]
        own = document["components"]["schemas"].get(content["schema"].get("$ref", "").rpartition("/")[2], {})
        for name, example in content.get("examples", {"classify": {"value": own.get("examples", [None])[0]}}).items():
            path = route.path.replace("{name}", models[f"/{name}"]) if len(route.bodies) == 1 or "{name}" in route.path else f"/{name}"
            answer = call(folder, "POST", path, json=example["value"], settings=settings)
            answers[route.path, name] = answer.status_code
        response = document["paths"][route.path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        response = document["components"]["schemas"].get(response.get("$ref", "").rpartition("/")[2], response)
        if "examples" in response:
            shapes[route.path] = (shape(response["examples"][0]), shape(answer.json()))

    assert set(answers.values()) == {200}, answers
    assert len(shapes) == 5
    assert [(path, *pair) for path, pair in shapes.items() if pair[0] != pair[1]] == []
