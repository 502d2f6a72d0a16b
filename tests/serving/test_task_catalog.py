"""The list of tasks: each spec is whole, and a task that is added to it is served, documented and found without another line."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from application import call, rejected, started
from bertserve.service.tasks import classify
from bertserve.service.tasks.batch import Batch, TaskModel, TaskRun, first_batch
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Cost
from bertserve.service.tasks.spec import Derivation, TaskSpec

EVERY_TASK = pytest.mark.parametrize("spec", TASKS.values(), ids=lambda spec: spec.path)


@EVERY_TASK
def test_a_spec_is_whole(spec: TaskSpec) -> None:
    """Name and path are its own, its body has an example that it reads itself, and a derived task names its base, if it has one, and its marker."""
    assert spec is TASKS[spec.name]
    assert [spec] == [other for other in TASKS.values() if spec.path == other.path or spec.body is other.body]
    [example] = spec.body.model_json_schema()["examples"]
    body = spec.body.model_validate_json(json.dumps(example))
    assert body.count >= 1
    if spec.derivation is not None:
        assert spec.derivation.base is None or TASKS[spec.derivation.base].derivation is None
        for key in spec.derivation.discriminator:
            assert key in example
            example = example[key]


@EVERY_TASK
def test_every_parameter_says_what_it_does(spec: TaskSpec) -> None:
    """OpenAPI has a text for each parameter, and refuses names that are none."""
    schema = spec.body.parameters_type.model_json_schema()
    assert [] == [name for name, field in schema.get("properties", {}).items() if len(field.get("description", "")) < 10]
    assert schema["additionalProperties"] is False


def wrong_values(schema: dict[str, Any]) -> list[Any]:
    """Returns values that a parameter's JSON schema refuses: of other types, and just outside its bounds."""
    # "1", "yes" and 1 are what a validator that converts would take for a number or a truth value
    values: list[Any] = [True, False, 0.5, 1, 5, "1", "yes", "no such value", [], [True], {}, {"good": 1}]
    kinds = [schema]
    for kind in kinds:
        kinds += kind.get("anyOf", []) + kind.get("oneOf", [])
        values += [kind[bound] + step for bound, step in (("minimum", -1), ("maximum", 1)) if bound in kind]
        values += ["x" * (kind["maxLength"] + 1)] if "maxLength" in kind else []
        if kind.get("type") == "array":
            values += [[{"string": "good", "integer": 0}[kind["items"]["type"]]] * (kind["maxItems"] + 1)]
            values += [[value] for value in wrong_values(kind["items"])]
    return [value for value in values if not Draft202012Validator(schema).is_valid(value)]


@EVERY_TASK
def test_a_wrong_parameter_is_named(models: Path, spec: TaskSpec) -> None:
    """A value that the schema refuses is 422, for each parameter of the task, and the message names the parameter."""
    schema = spec.body.parameters_type.model_json_schema()
    [example] = spec.body.model_json_schema()["examples"]
    for name, field in schema["properties"].items():
        for value in wrong_values(field):
            if name == "output_attentions" and value == 1:
                continue  # pydantic takes 1 for the literal true
            if name in ("candidate_labels", "targets") and isinstance(value, str):
                continue  # a text is read as a list too, which the schema does not say
            body = example | {"parameters": example.get("parameters", {}) | {name: value}}
            message = rejected(call(models, "POST", f"/{spec.path}", json=body), 422, "invalid_value")
            assert message.startswith(f"`parameters.{name}"), (name, value, message)


@dataclass(frozen=True, slots=True)
class _Length:
    text: str

    @property
    def chars(self) -> int:
        return len(self.text)


class _LengthBody(classify.ClassifyBody):
    """Body of a task that is only tested."""

    count_tokens: bool

    def request(self, item: Any, parameters: Any) -> _Length:
        return _Length(item)


def _count_tokens(request: _Length, model: TaskModel) -> TaskRun:
    batch = first_batch(classify.classify, classify.Request(request.text), model)
    yield Batch(batch.encodings, Cost(answer_bytes=4))
    return len(batch.encodings[0])


def test_a_task_in_the_list_is_served(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its endpoint, its models, its documents and the discriminator follow from its spec."""
    spec = replace(
        classify.SPEC,
        name="token-counting",
        path="count",
        body=_LengthBody,
        answer=list[int],
        estimate=lambda request, max_length: 8,
        run=_count_tokens,
        derivation=Derivation(
            base=classify.TASK, compatible=lambda config: len(config.labels) > 1, needs="two labels", discriminator=("count_tokens",)
        ),
    )
    monkeypatch.setitem(TASKS, spec.name, spec)  # type: ignore[arg-type]  # a dict, which only tests change
    body = {"inputs": ["good", "a good film"], "count_tokens": True}
    with started(models) as send:
        answers = [send("POST", path, json=body) for path in ("/count", "/models/tiny")]
        described = send("GET", "/models/tiny").json()
        documented = send("GET", "/openapi.json").json()
        wrong = send("GET", "/count")

    assert [(200, [3, 5])] * 2 == [(answer.status_code, answer.json()) for answer in answers]
    assert ["/classify", "/count"] == described["endpoints"]
    assert "#/components/schemas/_LengthBody" in json.dumps(documented["paths"]["/count"]["post"]["requestBody"])
    assert (405, "POST") == (wrong.status_code, wrong.headers["allow"])
