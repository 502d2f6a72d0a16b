"""All tasks over HTTP: shared paths, models, bodies, parameters, limits, errors, descriptions and metrics."""

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from bertserve.service.api.formats.ignored_fields import CLIENT_OPTIONS, IGNORED_FIELDS
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.text.tokenizer import INLINE_CHARS
from support import tiny
from support.app_client import LONG, Send, assert_same, call, error_of, error_of_body, post, result, serving, state_of

CLASSIFY, NER, ANSWER, FILL, CHOOSE = "/classify", "/ner", "/answer", "/fill-mask", "/choose"
EMBED, SIMILARITY, RERANK, ZERO_SHOT, ATTENTION = "/embed", "/similarity", "/rerank", "/zero-shot", "/attention"
LABELS = {"candidate_labels": ["film", "book"]}
QUESTION = {"question": "good ?", "context": "a film"}
CHOICES = {"question": "good ?", "choices": ["a film", "a book"]}
SENTENCES = {"source_sentence": "good", "sentences": ["bad"]}
BODIES: dict[str, dict[str, Any]] = {
    CLASSIFY: {"inputs": "good"},
    NER: {"inputs": "a good film was bad"},
    ANSWER: {"inputs": QUESTION},
    FILL: {"inputs": "a [MASK]"},
    CHOOSE: {"inputs": CHOICES},
    EMBED: {"inputs": "good"},
    SIMILARITY: {"inputs": SENTENCES},
    RERANK: {"query": "good", "texts": ["bad"]},
    ZERO_SHOT: {"inputs": "good", "parameters": LABELS},
    ATTENTION: {"inputs": "good", "parameters": {"output_attentions": True}},
}
MODELS = {
    CLASSIFY: "classifier",
    NER: "names",
    ANSWER: "passages",
    FILL: "masks",
    CHOOSE: "choices",
    EMBED: "vectors",
    SIMILARITY: "vectors",
    RERANK: "ranker",
    ZERO_SHOT: "nli",
    ATTENTION: "attentive",
}
OTHER_INPUTS: dict[str, Any] = {
    CLASSIFY: {"text": "good", "text_pair": "bad"},
    NER: "",
    ANSWER: {"question": "who?", "context": "x y z"},
    FILL: "the [MASK] was dull",
    CHOOSE: {"prompt": "a very", "choices": ["good film", "bad"]},
    EMBED: "",
    ZERO_SHOT: "",
    ATTENTION: "",
}
SPECS = {f"/{spec.path}": spec for spec in TASKS.values()}
LISTS = [path for path in BODIES if path not in (SIMILARITY, RERANK)]  # endpoints that accept a list of inputs
DERIVED = [path for path, spec in SPECS.items() if spec.derivation is not None]
TOO_LONG = "x" * 101

each_path = pytest.mark.parametrize("path", BODIES)


def with_parameters(path: str, **parameters: Any) -> dict[str, Any]:
    return BODIES[path] | {"parameters": BODIES[path].get("parameters", {}) | parameters}


