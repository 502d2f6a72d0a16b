"""The wire of /embed, /similarity, /rerank and /zero-shot over tiny bundles: shapes, parameters, errors, models, metrics."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tiny
from application import LONG, Send, answered, ask, assert_same, call, classify, play, post, refused, rejected, started
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings
from bertserve.service.tasks import embed
from bertserve.service.tasks.cost import NUMBER_BYTES
from bertserve.service.wire.json_text import to_json, to_plain

NLI_LABELS = ("contradiction", "neutral", "entailment")
EMBED, SIMILARITY, RERANK, ZERO_SHOT = "/embed", "/similarity", "/rerank", "/zero-shot"
TASKS = {EMBED: "feature-extraction", SIMILARITY: "sentence-similarity", RERANK: "text-ranking", ZERO_SHOT: "zero-shot-classification"}
MODELS = {EMBED: "vectors", SIMILARITY: "vectors", RERANK: "ranker", ZERO_SHOT: "nli"}
LABELS = {"candidate_labels": ["good", "bad", "a very dull book"]}
SENTENCES = {"source_sentence": "a good film", "sentences": ["a great film", "the book was dull"]}
BODIES: dict[str, Any] = {
    EMBED: {"inputs": "a good film"},
    SIMILARITY: {"inputs": SENTENCES, "parameters": {}},
    RERANK: {"query": "good?", "texts": ["a great film", "the book was dull", ""]},
    ZERO_SHOT: {"inputs": "a good film", "parameters": LABELS},
}


@pytest.fixture(scope="module", name="folder")
def folder_of_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with an embedding model, a cross-encoder, a model of inference and a plain classifier."""
    folder = tmp_path_factory.mktemp("heads")
    prompts = {"prompts": {"query": "the book "}, "default_prompt": None}
    tiny.bundle(folder, "vectors", task="feature-extraction", embedding=tiny.EMBEDDING | prompts)
    tiny.bundle(folder, "ranker", labels=("LABEL_0",), activation="none")
    tiny.bundle(folder, "nli", labels=NLI_LABELS)
    tiny.bundle(folder, "zz-topics")
    return folder


@pytest.fixture(scope="module", name="api")
def started_service(folder: Path) -> Iterator[Send]:
    """Sends requests to one started application with these bundles."""
    with started(folder) as send:
        yield send


def result(api: Send, path: str, body: Any, **options: Any) -> Any:
    """Returns the result of a body that must be answered."""
    response = post(api, body, path=path, **options)
    assert response.status_code == 200, response.text
    return response.json()


def wrong(api: Send, path: str, body: Any) -> str:
    """Returns the message of a body that must be 422."""
    return rejected(post(api, body, path=path), 422, "invalid_value")


def by_label(found: list[dict[str, Any]]) -> dict[str, float]:
    """Returns zero-shot results as a mapping."""
    return {item["label"]: item["score"] for item in found}


# Models and endpoints


@pytest.mark.parametrize("path", list(TASKS))
def test_a_models_path_answers_what_the_body_asks_for(api: Send, path: str) -> None:
    """POST /models/{name} goes by the bundle's task, or to the other task that only such a body asks for."""
    for place, body in ((f"/models/{MODELS[path]}", BODIES[path]), (path, BODIES[path] | {"model": MODELS[path]})):
        response = post(api, body, path=place)
        assert_same(result(api, path, BODIES[path]), response.json())
        assert MODELS[path] == response.headers["x-model"]


def test_a_model_of_inference_still_classifies(api: Send) -> None:
    """Without candidate labels its own path and /classify give its own labels."""
    found = answered(api, "/models/nli", {"text": "a good film", "text_pair": "bad"})
    assert set(NLI_LABELS) == {item["label"] for item in found[0]}


