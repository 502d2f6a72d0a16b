"""Models whose tokenizers add no special tokens, as GPT's: empty texts, and question answering without a [CLS] token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from application import call, rejected
from bertserve.service.bundle.files import load_bundle
from bertserve.service.text.tokenizer import Tokenizer

BARE = {"single": [{"text": "a", "type_id": 0}], "pair": [{"text": "a", "type_id": 0}, {"text": "b", "type_id": 0}], "cls_index": None}
QUESTION = {"question": "good?", "context": "a good film"}


def bare(folder: Path, task: str) -> Path:
    """Writes a bundle whose templates have no special tokens, and returns the models folder."""
    return tiny.edit(tiny.bundle(folder / "models", task=task), lambda fields: fields["tokenizer"].update(BARE)).parent


@pytest.mark.parametrize(
    ("task", "path", "inputs"),
    [("text-classification", "/classify", ""), ("text-classification", "/classify", ["good", ""]), ("feature-extraction", "/embed", "")],
)
def test_an_empty_text_is_refused(tmp_path: Path, task: str, path: str, inputs: Any) -> None:
    assert "is empty" in rejected(call(bare(tmp_path, task), "POST", path, json={"inputs": inputs}), 422, "invalid_value")


def test_an_empty_text_has_no_entities(tmp_path: Path) -> None:
    assert [] == call(bare(tmp_path, "token-classification"), "POST", "/ner", json={"inputs": ""}).json()


def test_the_index_of_a_token_is_its_place_in_the_input(tmp_path: Path) -> None:
    body = {"inputs": "good film", "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    tokens = call(bare(tmp_path, "token-classification"), "POST", "/ner", json=body).json()
    assert [0, 1] == [token["index"] for token in tokens]


def test_an_encoding_has_only_the_tokens_of_the_text(tmp_path: Path) -> None:
    loaded = load_bundle(bare(tmp_path, "text-classification") / "tiny")
    tokenizer = Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer)
    encoding = tokenizer.assemble([7, 8], [9])

    assert (32, 32) == (tokenizer.room(pair=False), tokenizer.room(pair=True))
    assert ([7, 8, 9], 2) == (encoding.ids.tolist(), encoding.start)


def test_a_model_without_cls_finds_answers(tmp_path: Path) -> None:
    """The scores of all answers sum to at most 1, because only tokens of the passage are candidates."""
    answers = call(bare(tmp_path, "question-answering"), "POST", "/answer", json={"inputs": QUESTION, "parameters": {"top_k": 100}}).json()

    assert {"a", "good", "film", "a good", "good film", "a good film"} == {answer["answer"] for answer in answers}
    assert 0 < sum(answer["score"] for answer in answers) <= 1


def test_handle_impossible_answer_needs_a_model_with_cls(tmp_path: Path) -> None:
    body = {"inputs": QUESTION, "parameters": {"handle_impossible_answer": True}}
    assert "[CLS]" in rejected(call(bare(tmp_path, "question-answering"), "POST", "/answer", json=body), 422, "invalid_value")