def schema_of(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = SPECS[path].body.parameters_type.model_json_schema()
    return dict(schema.get("properties", {}))


PARAMETERS = [(path, name) for path in BODIES for name in schema_of(path)]
each_parameter = pytest.mark.parametrize(("path", "name"), PARAMETERS)


def test_every_task_has_a_body_and_a_model_in_this_file() -> None:
    assert set(SPECS) == set(BODIES) == set(MODELS)


@each_path
def test_a_model_is_chosen_by_body_or_path(api: Send, path: str) -> None:
    by_body = post(api, BODIES[path] | {"model": MODELS[path]}, path=path)
    by_path = post(api, BODIES[path], path=f"/models/{MODELS[path]}")
    assert [response.status_code for response in (by_body, by_path)] == [200, 200]
    assert [response.headers["x-model"] for response in (by_body, by_path)] == [MODELS[path]] * 2
    assert_same(by_path.json(), by_body.json())


@each_path
def test_a_model_that_is_incompatible_with_the_task_is_refused(api: Send, path: str) -> None:
    for model in api("GET", "/models").json():
        name = model["name"]
        body = BODIES[path] | {"model": name}
        if path in model["endpoints"]:
            assert post(api, body, path=path).headers["x-model"] == name
            continue
        message = error_of_body(api, path, body)
        assert f"`{name}`" in message
        if path in DERIVED:
            assert f"{SPECS[path].name}: `{MODELS[path]}`" in message
            error_of_body(api, f"/models/{name}", BODIES[path])


@pytest.mark.parametrize("path", [path for path in BODIES if path != CLASSIFY])
def test_a_task_without_a_model_is_not_found(models: Path, path: str) -> None:
    assert "tiny (text-classification)" in error_of(post(models, BODIES[path], path=path), 404, "not_found")
    assert "tiny" in error_of(call(models, "GET", f"{path}/info"), 404, "not_found")
    assert "tiny" not in error_of(call(models, "GET", f"{path}/health"), 404, "not_found")


@each_path
def test_task_and_model_paths_have_info_and_health(api: Send, path: str) -> None:
    page = api("GET", f"{path}/info").json()
    assert path in page["default_of"]
    for base in (path, f"/models/{page['name']}"):
        assert api("GET", f"{base}/info").json() == page
        health = api("GET", f"{base}/health")
        assert (health.status_code, health.json()["ready"]) == (200, True)


async def test_requests_are_counted_by_task_model_and_status(tmp_path: Path) -> None:
    folder = tiny.every_kind(tmp_path)
    async with serving(state_of(folder, allow_implicit_default=True)) as client:
        for path, name in MODELS.items():
            await client.post(path, json=BODIES[path] | {"model": name})
            await client.post(f"/models/{name}", json=BODIES[path])
            await client.post(path, json={"inputs": 5})
            await client.post(path, json=BODIES[path] | {"model": name, "parameters": {"x": 1}})
        page = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples if sample.value]

    def counts_of(metric: str, *labels: str) -> dict[tuple[str, ...], float]:
        return {tuple(s.labels[name] for name in labels): s.value for s in samples if s.name == f"bertserve_{metric}"}

    good = {(SPECS[path].name, name): 2 for path, name in MODELS.items()}
    bad = {(task, "unknown", "422"): 2 for task in TASKS}
    assert counts_of("requests_total", "task", "model", "status") == {(*labels, "200"): count for labels, count in good.items()} | bad
    assert counts_of("decode_seconds_count", "task", "model") == good
    assert good.items() <= counts_of("request_seconds_count", "task", "model").items()
    rows = {"names": 2, "passages": 2, "masks": 2, "choices": 4, "vectors": 6, "classifier": 2, "attentive": 2, "nli": 4, "ranker": 2}
    assert {model: count for (model,), count in counts_of("batch_rows_sum", "model").items()} == rows


@each_path
def test_a_response_has_the_id_model_and_timing_headers(api: Send, path: str) -> None:
    response = post(api, BODIES[path] | {"model": MODELS[path]}, path=path, headers={"x-request-id": "my-id"})
    assert (response.headers["x-request-id"], response.headers["x-model"]) == ("my-id", MODELS[path])
    time = r"dur=\d+(\.\d+)?"
    assert re.fullmatch(rf"tokenize;{time}, queue;{time}, inference;{time}, decode;{time}", response.headers["server-timing"])