@pytest.mark.parametrize("path", list(TASKS))
def test_each_base_has_info_and_health(api: Send, path: str) -> None:
    """Below each endpoint stand its model's page, which names all that the model answers, and its health."""
    page = api("GET", f"{path}/info").json()
    assert MODELS[path] == page["name"]
    assert path in page["endpoints"]
    assert ("embedding" in page) is (page["task"] == "feature-extraction")
    assert api("GET", f"{path}/health").json()["ready"]


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        (EMBED, "no model for feature-extraction is loaded; loaded are: tiny (text-classification)."),
        (SIMILARITY, "which needs a feature-extraction model; loaded are: tiny (text-classification)."),
        (
            RERANK,
            "which needs a text-classification model with exactly one label, as a cross-encoder has, or two labels, one of which begins with",
        ),
        (ZERO_SHOT, "which needs a text-classification model with two or more labels, one of which begins with `entail`; loaded are: tiny"),
    ],
)
def test_a_task_without_a_model_says_what_it_takes(models: Path, path: str, needs: str) -> None:
    """Where no model can do it the endpoint is 404, with what it would take and what there is."""
    assert needs in rejected(classify(models, BODIES[path], path=path), 404, "not_found")


@pytest.mark.parametrize(("path", "name"), [(ZERO_SHOT, "zz-topics"), (ZERO_SHOT, "ranker"), (RERANK, "nli"), (RERANK, "zz-topics")])
def test_a_model_that_cannot_do_it_says_why_and_who_can(api: Send, path: str, name: str) -> None:
    """A classifier with the wrong labels is refused with its labels and the models that fit, at its own path too."""
    for place, body in ((path, BODIES[path] | {"model": name}), (f"/models/{name}", BODIES[path])):
        message = wrong(api, place, body)
        assert f"the model `{name}` does not support {TASKS[path]}, which needs " in message
        assert f"Models for {TASKS[path]}: `{MODELS[path]}`." in message


def test_a_model_of_another_task_is_refused(api: Send) -> None:
    """An embedding model at /zero-shot is 422 with its task, its own path, and who can."""
    message = wrong(api, ZERO_SHOT, BODIES[ZERO_SHOT] | {"model": "vectors"})
    assert (
        "is for feature-extraction, but this endpoint is for zero-shot-classification; send a POST to /models/vectors instead." in message
    )
    assert message.endswith("Models for zero-shot-classification: `nli`.")


@pytest.mark.parametrize("default", ["zero-shot", "zero-shot-classification"])
def test_a_default_model_is_chosen_for_each_task(tmp_path: Path, default: str) -> None:
    """`--default` names a model for a task that it answers beside its own, and for that task alone."""
    for name in ("ant", "zebra"):
        tiny.bundle(tmp_path, name, labels=NLI_LABELS)
    for path, name in ((ZERO_SHOT, "zebra"), ("/classify", "ant")):
        response = classify(
            tmp_path, BODIES[ZERO_SHOT] if path == ZERO_SHOT else {"inputs": "good"}, path=path, settings={"default": {default: "zebra"}}
        )
        assert name == response.headers["x-model"]


def test_requests_are_counted_by_what_was_asked_for(folder: Path) -> None:
    """Requests are labeled with the task that was asked for, at either path; runs with the model's own."""

    async def check(client: httpx.AsyncClient) -> str:
        for path in TASKS:
            await client.post(path, json=BODIES[path])
            await client.post(f"/models/{MODELS[path]}", json=BODIES[path])
        return (await client.get("/metrics")).text

    page = play(build(Settings(models=folder, allow_implicit_default=True)), check)
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def counted(name: str) -> dict[tuple[str, str], float]:
        return {(s.labels["task"], s.labels["model"]): s.value for s in samples if s.name == f"bertserve_{name}" and s.value}

    each = {(task, MODELS[path]): 2 for path, task in TASKS.items()}
    assert each == counted("requests_total") == counted("request_seconds_count") == counted("decode_seconds_count")
    rows = {("feature-extraction", "vectors"): 2 + 6, ("text-classification", "ranker"): 6, ("text-classification", "nli"): 6}
    assert rows == counted("batch_rows_sum")


