"""huggingface_hub: every method for the tasks of encoders, with the version that LangChain brings and one of before the classes changed.

Version 2 is tested in tests/serving/test_client.py.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

OLD = huggingface_hub.__version__.startswith("0.")
NAMES = ["a", "b"]
TEXT = "A warm, funny film."

CALLS = [
    ("/classify", "text_classification", (TEXT,), {}),
    ("/ner", "token_classification", ("Ada Lovelace lived in London.",), {}),
    ("/answer", "question_answering", (), {"question": "Who lived there?", "context": "Ada lived there."}),
    ("/fill-mask", "fill_mask", ("The king of [MASK] died.",), {}),
    ("/fill-mask", "fill_mask", ("The [MASK] of [MASK] died.",), {}),
    ("/embed", "feature_extraction", ("a good film",), {"normalize": True, "truncate": True, "truncation_direction": "left"}),
    ("/similarity", "sentence_similarity", ("a good film", ["a bad film", "a dull book"]), {}),
    ("/zero-shot", "zero_shot_classification", ("a good film", NAMES), {}),
    ("/zero-shot", "zero_shot_classification", ("a good film", NAMES), {"multi_label": True, "hypothesis_template": "it is {}"}),
]


def shape(value: Any) -> Any:
    """Returns the names of all fields that are not None, or the kinds of values, of what a client parsed."""
    if isinstance(value, list):
        return [shape(item) for item in value]
    return sorted(name for name, found in vars(value).items() if found is not None) if hasattr(value, "__dict__") else type(value).__name__


WORDS = [["score", "sequence", "token", "token_str"]] * 5
SHAPES = [
    [["label", "score"]] * 2,
    [["end", "entity_group", "score", "start", "word"]] * 2,
    ["answer", "end", "score", "start"],
    WORDS,
    [WORDS, WORDS],
    "ndarray",
    ["float"] * 2,
    [["label", "score"]] * 2,
    [["label", "score"]] * 2,
]


@pytest.mark.parametrize(
    ("path", "method", "arguments", "named", "expected"), [(*call, of) for call, of in zip(CALLS, SHAPES, strict=True)]
)
def test_the_answer_is_parsed(url: str, path: str, method: str, arguments: tuple[Any, ...], named: dict[str, Any], expected: Any) -> None:
    """Each field that the client's class has is filled, by the synchronous client and the asynchronous one."""
    found = getattr(InferenceClient(model=url + path), method)(*arguments, **named)

    async def ask() -> Any:
        asked = getattr(AsyncInferenceClient(model=url + path), method)(*arguments, **named)
        return await asked if inspect.isawaitable(asked) else asked

    assert expected == shape(found)
    assert expected == shape(asyncio.run(ask()))


def test_answers_of_one_text_are_as_many_as_asked_for(url: str) -> None:
    parameters = {} if OLD else {"top_k": 1}
    found = InferenceClient(model=f"{url}/classify").text_classification(TEXT, **parameters)

    assert ["positive", "negative"][: 2 if OLD else 1] == [element.label for element in found]


def test_the_message_of_an_error_is_shown(url: str) -> None:
    """With the request's id, so that the operator can find it in the log."""
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as caught:
        InferenceClient(model=f"{url}/fill-mask").fill_mask("no mask")

    assert "has no mask" in str(caught.value)
    assert "Request ID" in str(caught.value)


def test_the_base_url_of_several_models_needs_a_body_for_one_task(url: str) -> None:
    """As the page on clients says: a question with its passage is answered, and a text that several tasks take is refused with their paths."""
    client = InferenceClient(model=url)
    assert "London" in client.question_answering(question="Where did Ada live?", context="Ada Lovelace lived in London.").answer
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="fits several tasks, /classify, /ner"):
        client.text_classification(TEXT)


@pytest.mark.parametrize("path", ["/classify", "/models/sentiment"])
def test_health_and_info(url: str, path: str) -> None:
    """Below each base; from version 0.29 on the client asks only where it is told that the provider is hf-inference."""
    client = InferenceClient(model=url + path) if OLD else InferenceClient(model=url + path, provider="hf-inference")

    assert client.health_check() is True
    assert "sentiment" == client.get_endpoint_info()["name"]
