"""huggingface_hub: every method for encoder tasks, with the version that LangChain installs.

Version 2 is tested in tests/serving/test_client.py.
"""

import asyncio
import inspect
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

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
    """Returns the names of the fields that are not None in a parsed response, or the type names of its values."""
    if isinstance(value, list):
        return [shape(item) for item in value]
    return sorted(name for name, field in vars(value).items() if field is not None) if hasattr(value, "__dict__") else type(value).__name__


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
    ("path", "method", "arguments", "options", "expected"), [(*call, of) for call, of in zip(CALLS, SHAPES, strict=True)]
)
def test_responses_are_parsed(url: str, path: str, method: str, arguments: tuple[Any, ...], options: dict[str, Any], expected: Any) -> None:
    """The synchronous and the asynchronous client fill every field of their classes."""
    answer = getattr(InferenceClient(model=url + path), method)(*arguments, **options)

    async def ask() -> Any:
        answer = getattr(AsyncInferenceClient(model=url + path), method)(*arguments, **options)
        return await answer if inspect.isawaitable(answer) else answer

    assert shape(answer) == expected
    assert shape(asyncio.run(ask())) == expected


def test_an_error_has_the_message_of_the_service(url: str) -> None:
    """The message includes the request id, so that the operator can find the request in the log."""
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as caught:
        InferenceClient(model=f"{url}/fill-mask").fill_mask("no mask")

    assert "has no mask" in str(caught.value)
    assert "Request ID" in str(caught.value)