@pytest.mark.parametrize(
    ("path", "schema", "fields"),
    [
        (EMBED, None, None),
        (SIMILARITY, None, None),
        (RERANK, "Ranked", ["index", "score", "text"]),
        (ZERO_SHOT, "LabelScore", ["label", "score"]),
    ],
)
def test_openapi_describes_the_task(api: Send, tmp_path: Path, path: str, schema: str | None, fields: list[str] | None) -> None:
    """The document has each body with its fields described, an example that is answered, and its result's fields."""
    document = api("GET", "/openapi.json").json()
    schemas, operation = document["components"]["schemas"], document["paths"][path]["post"]
    body = schemas[operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    assert all(field["description"] for name, field in body["properties"].items() if name != "parameters")
    assert 200 == post(api, body["examples"][0], path=path).status_code
    if schema is not None and fields is not None:
        assert fields == sorted(schemas[schema]["properties"])
        assert f"#/components/schemas/{schema}" in str(operation["responses"]["200"]["content"]["application/json"]["schema"])


@pytest.mark.parametrize("path", list(TASKS))
def test_a_body_that_is_no_json_is_malformed(api: Send, path: str) -> None:
    """At an endpoint and at a model's path, whatever key the broken body seems to have."""
    for place in (path, f"/models/{MODELS[path]}"):
        response = api("POST", place, content=b'{"inputs": "candidate_labels texts source_sentence')
        assert "the body is not valid JSON" in rejected(response, 400, "malformed")


# Limits


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (EMBED, {"inputs": ["good"] * 5}, "`inputs` has 5 items and 4 are allowed"),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": ["good"] * 5}}, "`sentences` has 5 items and 4 are allowed"),
        (RERANK, {"query": "a", "texts": ["good"] * 5}, "`texts` has 5 items and 4 are allowed"),
        (
            ZERO_SHOT,
            {"inputs": ["a", "b", "c"], "parameters": {"candidate_labels": "x, y"}},
            "`inputs` and `candidate_labels` make 6 pairs and 4 are allowed",
        ),
    ],
)
def test_the_limit_of_inputs_counts_what_is_run(folder: Path, path: str, body: Any, message: str) -> None:
    """Texts, sentences, and pairs of a text and a label count for --max-inputs."""
    assert message in rejected(classify(folder, body, path=path, settings={"max_inputs": 4}), 413, "too_large")


@pytest.mark.parametrize(
    ("path", "body", "subject"),
    [
        (EMBED, {"inputs": ["x", "x" * 101]}, "inputs[1]"),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": ["x" * 101]}}, "inputs"),
        (RERANK, {"query": "x" * 101, "texts": ["good"]}, "texts"),
        (ZERO_SHOT, {"inputs": "x" * 101, "parameters": LABELS}, "inputs"),
    ],
)
def test_a_text_over_the_limit_is_too_large(folder: Path, path: str, body: Any, subject: str) -> None:
    """Each text counts for the limit of characters."""
    message = rejected(classify(folder, body, path=path, settings={"max_chars": 100}), 413, "too_large")
    assert message.startswith(f"{subject}: the text has 101 characters and 100 are allowed")


@pytest.mark.parametrize("path", list(TASKS))
def test_a_cut_text_is_said(api: Send, path: str) -> None:
    """Long texts are cut, with the header and the warning."""
    bodies: dict[str, Any] = {
        EMBED: {"inputs": ["good", LONG]},
        SIMILARITY: {"inputs": {"source_sentence": "good", "sentences": [LONG]}},
        RERANK: {"query": "good", "texts": ["bad", LONG]},
        ZERO_SHOT: {"inputs": LONG, "parameters": LABELS},
    }
    response = post(api, bodies[path], path=path)
    assert "1" == response.headers["x-truncated"]
    assert "cut to the model's 32 tokens: " in response.headers["x-hf-warning"]


# /embed


