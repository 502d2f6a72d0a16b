"""Multiple choice at /choose: scores and their order checked against plain formulas, long texts, limits, errors and tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from bertserve.service.tasks import multiple_choice
from bertserve.service.text.tokenizer import Tokenizer
from support import tiny
from support.app_client import LONG, Send, error_of, post, result_of
from support.task_runs import encode

CHOOSE = "/choose"
QUESTION: dict[str, Any] = {"question": "which one is good ?", "choices": ["a film", "the very dull book", "not the film"]}


def plain_logits(path: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Returns the graph's logit for each pair; every pair is encoded and run separately."""
    session = onnxruntime.InferenceSession(str(path / "model.cpu.fp32.onnx"))
    tokenizer, values_of_pairs = tiny.tokenizer(), []
    for pair in pairs:
        encoding = tokenizer.encode(*pair)
        feed = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
        (logits,) = session.run(None, {name: np.array([values]) for name, values in feed.items()})
        values_of_pairs.append(float(logits[0, 0]))
    return values_of_pairs


def rank(logits: list[float], choices: list[str]) -> list[dict[str, Any]]:
    powers = np.exp(np.array(logits) - max(logits))
    scores = powers / powers.sum()
    order = sorted(range(len(logits)), key=lambda i: (-scores[i], i))
    return [{"index": i, "score": pytest.approx(scores[i], abs=1e-5), "text": choices[i]} for i in order]


@pytest.mark.parametrize("more", [{}, {"context": "the book was dull"}, {"context": ""}, {"context": None}])
def test_choices_are_scored_as_pairs(api: Send, tmp_path: Path, more: dict[str, Any]) -> None:
    """A pair is the question and a choice, or the context and both. The softmax covers one question's choices; the best is first."""
    question, context = QUESTION["question"], more.get("context")
    pairs = [(context, f"{question} {choice}") if context else (question, choice) for choice in QUESTION["choices"]]
    expected = rank(plain_logits(tiny.bundle(tmp_path, task=multiple_choice.TASK), pairs), QUESTION["choices"])

    assert result_of(api, CHOOSE, QUESTION | more) == expected


def test_a_prompt_is_a_question(api: Send) -> None:
    choices = ["good film", "bad"]
    assert result_of(api, CHOOSE, {"question": "a very", "choices": choices}) == result_of(
        api, CHOOSE, {"prompt": "a very", "choices": choices}
    )


def test_tensors_accept_a_context(api: Send) -> None:
    names = {"question": [QUESTION["question"]], "context": ["the book was dull"], "choices": QUESTION["choices"]}
    tensors = [{"name": name, "shape": [len(data)], "datatype": "BYTES", "data": data} for name, data in names.items()]
    (scores,) = post(api, {"inputs": tensors, "outputs": [{"name": "score"}]}, path="/v2/models/choices/infer").json()["outputs"]
    expected = result_of(api, CHOOSE, QUESTION | {"context": "the book was dull"})

    assert scores["data"] == pytest.approx([item["score"] for item in sorted(expected, key=lambda item: item["index"])])
    pair_tensor = tensors[1] | {"data": ["a", "b"], "shape": [2]}
    message = error_of(post(api, {"inputs": [tensors[0], pair_tensor, tensors[2]]}, path="/v2/models/choices/infer"), 422, "invalid_value")
    assert "`context`" in message


def test_a_pair_is_truncated_as_in_transformers(tokenizer: Tokenizer) -> None:
    batch = encode(multiple_choice, multiple_choice.MultipleChoiceInput("good", ("bad", LONG), LONG), tokenizer)
    context, short, long = (tokens.ids for tokens in tokenizer.tokenize([LONG, "good bad", f"good {LONG}"]))

    assert [e.ids.tolist() for e in batch.encodings] == [[2, *context[:27], 3, *short, 3], [2, *context[:14], 3, *long[:15], 3]]
    assert batch.encodings[0].type_ids.tolist() == [0] * 29 + [1] * 3
    assert batch.truncated
    assert not encode(multiple_choice, multiple_choice.MultipleChoiceInput("good", ("bad", "film")), tokenizer).truncated
