"""Nothing that a caller sends is silently ignored: what is not known is 422, and the message says what it should have been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tiny
from application import Send, post, rejected, started
from bertserve.service.tasks import (
    attention,
    classify,
    embed,
    fill_mask,
    multiple_choice,
    question_answering,
    rerank,
    similarity,
    token_classification,
    zero_shot,
)
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.wire.unknown_fields import HARMLESS, OPTIONS

CLASSIFY, NER, ANSWER, FILL, CHOOSE, EMBED, SIMILARITY, RERANK, ZERO, ATTENTION = (
    f"/{module.SPEC.path}"
    for module in (
        classify,
        token_classification,
        question_answering,
        fill_mask,
        multiple_choice,
        embed,
        similarity,
        rerank,
        zero_shot,
        attention,
    )
)
BODIES: dict[str, dict[str, Any]] = {
    CLASSIFY: {"inputs": "good"},
    NER: {"inputs": "good"},
    ANSWER: {"inputs": {"question": "good ?", "context": "a film"}},
    FILL: {"inputs": "a [MASK]"},
    CHOOSE: {"inputs": {"question": "good ?", "choices": ["a film", "a book"]}},
    EMBED: {"inputs": "good"},
    SIMILARITY: {"inputs": {"source_sentence": "good", "sentences": ["bad"]}},
    RERANK: {"query": "good", "texts": ["bad"]},
    ZERO: {"inputs": "good", "parameters": {"candidate_labels": ["film"]}},
    ATTENTION: {"inputs": "good"},
}


@pytest.fixture(name="api", scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    """Sends requests to a service that answers every task."""
    folder = tmp_path_factory.mktemp("models")
    tiny.bundle(folder, "nli", labels=("contradiction", "entailment"), attention_heads=(2,))
    tiny.bundle(folder, "ranker", labels=("score",), activation="none")
    for task in ("token-classification", "question-answering", "fill-mask", "multiple-choice", "feature-extraction"):
        tiny.bundle(folder, task, task=task)
    with started(folder) as send:
        yield send


def told(api: Send, path: str, body: Any) -> str:
    """Returns the message of a body that must be 422."""
    return rejected(post(api, body, path=path), 422, "invalid_value")


def test_every_task_is_tried() -> None:
    """The bodies below are of all endpoints."""
    assert {f"/{spec.path}" for spec in TASKS.values()} == set(BODIES)


@pytest.mark.parametrize(
    ("path", "key", "said"),
    [
        (CLASSIFY, "params", "unknown field `params`; did you mean `parameters`? Known fields are `inputs`, `parameters`, `model`."),
        (CLASSIFY, "top_k", "unknown field `top_k` next to `inputs`; put it into `parameters`."),
        (CLASSIFY, "top_n", "did you mean `top_k` in `parameters`?"),
        (CLASSIFY, "truncate", "did you mean `truncation` in `parameters`?"),
        (CLASSIFY, "models", "did you mean `model`?"),
        (CLASSIFY, "x", "unknown field `x`; known fields are"),
        (NER, "aggregation_strategy", "put it into `parameters`"),
        (ANSWER, "context", "unknown field `context`; known fields are"),
        (FILL, "Target", "did you mean `targets` in `parameters`?"),
        (CHOOSE, "choices", "unknown field `choices`; known fields are"),
        (CHOOSE, "truncate", "did you mean `truncation` in `parameters`?"),
        (EMBED, "normalise", "did you mean `normalize`?"),
        (EMBED, "input", "did you mean `inputs`?"),
        (SIMILARITY, "sentences", "unknown field `sentences`; known fields are"),
        (RERANK, "top_n", "unknown field `top_n`; known fields are"),
        (RERANK, "documents", "unknown field `documents`; known fields are"),
        (RERANK, "raw_score", "did you mean `raw_scores`?"),
        (ZERO, "candidate_labels", "unknown field `candidate_labels` next to `inputs`; put it into `parameters`."),
    ],
)
def test_an_unknown_key_of_a_body_is_an_error(api: Send, path: str, key: str, said: str) -> None:
    """The message names the nearest known key, or says where the key belongs."""
    assert said in told(api, path, BODIES[path] | {key: 1})


@pytest.mark.parametrize(
    ("path", "inputs", "said"),
    [
        (
            CLASSIFY,
            {"text": "good", "text_par": "bad"},
            "`inputs` has no `text_par`; did you mean `text_pair`? Known names are `text`, `text_pair`.",
        ),
        (CLASSIFY, ["good", {"text": "good", "pair": "bad"}], "`inputs[1]` has no `pair`; "),
        (ANSWER, {"question": "good ?", "contxt": "a film"}, "`inputs` has no `contxt`; did you mean `context`?"),
        (ANSWER, [{"question": "good ?", "context": "a film", "id": 1}], "`inputs[0]` has no `id`; known names are `question`, `context`."),
        (CHOOSE, {"question": "good ?", "choices": ["a", "b"], "contxt": "a"}, "`inputs` has no `contxt`; did you mean `context`?"),
        (CHOOSE, [{"question": "good ?", "choices": ["a", "b"], "label": 1}], "`inputs[0]` has no `label`; known names are `choices`,"),
        (
            SIMILARITY,
            {"source_sentence": "good", "sentences": [], "sentence": "a"},
            "`inputs` has no `sentence`; did you mean `sentences`?",
        ),
    ],
)
def test_an_unknown_key_of_an_input_is_an_error(api: Send, path: str, inputs: Any, said: str) -> None:
    """A pair of which the second text is misspelled is not scored as its first text alone."""
    assert said in told(api, path, {"inputs": inputs})


def test_what_ranking_has_at_the_top_is_not_within_parameters(api: Send) -> None:
    """Reranking has no `parameters`; an empty object, which huggingface_hub sends, is let pass."""
    assert 200 == post(api, BODIES[RERANK] | {"parameters": {}}, path=RERANK).status_code
    message = told(api, RERANK, BODIES[RERANK] | {"parameters": {"return_text": True}})
    assert "`parameters` has no `return_text`; put it next to `query`, `texts`." == message


@pytest.mark.parametrize("path", BODIES)
def test_harmless_keys_of_other_clients_are_let_pass(api: Send, path: str) -> None:
    """With them the answer is what it is without."""
    more = {"options": dict.fromkeys(OPTIONS, True), "use_cache": False, "wait_for_model": True, "user": "me"}
    more |= {"stream": False, "encoding_format": "float"}
    assert set(HARMLESS) == set(more)
    expected = post(api, BODIES[path], path=path)
    assert 200 == expected.status_code
    assert expected.json() == post(api, BODIES[path] | more, path=path).json()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stream": True}, "`stream` asks for a response format that this endpoint does not have; remove `stream`."),
        ({"encoding_format": "base64"}, "`encoding_format` asks for a response format"),
        ({"encoding_format": []}, "`encoding_format` asks for a response format"),
        ({"options": {"top_k": 2}}, "`options` has no `top_k`; put it into `parameters`."),
        ({"options": {"x": 2}}, "`options` has no `x`; known names are `use_cache`"),
        ({"options": True}, "`options` is wrong: must be an object"),
    ],
)
def test_what_would_change_the_answer_is_not_harmless(api: Send, more: dict[str, Any], said: str) -> None:
    """A harmless key whose value asks for another answer is an error, as is an option that is none."""
    assert said in told(api, CLASSIFY, BODIES[CLASSIFY] | more)


@pytest.mark.parametrize("path", [*BODIES, "/models/nli"])
def test_a_query_is_an_error(api: Send, path: str) -> None:
    """What stands in the address behind a question mark does nothing, so it is refused; a question mark alone is not."""
    body = BODIES.get(path, BODIES[CLASSIFY])
    named = rejected(post(api, body, path=f"{path}?model=nli"), 422, "invalid_value")
    other = rejected(post(api, body, path=f"{path}?{'x' * 9999}=1&b"), 422, "invalid_value")

    assert "the URL has the query parameter `model`, but this path takes none; set `model` in the body, or use the path" in named
    assert "; put it into the body." in other
    assert len(other) < 300
    assert 200 == post(api, body, path=f"{path}?").status_code


def test_a_question_may_stand_at_the_top(api: Send) -> None:
    """As huggingface_hub 0.25 sends it; what else stands there is checked as ever, and `inputs` beside it is no question of its own."""
    question = {"question": "good ?", "context": "a film"}

    assert post(api, BODIES[ANSWER], path=ANSWER).json() == post(api, question, path=ANSWER).json()
    assert "`parameters`" in told(api, ANSWER, question | {"top_k": 1})
    assert "`question`" in told(api, ANSWER, question | BODIES[ANSWER])
    assert "`question`" in told(api, ANSWER, {"question": "good ?"})