def test_a_text_and_a_list_give_rows_of_vectors(api: Send) -> None:
    """One text gives a list of one vector, a list one for each, and no text none; all vectors are of one length."""
    one, other = answered(api, EMBED, "a good film"), answered(api, EMBED, "")
    assert [tiny.HIDDEN] == [len(vector) for vector in one]
    assert_same([*one, *other], answered(api, EMBED, ["a good film", ""]))
    assert_same(one, answered(api, EMBED, ["a good film"]))
    assert [] == answered(api, EMBED, [])


def test_tokens_are_pooled_as_asked(api: Send) -> None:
    """Pooled vectors are what the vectors of all tokens, special ones too, come to; the bundle's own way is the mean."""
    tokens = np.array(answered(api, EMBED, "a good film", pooling="none")[0])
    assert (5, tiny.HIDDEN) == tokens.shape
    expected = {"mean": tokens.mean(axis=0), "max": tokens.max(axis=0), "cls": tokens[0]}
    for pooling, vector in expected.items():
        np.testing.assert_allclose([vector], answered(api, EMBED, "a good film", pooling=pooling.upper()), atol=1e-5)
    np.testing.assert_allclose([expected["mean"]], answered(api, EMBED, "a good film"), atol=1e-5)


def test_options_stand_beside_the_inputs_or_in_parameters(api: Send) -> None:
    """The official client's flat keys do what the same names in `parameters` do; both may not differ."""
    flat = result(api, EMBED, {"inputs": "a good film", "normalize": True, "dimensions": 3, "truncate": None, "encoding_format": "float"})
    assert_same(flat, answered(api, EMBED, "a good film", normalize=True, dimensions=3))
    assert pytest.approx(1, abs=1e-6) == float(np.linalg.norm(flat[0]))
    assert_same(flat, result(api, EMBED, {"inputs": "a good film", "normalize": True, "parameters": {"normalize": True, "dimensions": 3}}))
    message = wrong(api, EMBED, {"inputs": "a", "normalize": True, "parameters": {"normalize": False}})
    assert "`normalize` is given next to `inputs` and in `parameters`" in message


@pytest.mark.parametrize("options", [{}, {"normalize": True, "dimensions": 3}, {"pooling": "none"}])
def test_vectors_come_as_base64(api: Send, options: dict[str, Any]) -> None:
    """The same values to the last bit, a text in place of each innermost list, at either path and place."""
    numbers = answered(api, EMBED, ["a good film", ""], **options)
    beside = result(api, EMBED, {"inputs": ["a good film", ""], "encoding_format": "base64", **options})
    assert beside == answered(api, "/models/vectors", ["a good film", ""], encoding_format="BASE64", **options)
    rows = [row if isinstance(row, list) else [row] for row in beside]
    found = [np.array([np.frombuffer(base64.b64decode(text), dtype="<f4") for text in row]) for row in rows]
    for vectors, read in zip(numbers, found, strict=True):
        np.testing.assert_array_equal(np.atleast_2d(np.array(vectors, dtype=np.float32)), read)
    assert [] == answered(api, EMBED, [], encoding_format="base64")


def test_the_last_four_layers_stand_side_by_side(api: Send) -> None:
    """`layers: last_four` gives four times the values, the last layer's at the end."""
    four = answered(api, EMBED, "a good film", layers="last_four")
    assert [4 * tiny.HIDDEN] == [len(vector) for vector in four]
    np.testing.assert_allclose(answered(api, EMBED, "a good film")[0], four[0][-tiny.HIDDEN :], atol=1e-5)


