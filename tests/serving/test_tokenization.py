"""Texts to encodings: templates, truncation and windows, compared with `tokenizers` itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import tiny
from bertserve.service.bundle import files
from bertserve.service.errors import BundleError
from bertserve.service.text.tokenizer import Tokenizer, _loaded, estimate_tokens
from bertserve.service.text.windows import truncate_longest_first, windows


@pytest.mark.parametrize(("text", "pair"), [("A good film.", None), ("", None), ("a film", "not good"), ("", "x"), ("x", "")])
def test_the_template_gives_what_the_post_processor_gives(tokenizer: Tokenizer, text: str, pair: str | None) -> None:
    expected = tiny.tokenizer().encode(text, pair)
    a, *b = tokenizer.tokenize([text] if pair is None else [text, pair])
    actual = tokenizer.assemble(a.ids, b[0].ids if b else None)

    assert expected.ids == actual.ids.tolist()
    assert expected.type_ids == actual.type_ids.tolist()


def test_settings_of_the_training_do_not_count(models: Path) -> None:
    loaded = files.load_bundle(models / "tiny")
    made = tiny.tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=16)
    made.save(str(loaded.tokenizer_path))

    assert 20 == len(Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer).tokenize(["good " * 20])[0])


def test_models_of_one_vocabulary_share_it(models: Path, tmp_path: Path) -> None:
    """Files of the same content are loaded once, as long as someone uses it; lengths stay each model's own."""
    loaded = files.load_bundle(models / "tiny")
    copy = tmp_path / "copy.json"
    copy.write_bytes(loaded.tokenizer_path.read_bytes())
    other = tmp_path / "other.json"
    tiny.tokenizer().save(str(other), pretty=False)
    before = len(_loaded)

    one = Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer)
    two = Tokenizer(copy, loaded.manifest.tokenizer.model_copy(update={"max_length": 9}))
    three = Tokenizer(other, loaded.manifest.tokenizer)
    assert one._tokenizer is two._tokenizer
    assert one._tokenizer is not three._tokenizer
    assert (32, 9) == (one.max_length, two.max_length)
    del one, two, three
    assert before == len(_loaded)


def test_room_is_what_the_special_tokens_leave(tokenizer: Tokenizer) -> None:
    assert (30, 29) == (tokenizer.room(pair=False), tokenizer.room(pair=True))


def test_a_broken_file_is_named(models: Path) -> None:
    loaded = files.load_bundle(models / "tiny")
    loaded.tokenizer_path.write_text("{}")

    with pytest.raises(BundleError, match=r"tokenizer\.json`"):
        Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # the library panics while it reads the file
        {
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
            "pre_tokenizer": {"type": "FixedLength", "length": 0},
        },  # or at the first text
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},  # a question mark has no token
    ],
)
def test_a_file_that_the_library_fails_on_is_named(models: Path, changes: dict[str, Any]) -> None:
    """A panic of the library is an error of the bundle too, so a reload of it leaves all other models as they are."""
    loaded = files.load_bundle(models / "tiny")
    content = json.loads(loaded.tokenizer_path.read_bytes())
    loaded.tokenizer_path.write_text(json.dumps(content | {"added_tokens": [], "post_processor": None} | changes))

    with pytest.raises(BundleError, match=r"tokenizer\.json`"):
        Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 40))
def test_longest_first_is_that_of_tokenizers(a: int, b: int, room: int) -> None:
    """The arithmetic keeps what `tokenizers`' own longest_first truncation keeps."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(room, strategy="longest_first")
    ids = made.encode("a " * a, "b " * b).ids

    assert (ids.count(0), ids.count(1)) == truncate_longest_first(a, b, room)


@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_windows_cover_every_token_and_overlap_by_the_stride(count: int, room: int, data: st.DataObject) -> None:
    """Windows are full but the last, share `stride` tokens with their neighbor, and end with the last token."""
    stride = data.draw(st.integers(0, room - 1))
    found = windows(count, room, stride)

    assert list(range(count)) == sorted({i for window in found for i in window})
    assert all(len(window) == room for window in found[:-1])
    assert all(left.stop - right.start == stride for left, right in itertools.pairwise(found))
    assert all(window.stop < count for window in found[:-1])


@given(st.integers(1, 200), st.integers(3, 30), st.data())
def test_windows_are_those_of_tokenizers(count: int, room: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(0, room - 1))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(200)}, unk_token="0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(room, stride=stride)
    first = made.encode(" ".join(str(i) for i in range(count)))

    assert [first.ids, *(more.ids for more in first.overflowing)] == [list(window) for window in windows(count, room, stride)]


@pytest.mark.parametrize(("text", "tokens"), [("", 1), ("a good film", 3), ("很好看的电影", 5)])
def test_the_estimate_is_cheap_and_near(text: str, tokens: int) -> None:
    assert tokens == estimate_tokens(text)
