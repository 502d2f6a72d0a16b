"""Responses conform to the OpenAPI description: schemathesis sends valid and invalid requests over a real connection."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bertserve.service.api.request import TIMEOUT_HEADER
from bertserve.service.tasks.catalog import TASKS
from support import hostile, tiny
from support.replica import ServeProcess, running

SHARE = 0.05  # share of all hostile cases
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
MODELS = ("classifier", "names", "nli", "ranker", "passages", "masks", "vectors")
POSTS = [f"/{spec.path}" for spec in TASKS.values()] + ["/models/{name}", "/", "/v2/models/{name}/infer", "/v1/models/{name}:predict"]


@pytest.fixture(name="service", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    with running(tiny.every_kind(tmp_path_factory.mktemp("models"), max_length=64), log, "--default", "classify=classifier") as server:
        yield server


@pytest.fixture(name="schema", scope="module")
def description_of_the_service(service: ServeProcess) -> Any:
    with requests.get(f"{service.url}/openapi.json", timeout=20) as answer:
        schema = schemathesis.openapi.from_dict(answer.json())
    schema.config.update(base_url=service.url)
    return schema


@pytest.fixture(name="session", scope="module")
def one_connection() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


def assert_conforms(case: Case, session: requests.Session) -> None:
    """Asserts that the response to a case conforms to the description and leaks no internals."""
    if str(case.headers.get(TIMEOUT_HEADER, "")).isdecimal():
        case.headers[TIMEOUT_HEADER] = "60000"  # a shorter deadline can correctly give 504
    answer = case.call(session=session, timeout=20)
    case.validate_response(answer, checks=CHECKS)
    if answer.status_code >= 400:
        assert [word for word in hostile.LEAKS if word in answer.text and word not in str(case.body)] == []


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", POSTS)
def test_responses_to_bodies_conform_to_the_description(schema: Any, session: requests.Session, path: str, mode: GenerationMode) -> None:
    @hostile.cases(SHARE / len(POSTS) / 2)
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode), name=st.sampled_from([*MODELS, None]))
    def check(case: Case, name: str | None) -> None:
        if name is not None and "name" in case.path_parameters:
            case.path_parameters["name"] = name
        elif name is not None and isinstance(case.body, dict):
            case.body.pop("model", None)  # a generated name would be unknown
        assert_conforms(case, session)

    check()


def test_responses_of_all_other_paths_conform_to_the_description(schema: Any, session: requests.Session) -> None:
    others = [result.ok() for result in schema.get_all_operations()]
    others = [operation for operation in others if (operation.method, operation.path) not in {("post", path) for path in POSTS}]
    assert len(others) > 25
    for operation in others:
        names = st.sampled_from(["classifier", None]) if "{name}" in operation.path else st.none()

        @hostile.cases(SHARE / 50 if "{name}" in operation.path else 0)
        @given(case=operation.as_strategy(), name=names)
        def check(case: Case, name: str | None) -> None:
            if name is not None:
                case.path_parameters["name"] = name
            assert_conforms(case, session)

        check()