def test_layers_are_chosen_and_combined(api: Send) -> None:
    """A list of layers, side by side by default, or their sum or mean; `last_four` is such a list."""
    tokens = np.array(answered(api, EMBED, "a good film", layers="last_four", pooling="none")[0])
    layers = tokens.reshape(5, 4, tiny.HIDDEN)
    assert_same([tokens.tolist()], answered(api, EMBED, "a good film", layers=[-4, -3, -2, -1], pooling="none"))
    for combine, expected in (("sum", layers[:, [0, 2]].sum(axis=1)), ("MEAN", layers[:, [0, 2]].mean(axis=1))):
        found = answered(api, EMBED, "a good film", layers=[-4, -2], combine=combine)
        np.testing.assert_allclose([expected.mean(axis=0)], found, atol=1e-5)
    swapped = result(api, EMBED, {"inputs": "a good film", "layers": [-1, -4], "pooling": "cls"})
    np.testing.assert_allclose([[*layers[0, 3], *layers[0, 0]]], swapped, atol=1e-5)


def test_a_prompt_stands_before_the_text(api: Send) -> None:
    """`prompt_name` puts the bundle's prompt before each text."""
    assert_same(answered(api, EMBED, "the book was good"), result(api, EMBED, {"inputs": "was good", "prompt_name": "query"}))


@pytest.mark.parametrize("direction", ["left", "RIGHT"])
def test_a_text_is_cut_at_the_end_that_is_named(api: Send, direction: str) -> None:
    """What is left is embedded as if it were all."""
    words = LONG.split()
    kept = words[-30:] if direction == "left" else words[:30]
    assert_same(answered(api, EMBED, " ".join(kept)), answered(api, EMBED, LONG, truncation_direction=direction))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"pooling": "sum"}, "`parameters.pooling` is wrong: must be 'none', 'cls', 'mean' or 'max'"),
        ({"dimensions": 9}, "`dimensions` is 9, but this model's vectors have 8"),
        ({"layers": "first"}, "`parameters.layers` is wrong: must be 'last' or 'last_four'"),
        ({"layers": 3}, "`parameters.layers` is wrong: must be `last`, `last_four` or a list of numbers of layers; it is 3."),
        ({"layers": ["last"]}, "`parameters.layers[0]` is wrong: must be a whole number"),
        ({"layers": [0]}, "`layers` has 0, but this model has only the layers -4 to -1"),
        ({"layers": [-1, -2, -1]}, "`layers` has a duplicate: [-1, -2, -1]"),
        ({"layers": [-1, -2], "combine": "max"}, "`parameters.combine` is wrong: must be 'concat', 'sum' or 'mean'"),
        ({"prompt_name": "passage"}, "unknown prompt `passage`; this model has `query`."),
        ({"encoding_format": "hex"}, "`parameters.encoding_format` is wrong: must be 'float' or 'base64'; it is \"hex\"."),
        ({"normalise": True}, "`parameters` has no `normalise`; did you mean `normalize`?"),
    ],
)
def test_a_wrong_option_is_named(api: Send, parameters: dict[str, Any], message: str) -> None:
    """What is not allowed, or what this model does not have, is 422."""
    assert message in refused(api, EMBED, "good", **parameters)


def test_a_text_that_must_not_be_cut_is_refused(api: Send) -> None:
    """`truncate: false` makes a long text an error that names it."""
    message = wrong(api, EMBED, {"inputs": ["good", LONG], "truncate": False})
    assert message.startswith("inputs[1]: the text has 60 tokens and the model takes 30")


