"""@huggingface/inference for JavaScript: all its methods for the tasks of the service, run by node (`calls.mjs`)."""

import json
import subprocess
from typing import Any

import httpx
import pytest

from conftest import HERE, NODE

pytestmark = pytest.mark.skipif(
    NODE is None or not (HERE / "node_modules/@huggingface/inference").is_dir(), reason="needs node and npm's @huggingface/inference"
)


@pytest.fixture(name="output", scope="module")
def output_of_node(url: str) -> dict[str, Any]:
    process = subprocess.run([str(NODE), HERE / "calls.mjs", url], cwd=HERE, capture_output=True, text=True, timeout=120, check=True)
    document: dict[str, Any] = json.loads(process.stdout)
    return document


def result(output: dict[str, Any], name: str) -> Any:
    assert "error" not in output["results"][name], output["results"][name]
    return output["results"][name]["result"]


def test_each_call_is_one_post_with_the_clients_user_agent(output: dict[str, Any]) -> None:
    """The service recognizes the client by this user agent."""
    assert {request["method"] for request in output["sent"]} == {"POST"}
    assert len(output["sent"]) == len(output["results"])
    assert all(request["agent"].startswith("@huggingface/inference/") for request in output["sent"])


def test_texts_are_classified(output: dict[str, Any]) -> None:
    assert [item["label"] for item in result(output, "classify")] == ["positive"]
    assert [item["label"] for item in result(output, "classifyByUrl")] == ["positive", "negative"]
    assert result(output, "classifyList") == result(output, "classifyByUrl")


def test_entities_are_found(output: dict[str, Any]) -> None:
    assert [(item["entity_group"], item["word"]) for item in result(output, "entities")] == [("PER", "Ada Lovelace"), ("LOC", "London")]
    assert result(output, "entitiesList") == result(output, "entities")
    assert [(item["entity_group"], item["entity"]) for item in result(output, "tokens")] == [("B-PER", "B-PER"), ("B-LOC", "B-LOC")]


def test_questions_are_answered(output: dict[str, Any]) -> None:
    assert result(output, "answer")["answer"] == result(output, "answerList")["answer"] == "Ada"


def test_one_mask_and_two_are_filled(output: dict[str, Any], url: str) -> None:
    """Two masks give one flat list, because the client reads no other: candidates of the first mask, then of the second."""
    body = {"inputs": "The [MASK] of [MASK] died in 1066.", "parameters": {"top_k": 2}}
    apart = httpx.post(f"{url}/fill-mask", json=body, trust_env=False, timeout=30).json()

    assert result(output, "fill")[0]["token_str"] == "england"
    assert [item["token_str"] for item in result(output, "fillTwo")] == [item["token_str"] for each in apart for item in each]
    assert result(output, "fillTwoInList") == result(output, "fillTwo")


def test_vectors_are_read(output: dict[str, Any]) -> None:
    [vector] = result(output, "embed")
    assert len(vector) == 4
    assert len(result(output, "embedLists")) == 2


def test_sentences_are_compared(output: dict[str, Any]) -> None:
    assert result(output, "similarity")[1] == pytest.approx(1.0, abs=1e-5)


def test_candidate_labels_are_scored(output: dict[str, Any]) -> None:
    """A list of one text, as in the client's README, gives the same scores."""
    assert {item["label"] for item in result(output, "zeroShot")} == {"film", "bridge"}
    assert result(output, "zeroShot") == result(output, "zeroShotList") == result(output, "zeroShotByModel")


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("classifyLists", 422, "one at a time"),
        ("entitiesLists", 422, "one at a time"),
        ("zeroShotLists", 422, "one at a time"),
        ("fillNone", 422, "`[MASK]`"),
        ("wrongParameter", 422, "`top_k`"),
        ("wrongKey", 422, "`parameters`"),
        ("wrongPath", 404, "/classify"),
    ],
)
def test_errors_reach_the_caller(output: dict[str, Any], name: str, status: int, message: str) -> None:
    error = output["results"][name]["error"]
    assert (error["kind"], error["status"]) == ("ProviderApiError", status)
    assert message in error["message"]