@pytest.mark.parametrize("path", LISTS)
def test_a_list_gives_one_result_per_input(api: Send, path: str) -> None:
    bodies = [BODIES[path], BODIES[path] | {"inputs": OTHER_INPUTS[path]}]
    one, other = (result(api, path, **body) for body in bodies)
    if path in (CLASSIFY, EMBED):  # a single text gives a list with one result
        [one], [other] = one, other
    inputs = [body["inputs"] for body in bodies]
    assert_same(result(api, path, **BODIES[path] | {"inputs": [*inputs, inputs[0]]}), [one, other, one])
    assert_same(result(api, path, **BODIES[path] | {"inputs": inputs[:1]}), [one])
    assert result(api, path, **BODIES[path] | {"inputs": []}) == []


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        *((path, {}, "inputs") for path in BODIES if path not in (RERANK, ZERO_SHOT)),
        *((path, BODIES[path] | {"inputs": value}, "inputs") for path in BODIES if path != RERANK for value in (None, 5)),
        *((path, BODIES[path] | {"inputs": [BODIES[path]["inputs"], 5]}, "inputs[1]") for path in LISTS),
        *((path, BODIES[path] | {"parameters": []}, "parameters") for path in BODIES),
        *((path, BODIES[path] | {"model": 5}, "model") for path in BODIES),
        (CLASSIFY, {"inputs": ["good", ["bad"]]}, "inputs[1]"),
        (CLASSIFY, {"inputs": {"text_pair": "good"}}, "inputs.text"),
        (CLASSIFY, {"inputs": ["good", {"text": "bad", "text_pair": []}]}, "inputs[1].text_pair"),
        (ANSWER, {"inputs": {"question": "good?"}}, "inputs.context"),
        (ANSWER, {"inputs": [QUESTION, {"question": None, "context": "good"}]}, "inputs[1].question"),
        (CHOOSE, {"inputs": {"question": "good"}}, "inputs.choices"),
        (CHOOSE, {"inputs": {"question": "good", "choices": ["a"]}}, "inputs.choices"),
        (CHOOSE, {"inputs": {"question": "good", "choices": ["a"] * 65}}, "inputs.choices"),
        (CHOOSE, {"inputs": [CHOICES, {"question": "good", "choices": ["a", 1]}]}, "inputs[1].choices[1]"),
        (CHOOSE, {"inputs": {"choices": ["a", "b"]}}, "inputs"),
        (CHOOSE, {"inputs": {"question": "a", "prompt": "b", "choices": ["a", "b"]}}, "inputs"),
        (SIMILARITY, {"inputs": {"source_sentence": "good", "sentences": ["good", 5]}}, "inputs.sentences[1]"),
        (RERANK, {"query": "good", "texts": ["good", None]}, "texts[1]"),
        (ZERO_SHOT, {"inputs": "good"}, "parameters.candidate_labels"),
    ],
)
def test_an_invalid_value_is_named_by_its_path_in_the_body(api: Send, path: str, body: Any, where: str) -> None:
    assert error_of_body(api, path, body).startswith((f"`{where}` must ", f"`{where}` is "))


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CLASSIFY, {"params": 1}, ["`params`", "`parameters`"]),
        (CLASSIFY, {"top_k": 1}, ["`top_k`", "`parameters`"]),
        (CLASSIFY, {"truncate": 1}, ["`truncate`", "`truncation`"]),
        (CLASSIFY, {"x": 1}, ["`x`", "`model`, `inputs`, `parameters`"]),
        (FILL, {"Target": 1}, ["`Target`", "`targets`"]),
        (ANSWER, {"question": 1}, ["`question`", "`model`, `inputs`, `parameters`"]),
        (CLASSIFY, {"inputs": {"text": "good", "text_par": "bad"}}, ["`inputs`", "`text_pair`"]),
        (CLASSIFY, {"inputs": ["good", {"text": "good", "pair": "bad"}]}, ["`inputs[1]`", "`pair`"]),
        (ANSWER, {"inputs": {"question": "good ?", "contxt": "a film"}}, ["`inputs`", "`context`"]),
        (ANSWER, {"inputs": [QUESTION | {"id": 1}]}, ["`inputs[0]`", "`question`, `context`"]),
        (CLASSIFY, {"stream": True}, ["`stream`"]),
        (CLASSIFY, {"encoding_format": "base64"}, ["`encoding_format`"]),
        (CLASSIFY, {"options": {"top_k": 2}}, ["`options`", "`top_k`"]),
        (CLASSIFY, {"options": True}, ["`options`"]),
    ],
)
def test_an_unknown_key_or_one_without_effect_is_an_error(api: Send, path: str, fields: dict[str, Any], words: list[str]) -> None:
    """With a misspelled `text_pair`, the first text is not scored without its pair. Keys of other clients can have only harmless values."""
    message = error_of_body(api, path, BODIES[path] | fields)
    assert [word for word in words if word not in message] == [], message