def test_an_answer_of_too_many_numbers_is_refused(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors have a limit, those of all tokens and pooled ones; base64 is shorter."""
    vector = tiny.HIDDEN * NUMBER_BYTES + embed.VECTOR_BYTES
    monkeypatch.setattr("bertserve.service.tasks.cost.MAX_ANSWER_BYTES", 5 * vector)
    assert 1 == len(answered(api, EMBED, ["a good film"], pooling="none"))
    message = rejected(ask(api, EMBED, ["a good film", "x"], pooling="none"), 413, "too_large")
    assert f"the response would have at least {8 * vector} bytes and {5 * vector} are allowed" in message
    assert 5 == len(answered(api, EMBED, ["a good film"] * 5))
    rejected(ask(api, EMBED, ["a good film"] * 6), 413, "too_large")
    assert 6 == len(answered(api, EMBED, ["a good film"] * 6, encoding_format="base64"))
    rejected(ask(api, EMBED, ["a good film"] * 5, layers=[-1, -2]), 413, "too_large")
    assert 5 == len(answered(api, EMBED, ["a good film"] * 5, layers=[-1, -2], combine="mean"))


def test_arrays_are_written_as_the_lists_that_they_are() -> None:
    """float32 with the digits that they need, wherever they stand; everything else as JSON has it."""
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    value = {"a": [values, values[0]], "b": [1, 0.1, "x\n", None, True, []]}
    read = json.loads(to_json(value))

    assert value["b"] == read["b"] == to_plain(value)["b"]
    for expected, actual in zip(value["a"], read["a"], strict=True):
        assert np.array_equal(expected, np.array(actual, dtype=np.float32))


# /similarity


def test_similarity_is_that_of_the_vectors(api: Send) -> None:
    """Cosines of what /embed gives, one for each sentence; nothing for no sentences."""
    vectors = np.array(answered(api, EMBED, [SENTENCES["source_sentence"], *SENTENCES["sentences"]], normalize=True))
    assert pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6) == answered(api, SIMILARITY, SENTENCES)
    assert pytest.approx([1.0], abs=1e-6) == answered(api, SIMILARITY, {"source_sentence": "good", "sentences": ["good"]}, pooling="cls")
    assert [] == answered(api, SIMILARITY, {"source_sentence": "good", "sentences": []})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("good", "`inputs` is wrong: must be an object"),
        ({"sentences": ["good"]}, "`inputs.source_sentence` is missing"),
        ({"source_sentence": "good", "sentences": "good"}, "`inputs.sentences` is wrong"),
        ({"source_sentence": "good", "sentences": ["good", 5]}, "`inputs.sentences[1]` is wrong"),
    ],
)
def test_wrong_sentences_are_named(api: Send, inputs: Any, message: str) -> None:
    """What is no sentence is named by its place."""
    assert message in refused(api, SIMILARITY, inputs)


# /rerank


def test_texts_come_best_first(api: Send) -> None:
    """Each text once, by falling score within 0 and 1; `raw_scores` gives the logits of the pairs, as /classify has them."""
    body = BODIES[RERANK]
    found = result(api, RERANK, body)
    assert [0, 1, 2] == sorted(item["index"] for item in found)
    assert [["index", "score"]] * 3 == [sorted(item) for item in found]
    raw = result(api, RERANK, body | {"raw_scores": True, "return_text": True})
    assert [item["index"] for item in found] == [item["index"] for item in raw]
    assert [body["texts"][item["index"]] for item in raw] == [item["text"] for item in raw]
    assert pytest.approx([1 / (1 + np.exp(-item["score"])) for item in raw], abs=1e-6) == [item["score"] for item in found]
    for item in raw:
        if item["text"]:
            pair = {"text": body["query"], "text_pair": item["text"]}
            [[alone]] = answered(api, "/models/ranker", pair, function_to_apply="none")
            assert pytest.approx(alone["score"], abs=1e-5) == item["score"]
    assert [] == result(api, RERANK, body | {"texts": []})


def test_a_cross_encoder_of_two_labels_ranks_by_the_relevant_one(tmp_path: Path) -> None:
    """Scores are the probabilities that /classify gives of that label; labels without a name are refused, with what to do."""
    tiny.bundle(tmp_path, "two", labels=("relevant", "irrelevant"))
    tiny.bundle(tmp_path, "nameless", labels=("LABEL_0", "LABEL_1"))
    body = BODIES[RERANK] | {"texts": BODIES[RERANK]["texts"][:2]}
    with started(tmp_path) as send:
        response = post(send, body, path=RERANK)
        pairs = [{"text": body["query"], "text_pair": text} for text in body["texts"]]
        expected = [by_label(found)["relevant"] for found in answered(send, "/models/two", pairs)]
        message = wrong(send, "/models/nameless", body)

    assert "two" == response.headers["x-model"]
    assert {item["index"]: pytest.approx(item["score"], abs=1e-6) for item in response.json()} == dict(enumerate(expected))
    assert "(set `id2label` in the checkpoint's config.json, and export it again), but its labels are `LABEL_0`" in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": "good"}, "`texts` is missing"),
        ({"texts": ["good"]}, "`query` is missing"),
        ({"query": "good", "texts": "good"}, "`texts` is wrong"),
        ({"query": "good", "texts": ["good", None]}, "`texts[1]` is wrong"),
        (
            {"query": "good", "texts": ["good", LONG], "truncate": False},
            "texts: the query and `texts[1]` have 61 tokens together, and the model takes 29",
        ),
    ],
)
def test_a_wrong_query_is_named(api: Send, body: Any, message: str) -> None:
    """What is missing or wrong is named by its key."""
    assert wrong(api, RERANK, body).startswith(message)


# /zero-shot


def test_labels_share_one_or_stand_alone(api: Send) -> None:
    """Scores add up to 1, or each label is scored by itself; one label always is."""
    shared = answered(api, ZERO_SHOT, "a good film", **LABELS)
    assert pytest.approx(1, abs=1e-6) == sum(item["score"] for item in shared)
    assert sorted(LABELS["candidate_labels"]) == sorted(item["label"] for item in shared)
    alone = answered(api, ZERO_SHOT, "a good film", **LABELS, multi_label=True)
    for label, score in by_label(alone).items():
        assert pytest.approx(score, abs=1e-6) == by_label(answered(api, ZERO_SHOT, "a good film", candidate_labels=[label]))[label]
    assert all(a["score"] >= b["score"] for found in (shared, alone) for a, b in pairwise(found))


def test_a_label_is_a_hypothesis_of_the_pair(api: Send) -> None:
    """A label's score is what /classify says of the pair of text and hypothesis."""
    pair = {"text": "a good film", "text_pair": "the film was bad !"}
    [found] = answered(api, "/models/nli", pair, function_to_apply="none")
    logits = by_label(found)
    expected = 1 / (1 + np.exp(logits["contradiction"] - logits["entailment"]))
    [item] = answered(api, ZERO_SHOT, "a good film", candidate_labels="bad", hypothesis_template="the film was {} !")
    assert pytest.approx(expected, abs=1e-6) == item["score"]


def test_labels_may_be_a_text_with_commas(api: Send) -> None:
    """Labels of a text are split at commas and stripped, as by the pipeline; those of a list may have commas."""
    assert answered(api, ZERO_SHOT, "x", candidate_labels=["good", "bad"]) == answered(
        api, ZERO_SHOT, "x", candidate_labels=" good,bad ,, "
    )
    assert ["good, bad"] == [item["label"] for item in answered(api, ZERO_SHOT, "x", candidate_labels=["good, bad"])]


def test_a_list_gives_a_list_of_each(api: Send) -> None:
    """A list gives, in order, what each text gets alone; so does a list of one, and one of none."""
    each = [answered(api, ZERO_SHOT, text, **LABELS) for text in ("a good film", "")]
    assert_same(each, answered(api, ZERO_SHOT, ["a good film", ""], **LABELS))
    assert_same(each[:1], answered(api, ZERO_SHOT, ["a good film"], **LABELS))
    assert [] == answered(api, ZERO_SHOT, [], **LABELS)


@pytest.mark.parametrize(
    ("agent", "lists"),
    [
        ("unknown/None; hf_hub/1.1.7; python/3.11", True),
        ("unknown/None; hf_hub/0.36.0; python/3.11", True),
        ("unknown/None; hf_hub/1.2.0; python/3.11", False),
        ("unknown/None; hf_hub/1.10.0", False),
        ("unknown/None; hf_hub/2.4.0", False),
        ("unknown/None; hf_hub/1.2.0.dev0", False),
        ("curl/8.5.0", False),
        ("hf_hub/x", False),
        ("", False),
    ],
)
def test_old_clients_get_the_old_shape(api: Send, agent: str, lists: bool) -> None:
    """huggingface_hub before 1.2 gets an object of lists, everyone else a list of objects; so for each text of a list."""
    found = result(api, ZERO_SHOT, BODIES[ZERO_SHOT], headers={"user-agent": agent})
    expected: Any = answered(api, ZERO_SHOT, "a good film", **LABELS)
    if lists:
        expected = {"sequence": "a good film", "labels": list(by_label(expected)), "scores": list(by_label(expected).values())}
    assert_same(expected, found)
    assert_same([expected], result(api, "/models/nli", BODIES[ZERO_SHOT] | {"inputs": ["a good film"]}, headers={"user-agent": agent}))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "`parameters.candidate_labels` is missing"),
        ({"candidate_labels": []}, "must have at least one label, and no empty label; it is a list of 0."),
        ({"candidate_labels": " , "}, "must have at least one label"),
        ({"candidate_labels": ["good", " "]}, "must have at least one label, and no empty label; it is a list of 2."),
        ({"candidate_labels": ["good", "bad", "good"]}, "must be distinct, but `good` is there twice"),
        ({"candidate_labels": ["good", 5]}, "`parameters.candidate_labels[1]` is wrong"),
        (
            {**LABELS, "hypothesis_template": "It is."},
            "`parameters.hypothesis_template` is wrong: must have `{}` exactly once, where the label goes",
        ),
        ({**LABELS, "hypothesis_template": "{} {}"}, "must have `{}` exactly once"),
        ({**LABELS, "hypothesis_template": "{0.__class__}"}, "must have `{}` exactly once"),
        ({**LABELS, "multilabel": True}, "`parameters` has no `multilabel`; did you mean `multi_label`?"),
        ({"candidate_labels": [" ".join(["good"] * 29)]}, "inputs: the hypothesis of the label `good good"),
    ],
)
def test_wrong_labels_are_refused(api: Send, parameters: dict[str, Any], message: str) -> None:
    """No labels, empty ones, one twice, a template without a place for them: each is said."""
    assert message in refused(api, ZERO_SHOT, "a good film", **parameters)


