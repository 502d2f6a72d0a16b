"""A new base task needs a file and a line in the catalog; endpoints, tensors, columns, playground and OpenAPI follow from its spec."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.cli import main
from bertserve.service.tasks.catalog import TASKS
from support import tiny, toy_task
from support.app_client import Send, error_of, open_api

PAIR, OTHER = {"left": "a good film", "right": "a book"}, {"left": "good", "right": "bad"}
RESULT, OTHER_RESULT = {"tokens": 5, "outputs": 3}, {"tokens": 2, "outputs": 3}


@pytest.fixture(name="registered", scope="module", autouse=True)
def one_more_task() -> Iterator[None]:
    """Adds the toy task to the catalog."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, toy_task.TASK, toy_task.SPEC)  # a dict, which only tests change
        yield


@pytest.fixture(name="folder", scope="module")
def models_with_a_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a bundle of the toy task, which has the graph of a classifier."""
    return tiny.edit(tiny.bundle(tmp_path_factory.mktemp("models"), "toy"), lambda fields: fields.update(task=toy_task.TASK)).parent


@pytest.fixture(name="api", scope="module")
def service(folder: Path) -> Send:
    return open_api(folder)


@pytest.mark.parametrize("path", ["/count", "/models/toy", "/", "/invocations"])
def test_the_toy_task_is_answered_at_every_path(api: Send, path: str) -> None:
    assert api("POST", path, json={"inputs": PAIR}).json() == RESULT
    assert api("POST", path, json={"inputs": [PAIR, OTHER]}).json() == [RESULT, OTHER_RESULT]
    assert api("POST", path, json={"inputs": PAIR, "parameters": {"factor": 2}}).json()["tokens"] == 10
    lines = "\n".join(json.dumps({"inputs": pair}) for pair in (PAIR, OTHER))
    answers = api("POST", path, content=lines, headers={"content-type": "application/x-ndjson"}).text.splitlines()
    assert [json.loads(line) for line in answers] == [RESULT, OTHER_RESULT]


def test_wrong_bodies_are_refused_like_those_of_other_tasks(api: Send) -> None:
    assert "`inputs" in error_of(api("POST", "/count", json={"inputs": {"left": "a"}}), 422, "invalid_value")
    message = error_of(api("POST", "/count", json={"inputs": PAIR, "parameters": {"factr": 2}}), 422, "invalid_value")
    assert "did you mean `factor`" in message


def test_the_toy_task_is_described(api: Send) -> None:
    assert tuple(api("GET", "/count/info").json()[key] for key in ("name", "endpoints", "default_of")) == ("toy", ["/count"], ["/count"])
    assert api("GET", "/count/health").status_code == 200
    paths = api("GET", "/openapi.json").json()["paths"]
    assert "#/components/schemas/ToyBody" in json.dumps(paths["/count"]["post"]["requestBody"])
    content = paths["/models/{name}"]["post"]["requestBody"]["content"]
    assert content["application/json"]["examples"]["count"]["value"] == {"inputs": {"left": "a film", "right": "a book"}}


def test_the_toy_task_answers_instances(api: Send) -> None:
    assert api("POST", "/v1/models/toy:predict", json={"instances": [PAIR]}).json() == {"predictions": [RESULT]}


@pytest.mark.parametrize("flags", [[], ["--columns", '{"left": "first", "right": "second"}']])
def test_the_toy_task_scores_files(folder: Path, tmp_path: Path, flags: list[str]) -> None:
    left, right = ("first", "second") if flags else ("left", "right")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({left: "a good film", right: "a book"}) + "\n", "utf-8")
    command = ["score", "--models", str(folder), "--model", "toy", "--parameters", '{"factor": 2}', *flags, str(source), str(output)]
    assert main(command) == 0
    rows: Any = json.loads(output.read_text("utf-8"))
    assert rows["prediction"] == {"tokens": 10, "outputs": 3}
