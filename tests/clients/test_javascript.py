"""@huggingface/inference for JavaScript: all its methods for the tasks of the service, run by node (`calls.mjs`)."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(
    NODE is None or not (HERE / "node_modules/@huggingface/inference").is_dir(), reason="needs node and npm's @huggingface/inference"
)


@pytest.fixture(name="said", scope="module")
def output_of_node(url: str) -> dict[str, Any]:
    done = subprocess.run([str(NODE), HERE / "calls.mjs", url], cwd=HERE, capture_output=True, text=True, timeout=120, check=True)
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def result(said: dict[str, Any], name: str) -> Any:
    assert "error" not in said["results"][name], said["results"][name]
    return said["results"][name]["result"]


def test_each_call_is_one_post_with_the_clients_user_agent(said: dict[str, Any]) -> None:
    """The service recognizes the client by this user agent."""
    assert {"POST"} == {request["method"] for request in said["sent"]}
    assert len(said["results"]) == len(said["sent"])
    assert all(request["agent"].startswith("@huggingface/inference/") for request in said["sent"])


def test_texts_are_classified(said: dict[str, Any]) -> None:
    assert ["positive"] == [item["label"] for item in result(said, "classify")]
    assert ["positive", "negative"] == [item["label"] for item in result(said, "classifyByUrl")]
    assert result(said, "classifyByUrl") == result(said, "classifyList")


def test_entities_are_found(said: dict[str, Any]) -> None:
    assert [("PER", "Ada Lovelace"), ("LOC", "London")] == [(item["entity_group"], item["word"]) for item in result(said, "entities")]
    assert result(said, "entities") == result(said, "entitiesList")
    assert [("B-PER", "B-PER"), ("B-LOC", "B-LOC")] == [(item["entity_group"], item["entity"]) for item in result(said, "tokens")]


def test_questions_are_answered(said: dict[str, Any]) -> None:
    assert "Ada" == result(said, "answer")["answer"] == result(said, "answerList")["answer"]


def test_one_mask_and_two_are_filled(said: dict[str, Any], url: str) -> None:
    """Two masks give one flat list, because the client reads no other: candidates of the first mask, then of the second."""
    body = {"inputs": "The [MASK] of [MASK] died in 1066.", "parameters": {"top_k": 2}}
    apart = httpx.post(f"{url}/fill-mask", json=body, trust_env=False, timeout=30).json()

    assert "england" == result(said, "fill")[0]["token_str"]
    assert [item["token_str"] for each in apart for item in each] == [item["token_str"] for item in result(said, "fillTwo")]
    assert result(said, "fillTwo") == result(said, "fillTwoInList")


def test_vectors_are_read(said: dict[str, Any]) -> None:
    [vector] = result(said, "embed")
    assert 4 == len(vector)
    assert 2 == len(result(said, "embedLists"))


def test_sentences_are_compared(said: dict[str, Any]) -> None:
    assert pytest.approx(1.0, abs=1e-5) == result(said, "similarity")[1]


def test_candidate_labels_are_scored(said: dict[str, Any]) -> None:
    """A list of one text, as in the client's README, gives the same scores."""
    assert {"film", "bridge"} == {item["label"] for item in result(said, "zeroShot")}
    assert result(said, "zeroShot") == result(said, "zeroShotList") == result(said, "zeroShotByModel")


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("classifyLists", 422, "send one at a time"),
        ("entitiesLists", 422, "send one at a time"),
        ("zeroShotLists", 422, "send one at a time"),
        ("fillNone", 422, "`[MASK]`"),
        ("wrongParameter", 422, "did you mean `top_k`?"),
        ("wrongKey", 422, "put it into `parameters`"),
        ("wrongPath", 404, "/classify"),
    ],
)
def test_errors_reach_the_caller(said: dict[str, Any], name: str, status: int, message: str) -> None:
    error = said["results"][name]["error"]
    assert ("ProviderApiError", status) == (error["kind"], error["status"])
    assert message in error["message"]