def test_no_parameters_are_no_labels(api: Send) -> None:
    """A body without `parameters` is told of the labels that it lacks."""
    assert "`parameters.candidate_labels` is missing" in wrong(api, ZERO_SHOT, {"inputs": "good"})


# Offsets


@pytest.mark.parametrize("path", ["/ner", "/answer"])
def test_offsets_come_in_the_callers_unit(tmp_path: Path, path: str) -> None:
    """`offset_unit` counts UTF-16 units or bytes; what lies between them is the same text."""
    text = "a \U0001f600 caf\u00e9 日本 was good\U0001f600 film"
    task, inputs = {"/ner": ("token-classification", text), "/answer": ("question-answering", {"question": "good?", "context": text})}[path]
    tiny.bundle(tmp_path, task=task)
    parameters = {"ignore_labels": []} if path == "/ner" else {"top_k": 20}
    units = {"code_points": ("utf-32-le", 4), "utf16": ("utf-16-le", 2), "utf8": ("utf-8", 1)}
    parts = {}
    for unit, (codec, size) in units.items():
        body = json.dumps({"inputs": inputs, "parameters": parameters | {"offset_unit": unit.upper()}}).encode()
        found = call(tmp_path, "POST", path, content=body).json()
        encoded = text.encode(codec)
        parts[unit] = [encoded[item["start"] * size : item["end"] * size].decode(codec) for item in found]
        assert [item["word"] if path == "/ner" else item["answer"] for item in found] == parts[unit]
    assert parts["code_points"] == parts["utf16"] == parts["utf8"]
    assert any("\U0001f600" in part or "日" in part for part in parts["utf8"])
