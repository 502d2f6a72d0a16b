"""The official client, unmodified, against the running service: answers, errors and warnings as its user sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

import tiny
from application import LONG, results


@pytest.fixture(scope="module", name="url")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with a tiny model and an API key."""
    from conftest import running

    folder = tmp_path_factory.mktemp("client")
    tiny.bundle(folder / "models")
    (folder / "key").write_text("swordfish")
    with running(folder / "models", folder / "log", "--api-key-file", str(folder / "key")) as served:
        yield served.url


def scores(elements: Any) -> dict[str, float]:
    """Returns what the client parsed as a mapping."""
    return {element.label: element.score for element in elements}


@pytest.mark.parametrize("path", ["classify", "models/tiny"])
@pytest.mark.parametrize("parameters", [{}, {"top_k": 2}, {"top_k": 1, "function_to_apply": "none"}, {"function_to_apply": "sigmoid"}])
def test_the_client_gets_the_answer(url: str, path: str, parameters: dict[str, Any], models: Path) -> None:
    """`text_classification` gives labels and scores at a task's path and at a model's, with every parameter that it has."""
    client = InferenceClient(model=f"{url}/{path}", token="swordfish")
    expected = {item["label"]: item["score"] for item in results(models, "a good film", **parameters)[0]}
    answer = client.text_classification("a good film", **parameters)
    assert list(scores(answer)) == list(expected)
    assert scores(answer) == pytest.approx(expected, abs=1e-6)


def test_the_address_can_be_given_with_the_call(url: str) -> None:
    """A URL as the call's `model` goes to the same place."""
    answer = InferenceClient(token="swordfish").text_classification("good", model=f"{url}/classify")
    assert scores(answer) == scores(InferenceClient(base_url=f"{url}/classify", api_key="swordfish").text_classification("good"))


def test_the_asynchronous_client_gets_the_answer(url: str) -> None:
    """AsyncInferenceClient gets what the other one gets."""

    async def ask() -> Any:
        async with AsyncInferenceClient(model=f"{url}/classify", token="swordfish") as client:
            return await client.text_classification("a good film", top_k=2)

    expected = InferenceClient(model=f"{url}/classify", token="swordfish").text_classification("a good film", top_k=2)
    assert scores(asyncio.run(ask())) == scores(expected)


@pytest.mark.parametrize(
    ("path", "parameters", "token", "status", "message"),
    [
        ("classify", {"top_k": 0}, "swordfish", 422, "`parameters.top_k` is wrong: must be at least 1; it is 0."),
        ("models/tinny", {}, "swordfish", 404, "no model `tinny` is loaded; did you mean `tiny`?"),
        ("classify", {}, "wrong", 401, "unknown API key"),
    ],
)
def test_the_client_shows_our_error(url: str, path: str, parameters: dict[str, Any], token: str, status: int, message: str) -> None:
    """An error reaches the client's user with our sentence and the request's id."""
    client = InferenceClient(model=f"{url}/{path}", token=token, headers={"x-request-id": "my-request"})
    with pytest.raises(HfHubHTTPError) as failed:
        client.text_classification("good", **parameters)
    assert failed.value.response.status_code == status
    assert message in str(failed.value)
    assert "my-request" in str(failed.value)


def test_a_malformed_body_is_the_clients_bad_request(url: str) -> None:
    """The client's own error for 400 has our sentence, for who sends bytes through it."""
    from huggingface_hub.errors import BadRequestError
    from huggingface_hub.utils import get_session, hf_raise_for_status

    response = get_session().post(f"{url}/classify", content=b"{", headers={"authorization": "Bearer swordfish"})
    with pytest.raises(BadRequestError, match="the body is not valid JSON"):
        hf_raise_for_status(response)


def test_the_client_warns_of_a_cut_text(url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut text makes the client log our warning; it does so once per topic and process."""
    from huggingface_hub.utils import _http

    for name, value in vars(_http).items():  # forget the topics that were warned of before
        if "WARN" in name.upper() and isinstance(value, set):
            monkeypatch.setattr(_http, name, set())
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="huggingface_hub"):
        InferenceClient(model=f"{url}/classify", token="swordfish").text_classification(LONG)
    assert "cut to the model's 32 tokens: inputs" in caplog.text


@pytest.mark.parametrize("path", ["classify", "models/tiny"])
def test_the_client_asks_for_info_and_health(url: str, path: str) -> None:
    """`get_endpoint_info` and `health_check` work at every base."""
    client = InferenceClient(model=f"{url}/{path}", provider="hf-inference", token="swordfish")
    assert client.get_endpoint_info()["name"] == "tiny"
    assert client.health_check() is True


@pytest.mark.parametrize("text", ["", "日本 é 😀", '"quoted" \\ back\nslash', "a [SEP] b"])
def test_the_client_sends_any_text(url: str, text: str, models: Path) -> None:
    """Whatever the text, the client gets what the text scores."""
    client = InferenceClient(model=f"{url}/classify", token="swordfish")
    expected = {item["label"]: item["score"] for item in results(models, text)[0]}
    assert scores(client.text_classification(text)) == pytest.approx(expected, abs=1e-6)
