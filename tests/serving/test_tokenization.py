"""Encodings of texts: templates, truncation and windows, compared with the library `tokenizers`; and models without special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.bundle import files
from bertserve.service.bundle.manifest import TextPart
from bertserve.service.errors import EngineError, StartError
from bertserve.service.text.tokenizer import INLINE_CHARS, Tokenizer
from bertserve.service.text.windows import kept_of_pair, windows
from support import raises_exactly, tiny
from support.app_client import call, error_of


@pytest.mark.parametrize(("text", "pair"), [("A good film.", None), ("", None), ("a film", "not good"), ("", "x"), ("x", "")])
def test_the_template_gives_the_same_ids_as_the_post_processor(tokenizer: Tokenizer, text: str, pair: str | None) -> None:
    expected = tiny.tokenizer().encode(text, pair)
    a, *b = tokenizer.tokenize([text] if pair is None else [text, pair])
    actual = tokenizer.assemble(a.ids, b[0].ids if b else None)

    assert actual.ids.tolist() == expected.ids
    assert actual.type_ids.tolist() == expected.type_ids


def test_a_template_can_have_the_second_text_first(models: Path) -> None:
    """Positions count the texts, not the template."""
    bundle = files.load_bundle(models / "tiny")
    spec, other = bundle.manifest.tokenizer, {"a": "b", "b": "a"}
    pair = tuple(piece.model_copy(update={"text": other[piece.text]}) if isinstance(piece, TextPart) else piece for piece in spec.pair)
    swap = spec.model_copy(update={"pair": pair})
    tokenizer = Tokenizer(bundle.tokenizer_path, swap)

    encoding = tokenizer.assemble([7], [8, 9])
    assert (encoding.ids.tolist(), encoding.type_ids.tolist()) == ([2, 8, 9, 3, 7, 3], [0, 0, 0, 0, 1, 1])
    assert (encoding.start, list(encoding.starts)) == (1, [4, 1])


def test_truncation_and_padding_of_the_tokenizer_file_are_ignored(models: Path) -> None:
    bundle = files.load_bundle(models / "tiny")
    file_tokenizer = tiny.tokenizer()
    file_tokenizer.enable_truncation(4)
    file_tokenizer.enable_padding(length=16)
    file_tokenizer.save(str(bundle.tokenizer_path))

    assert len(Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer).tokenize(["good " * 20])[0]) == 20


@pytest.mark.parametrize(
    "changes",
    [
        {},  # not a tokenizer
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # the library panics while it reads the file
        {
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
            "pre_tokenizer": {"type": "FixedLength", "length": 0},
        },  # the library panics at the first text
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},  # a question mark has no token
    ],
)
def test_a_broken_tokenizer_file_is_named(models: Path, changes: dict[str, Any]) -> None:
    """A panic of the library is also a `StartError`, so a failed reload does not affect other models."""
    bundle = files.load_bundle(models / "tiny")
    content = json.loads(bundle.tokenizer_path.read_bytes())
    broken = content | {"added_tokens": [], "post_processor": None} | changes if changes else {}
    bundle.tokenizer_path.write_text(json.dumps(broken))

    with raises_exactly(StartError, match=r"tokenizer\.json`"):
        Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)


@pytest.mark.parametrize("chars", [1, INLINE_CHARS + 1])
def test_a_failure_of_the_library_reaches_the_caller(tokenizer: Tokenizer, chars: int) -> None:
    """It cannot encode a lone surrogate, which no request has."""
    with pytest.raises(EngineError):
        tokenizer.tokenize(["\ud800" * chars])


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 40))
def test_longest_first_matches_tokenizers(a: int, b: int, room: int) -> None:
    """`kept_of_pair` keeps as many tokens of each text as the library's truncation."""
    file_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    file_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file_tokenizer.enable_truncation(room, strategy="longest_first")
    ids = file_tokenizer.encode("a " * a, "b " * b).ids

    assert tuple(map(len, kept_of_pair(a, b, room, "right"))) == (ids.count(0), ids.count(1))


@given(st.integers(1, 200), st.integers(3, 30), st.data())
def test_windows_match_tokenizers(count: int, room: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(0, room - 1))
    file_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(200)}, unk_token="0"))
    file_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    file_tokenizer.enable_truncation(room, stride=stride)
    first = file_tokenizer.encode(" ".join(str(i) for i in range(count)))

    assert [list(window) for window in windows(count, room, stride)] == [first.ids, *(more.ids for more in first.overflowing)]


# tokenizers that add no special tokens, as GPT's
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
    assert "is empty" in error_of(call(bare(tmp_path, task), "POST", path, json={"inputs": inputs}), 422, "invalid_value")


def test_the_index_of_a_token_is_its_place_in_the_input(tmp_path: Path) -> None:
    body = {"inputs": "good film", "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    tokens = call(bare(tmp_path, "token-classification"), "POST", "/ner", json=body).json()
    assert [token["index"] for token in tokens] == [0, 1]


def test_a_model_without_cls_finds_answers(tmp_path: Path) -> None:
    """The scores of all answers sum to at most 1, because only tokens of the passage are candidates."""
    answers = call(bare(tmp_path, "question-answering"), "POST", "/answer", json={"inputs": QUESTION, "parameters": {"top_k": 100}}).json()

    assert {answer["answer"] for answer in answers} == {"a", "good", "film", "a good", "good film", "a good film"}
    assert 0 < sum(answer["score"] for answer in answers) <= 1


def test_handle_impossible_answer_needs_a_model_with_cls(tmp_path: Path) -> None:
    body = {"inputs": QUESTION, "parameters": {"handle_impossible_answer": True}}
    assert "[CLS]" in error_of(call(bare(tmp_path, "question-answering"), "POST", "/answer", json=body), 422, "invalid_value")
