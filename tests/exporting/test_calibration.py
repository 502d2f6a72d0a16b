"""Calibration: which texts are read, and how each task's graph is fed with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export import calibration
from export.errors import CheckpointError
from service.bundle.files import TOKENIZER_FILE, digest
from service.text.tokenizer import Tokenizer
from staged import Staged

pytestmark = pytest.mark.torch
pytest_plugins = ("staging",)

EMPTY = "\u200b"  # a text of which the tokenizer leaves nothing
TEXTS = ["a good film", "the book was very dull !", EMPTY, "long " * 300]


def numbered(count: int) -> bytes:
    """Returns a file of so many short texts."""
    return b"".join(b"text %d\n" % i for i in range(count))


# ---- texts


def test_the_built_in_texts_are_700_distinct_ones() -> None:
    """All lines are texts, and none stands there twice."""
    texts = calibration.read_texts(calibration.BUILT_IN)

    assert (700, 700) == (len(texts), len(set(texts)))


def test_a_file_has_a_text_on_each_line(tmp_path: Path) -> None:
    """Empty lines are no texts; spaces and unicode stay; of very many the first thousand are read."""
    lines = [f"täxt {i} " for i in range(calibration.MAX_TEXTS + 5)]
    (tmp_path / "texts.txt").write_text("\n \n".join(lines), encoding="utf-8")

    assert lines[: calibration.MAX_TEXTS] == calibration.read_texts(tmp_path / "texts.txt")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(None, "cannot be read: .*No such file", id="no file"),
        pytest.param(b"caf\xe9\n" * 20, "cannot be read: .*utf-8", id="not UTF-8"),
        pytest.param(numbered(15), "holds 15 different texts, and calibration needs 16 at least, one a line", id="too few"),
        pytest.param(b"text\n" * 100, "holds 1 different texts, and calibration needs 16 at least", id="always the same"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """The error names the file and what is wrong with it."""
    path = tmp_path / "texts.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CheckpointError, match=reason) as caught:
        calibration.read_texts(path)
    assert f"`{path}`" in str(caught.value)


def test_sixteen_texts_are_enough(tmp_path: Path) -> None:
    """The least that is allowed is allowed, and both sides of a split have some."""
    (tmp_path / "texts.txt").write_bytes(numbered(16))
    split = calibration.read_split(tmp_path / "texts.txt")

    assert 16 == len(calibration.read_texts(tmp_path / "texts.txt"))
    assert (11, ("text 2", "text 5", "text 8", "text 11", "text 14")) == (len(split.calibration), split.validation.lines)


# ---- two sides


def test_every_third_text_is_held_out() -> None:
    """The same ones every time, from the whole file, and none on both sides."""
    texts = calibration.read_texts(calibration.BUILT_IN)
    split = calibration.read_split(calibration.BUILT_IN)

    assert (tuple(texts[2::3]), (467, 233)) == (split.validation.lines, (len(split.calibration), len(split.validation)))
    assert set(texts) == set(split.calibration.lines) | set(split.validation.lines)
    assert set() == set(split.calibration.lines) & set(split.validation.lines)


def test_a_text_that_stands_there_twice_is_on_one_side(tmp_path: Path) -> None:
    """What was calibrated on is judged on by no copy of it."""
    (tmp_path / "texts.txt").write_bytes(numbered(30) * 3)
    split = calibration.read_split(tmp_path / "texts.txt")

    assert (20, 10) == (len(split.calibration), len(split.validation))
    assert set() == set(split.calibration.lines) & set(split.validation.lines)


def test_with_texts_for_validation_all_others_are_calibrated_on(tmp_path: Path) -> None:
    """Nothing is held out; a text that stands in both files is for validation."""
    (tmp_path / "own.txt").write_bytes(numbered(40))
    (tmp_path / "validation.txt").write_bytes(numbered(20) + b"another\n")
    split = calibration.read_split(tmp_path / "own.txt", tmp_path / "validation.txt")

    assert tuple(f"text {i}" for i in range(20, 40)) == split.calibration.lines
    assert (*(f"text {i}" for i in range(20)), "another") == split.validation.lines


def test_files_with_the_same_texts_are_an_error(tmp_path: Path) -> None:
    """The message names both files, how many texts are left, and what to do."""
    for name in ("own.txt", "validation.txt"):
        (tmp_path / name).write_bytes(numbered(30))

    with pytest.raises(
        CheckpointError, match=r"all but 0 texts of `.*own.txt` stand in `.*validation.txt` too.* needs 16 others.*leave out"
    ):
        calibration.read_split(tmp_path / "own.txt", tmp_path / "validation.txt")


def test_too_few_texts_for_validation_are_an_error(tmp_path: Path) -> None:
    """The message says which file it is that has too few."""
    (tmp_path / "validation.txt").write_bytes(numbered(3))

    with pytest.raises(CheckpointError, match=r"validation.txt` holds 3 different texts, and validation needs 16 at least"):
        calibration.read_split(calibration.BUILT_IN, tmp_path / "validation.txt")


def test_of_very_many_texts_some_hundred_are_judged_on(tmp_path: Path) -> None:
    """With passages 350 at most, from the whole file."""
    (tmp_path / "validation.txt").write_bytes(numbered(1000))
    lines = calibration.read_split(calibration.BUILT_IN, tmp_path / "validation.txt").validation.lines

    assert (332, 332, "text 0", "text 996") == (len(lines), len(set(lines)), lines[0], lines[-1])


def test_passages_are_neighboring_texts_of_one_side(all_staged: dict[str, Staged]) -> None:
    """Each is longer than what a text is cut to and as long as the model takes at most, and no text of the other side is in it."""
    staged = all_staged["text-classification"]
    split = calibration.read_split(calibration.BUILT_IN).with_passages(staged.tokenizer)
    room = staged.tokenizer.room(pair=False)

    for side, other in ((split.calibration, split.validation), (split.validation, split.calibration)):
        joined = [passage for passage in side.passages if passage not in side.lines]
        lengths = [len(entry.ids) for entry in staged.tokenizer.tokenize(joined)]
        assert 12 == len(side.passages) > len(joined) / 2 > 0
        assert all(calibration.MAX_TOKENS < length <= room for length in lengths)
        assert all(passage in " ".join(side.lines) for passage in side.passages)
        assert not any(line in passage for passage in joined for line in other.lines if len(line) > 40)


def test_passages_of_a_usual_model_have_two_lengths(all_staged: dict[str, Staged]) -> None:
    """Twelve of up to 256 tokens and six of up to 512, where the model has so many positions."""
    staged = all_staged["text-classification"]
    path = staged.packed.with_name(TOKENIZER_FILE)
    tokenizer = Tokenizer(path, staged.loaded.tokenizer_spec(digest(path)).model_copy(update={"max_length": 512}))
    short = tuple(line for line in calibration.read_texts(calibration.BUILT_IN) if len(line) < calibration.MAX_TOKENS)
    passages = calibration.Texts(short).with_passages(tokenizer).passages
    lengths = [len(entry.ids) for entry in tokenizer.tokenize(passages)]

    assert (12, 6) == (sum(128 < length <= 256 for length in lengths), sum(256 < length <= 510 for length in lengths))


def test_few_short_texts_have_no_passages(all_staged: dict[str, Staged]) -> None:
    """What there is not enough of is not repeated."""
    assert () == calibration.Texts(("a good film", "a dull one")).with_passages(all_staged["fill-mask"].tokenizer).passages


# ---- feeds


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_a_text_is_fed_as_the_checkpoints_tokenizer_encodes_it(all_staged: dict[str, Staged], task: str) -> None:
    """Each text is a batch of one without padding, a long one cut to the most tokens that calibration takes."""
    staged = all_staged[task]
    expected = [
        staged.loaded.tokenizer(text, truncation=True, max_length=calibration.MAX_TOKENS + 2, return_tensors="np") for text in TEXTS
    ]
    feeds = staged.feeds(TEXTS)

    assert [spec.name for spec in staged.loaded.inputs] == list(feeds[0])
    assert [1, 1, 1, 1] == [len(feed["input_ids"]) for feed in feeds]
    assert 130 == feeds[3]["input_ids"].shape[1]
    for encoded, feed in zip(expected, feeds, strict=True):
        for name in feed:
            np.testing.assert_array_equal(encoded[name], feed[name])


def test_a_question_is_a_text_and_the_next_one(all_staged: dict[str, Staged]) -> None:
    """Segments are those of a pair, the last text is followed by the first, and a long one leaves room for the other."""
    staged = all_staged["question-answering"]
    texts = [TEXTS[0], TEXTS[1], TEXTS[3]]
    feeds = staged.feeds(texts)
    pair = staged.loaded.tokenizer(texts[0], texts[1], return_tensors="np")
    room = staged.loaded.max_length - 3
    long, first = [staged.loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (texts[2], texts[0])]

    for name in ("input_ids", "token_type_ids", "attention_mask"):
        np.testing.assert_array_equal(pair[name], feeds[0][name])
    assert [0] * 5 + [1] * 7 == feeds[0]["token_type_ids"][0].tolist()
    assert [2, *long[: room // 4], 3, *first, 3] == feeds[2]["input_ids"][0].tolist()
    assert staged.loaded.max_length == feeds[1]["input_ids"].shape[1]


def test_passages_come_after_the_texts_and_are_not_cut_so_early(all_staged: dict[str, Staged]) -> None:
    """A passage has the model's length; for questions it is the context of a text."""
    for task, expected in (("text-classification", [130, 160]), ("question-answering", [160, 160])):
        staged = all_staged[task]
        feeds = calibration.make_feeds([TEXTS[3]], staged.loaded, staged.tokenizer, passages=[TEXTS[3]])
        assert expected == [feed["input_ids"].shape[1] for feed in feeds]