@each_parameter
def test_a_misspelled_parameter_gets_a_suggestion(api: Send, path: str, name: str) -> None:
    for place in (path, f"/models/{MODELS[path]}"):
        assert f"did you mean `{name}`?" in error_of_body(api, place, with_parameters(path, **{f"{name}x": 1}))


@each_path
def test_a_parameter_of_another_task_is_refused_with_those_of_the_task(api: Send, path: str) -> None:
    names = list(schema_of(path))
    for name in {name for other in BODIES for name in schema_of(other)} - set(names) - set(SPECS[path].body.model_fields):
        message = error_of_body(api, path, with_parameters(path, **{name: 1}))
        assert message.startswith(f"`parameters` does not take `{name}`; ")
        assert all(f"`{parameter}`" in message for parameter in names)


def test_rerank_options_are_refused_within_parameters(api: Send) -> None:
    """In `parameters`, `/rerank` takes only the options of decisions; it accepts the empty object that huggingface_hub sends."""
    assert post(api, BODIES[RERANK] | {"parameters": {}}, path=RERANK).status_code == 200
    assert "`query`, `texts`." in error_of_body(api, RERANK, BODIES[RERANK] | {"parameters": {"return_text": True}})


@each_path
def test_harmless_keys_of_other_clients_are_accepted(api: Send, path: str) -> None:
    more = {"options": dict.fromkeys(CLIENT_OPTIONS, True), "use_cache": False, "wait_for_model": True, "user": "me"}
    more |= {"stream": False, "encoding_format": "float"}
    assert set(more) == set(IGNORED_FIELDS)
    expected = result(api, path, **BODIES[path])
    assert result(api, path, **BODIES[path] | more | {"model": None}) == expected
    assert result(api, path, **{"parameters": None} | BODIES[path]) == expected


@pytest.mark.parametrize("path", [*BODIES, "/models/nli"])
def test_a_query_string_is_an_error(api: Send, path: str) -> None:
    """A query string would have no effect, so it is refused; an empty one is accepted."""
    body = BODIES.get(path, BODIES[CLASSIFY])
    assert "`model`" in error_of_body(api, f"{path}?model=nli", body)
    assert len(error_of_body(api, f"{path}?{'x' * 9999}=1&b", body)) < 300
    assert post(api, body, path=f"{path}?").status_code == 200


def wrong_values(schema: dict[str, Any]) -> list[Any]:
    """Returns values that a parameter's JSON schema refuses: other types, and values just outside its bounds."""
    # a validator that converts types would accept "1", "yes" and 1 as a number or a boolean
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


@each_parameter
def test_an_invalid_parameter_value_is_named(api: Send, path: str, name: str) -> None:
    for value in wrong_values(schema_of(path)[name]):
        if name == "output_attentions" and value == 1:
            continue  # pydantic accepts 1 for the literal true
        if name in ("candidate_labels", "targets") and isinstance(value, str):
            continue  # a string is accepted in place of a list, which the schema does not say
        message = error_of_body(api, path, with_parameters(path, **{name: value}))
        assert message.startswith(f"`parameters.{name}"), (value, message)


@pytest.mark.parametrize(("path", "name"), [at for at in PARAMETERS if {"type": "null"} in schema_of(at[0])[at[1]].get("anyOf", [])])
def test_null_gives_the_default_value(api: Send, path: str, name: str) -> None:
    assert_same(result(api, path, **with_parameters(path, **{name: None})), result(api, path, **BODIES[path]))


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CLASSIFY, {"inputs": TOO_LONG}, "inputs"),
        (CLASSIFY, {"inputs": ["good", "é" * 101]}, "inputs[1]"),
        (CLASSIFY, {"inputs": [{"text": "good", "text_pair": TOO_LONG}]}, "inputs[0]"),
        (ANSWER, {"inputs": [QUESTION, {"question": "x", "context": TOO_LONG}]}, "inputs[1]"),
        (FILL, {"inputs": ["[MASK]", "[MASK]" + "x" * 95]}, "inputs[1]"),
        *((CHOOSE, {"inputs": [CHOICES, CHOICES | {name: TOO_LONG}]}, "inputs[1]") for name in ("question", "context")),
        (CHOOSE, {"inputs": [CHOICES, CHOICES | {"choices": ["a", TOO_LONG]}]}, "inputs[1]"),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": [TOO_LONG]}}, "inputs"),
        (RERANK, {"query": TOO_LONG, "texts": ["good"]}, "texts"),
    ],
)
def test_a_text_over_the_limit_is_too_large(models_folder: Path, path: str, body: Any, where: str) -> None:
    response = post(models_folder, body, path=path, settings={"max_chars": 100})
    assert re.match(rf"{re.escape(where)}: .* 101 characters and 100 ", error_of(response, 413, "too_large"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CLASSIFY, {"inputs": ["good"] * 6}),
        (EMBED, {"inputs": ["good"] * 6}),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": ["good"] * 6}}),
        (RERANK, {"query": "a", "texts": ["good"] * 6}),
        (ZERO_SHOT, {"inputs": ["a", "b", "c"], "parameters": LABELS}),
        (CHOOSE, {"inputs": [CHOICES] * 3}),
    ],
)
def test_the_input_limit_counts_texts_pairs_and_choices(models_folder: Path, path: str, body: Any) -> None:
    assert "6 inputs" in error_of(post(models_folder, body, path=path, settings={"max_inputs": 5}), 413, "too_large")
    assert post(models_folder, body, path=path, settings={"max_inputs": 6}).status_code == 200


@pytest.fixture(name="models_folder", scope="module")
def folder_of_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.every_kind(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHOOSE, {"inputs": [CHOICES, CHOICES | {"context": LONG}]}),
        (EMBED, {"inputs": ["good", LONG]}),
        (SIMILARITY, {"inputs": {"source_sentence": "good", "sentences": [LONG]}}),
        (RERANK, {"query": "good", "texts": ["bad", LONG]}),
        (ZERO_SHOT, {"inputs": LONG, "parameters": LABELS}),
    ],
)
def test_a_truncated_text_is_reported_in_headers(api: Send, path: str, body: Any) -> None:
    response = post(api, body, path=path)
    assert response.headers["x-truncated"] == "1"
    assert "32 tokens: " in response.headers["x-hf-warning"]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CLASSIFY, {"inputs": LONG}, "inputs: .* 60 tokens"),
        (CLASSIFY, {"inputs": [LONG]}, r"inputs\[0\]: .* 60 tokens"),
        (CLASSIFY, {"inputs": ["good" + " " * INLINE_CHARS, LONG]}, r"inputs\[1\]: .* 60 tokens"),
        (CHOOSE, {"inputs": [CHOICES, CHOICES | {"context": LONG}]}, r"inputs\[1\]: `choices\[0\]` has 64 tokens .* 29;"),
        (EMBED, {"inputs": ["good", LONG]}, r"inputs\[1\]: "),
        (RERANK, {"query": "good", "texts": ["good", LONG]}, r".*`texts\[1\]` has 61 tokens"),
    ],
)
def test_without_truncation_a_long_text_is_an_error(api: Send, path: str, body: dict[str, Any], where: str) -> None:
    more = {"parameters": {"truncation": False}} if path in (CLASSIFY, CHOOSE) else {"truncate": False}
    assert re.match(where, error_of_body(api, path, body | more))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NER, {"inputs": [LONG, "good"]}),
        (ANSWER, {"inputs": [{"question": "good?", "context": LONG}, QUESTION]}),
        (FILL, {"inputs": [f"[MASK] {LONG} [MASK]", "a [MASK]"]}),
    ],
)
def test_a_text_of_several_windows_is_not_reported_as_truncated(api: Send, path: str, body: Any) -> None:
    together = post(api, body, path=path)
    alone = [post(api, {"inputs": item}, path=path) for item in body["inputs"]]
    for response in (together, *alone):
        assert response.status_code == 200
        assert {"x-truncated", "x-hf-warning"}.isdisjoint(response.headers)
    assert_same(together.json(), [response.json() for response in alone])