def test_masks_are_one_token_in_eight(all_staged: dict[str, Staged]) -> None:
    """`mask_index` is where the mask stands in the flattened batch of one; which of the eight it is goes round."""
    staged = all_staged["fill-mask"]
    assert staged.loaded.mask is not None
    feeds = staged.feeds([TEXTS[3]] * 9)
    expected = [list(range(1 + i % 8, 129, 8)) for i in range(9)]

    assert expected == [feed["mask_index"].tolist() for feed in feeds]
    assert expected == [np.flatnonzero(feed["input_ids"][0] == staged.loaded.mask.id).tolist() for feed in feeds]
    assert [130] * 9 == [feed["input_ids"].shape[1] for feed in feeds]


@pytest.mark.parametrize("place", [0, 1, 2, 9])
def test_a_short_text_has_a_mask_too(all_staged: dict[str, Staged], place: int) -> None:
    """Also a text of one token, or of none, gives the projection something to project, wherever it stands."""
    staged = all_staged["fill-mask"]
    texts = [TEXTS[0]] * 10
    texts[place] = "good" if place == 1 else EMPTY
    feed = staged.feeds(texts)[place]

    assert ([[2, 4, 3]], [[1, 1, 1]], [1]) == (feed["input_ids"].tolist(), feed["attention_mask"].tolist(), feed["mask_index"].tolist())
