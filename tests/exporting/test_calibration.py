"""Calibration: which texts are read, how each task's graph is fed with them, and what is seen of its tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export import calibration
from export.errors import CheckpointError
from export.graph import rewrite
from staged import Staged, run

pytestmark = pytest.mark.torch
pytest_plugins = ("staging",)

EMPTY = "\u200b"  # a text of which the tokenizer leaves nothing
TEXTS = ["a good film", "the book was very dull !", EMPTY, "long " * 300]


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
        pytest.param(b"text\n  \n" * 15, "holds 15 texts, and calibration needs 16 at least, one a line", id="too few"),
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
    """The least that is allowed is allowed."""
    (tmp_path / "texts.txt").write_text("text\n" * 16, encoding="utf-8")

    assert ["text"] * 16 == calibration.read_texts(tmp_path / "texts.txt")


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


# ---- what is seen


def test_bounds_are_those_of_all_rows(all_staged: dict[str, Staged], tmp_path: Path) -> None:
    """Highest and lowest value of each channel are numpy's over every row of every text; the peak is the larger of the two."""
    staged = all_staged["text-classification"]
    model = rewrite.load(staged.packed)
    names = [node.outputs[0].name for node in model.graph if node.op_type in ("Gelu", "LayerNormalization")]
    path = tmp_path / "more.onnx"
    rewrite.save(model, path, outputs=names)
    feeds = staged.feeds(TEXTS)
    seen = calibration.observe(path, names, feeds)
    runs = [run(path, feed)[1:] for feed in feeds]

    assert names == list(seen)
    for place, name in enumerate(names):
        rows = np.concatenate([values[place].reshape(-1, values[place].shape[-1]) for values in runs])
        np.testing.assert_array_equal(rows.max(axis=0), seen[name].high)
        np.testing.assert_array_equal(rows.min(axis=0), seen[name].low)
        np.testing.assert_array_equal(np.abs(rows).max(axis=0), seen[name].peak)


def test_the_sample_has_some_rows_of_each_text(all_staged: dict[str, Staged], tmp_path: Path) -> None:
    """A long text gives a handful of its rows, first and last among them; a short one all of its rows; twice the same."""
    staged = all_staged["token-classification"]
    model = rewrite.load(staged.packed)
    name = next(node.outputs[0].name for node in model.graph if node.op_type == "Gelu")
    path = tmp_path / "more.onnx"
    rewrite.save(model, path, outputs=[name])
    long, short = staged.feeds([TEXTS[3]])[0], staged.feeds([TEXTS[0]])[0]
    whole = run(path, long)[1][0]
    sample = calibration.observe(path, [name], [long])[name].rows

    assert 12 <= len(sample) <= calibration.ROWS_PER_TEXT
    assert [] == [row for row in sample.tolist() if row not in whole.tolist()]
    np.testing.assert_array_equal(whole[[0, -1]], sample[[0, -1]])
    np.testing.assert_array_equal(run(path, short)[1][0], calibration.observe(path, [name], [short])[name].rows)
    np.testing.assert_array_equal(sample, calibration.observe(path, [name], [long])[name].rows)


def test_the_error_is_that_of_the_worst_output() -> None:
    """The root mean square difference over what the expected output varies by."""
    expected = [np.float32([1, -1, 1, -1]), np.float32([10, -10, 10, -10])]
    actual = [expected[0] + np.float32(0.5), expected[1] + np.float32(1)]

    assert pytest.approx(0.5) == calibration.relative_error(expected, actual)
    assert 0 == calibration.relative_error(expected, expected)


def test_outputs_are_those_of_all_texts(all_staged: dict[str, Staged]) -> None:
    """Each output is one flat array over all feeds, in their order."""
    staged = all_staged["question-answering"]
    feeds = staged.feeds(TEXTS)
    runs = [run(staged.packed, feed) for feed in feeds]

    for place, value in enumerate(calibration.outputs(staged.packed, feeds)):
        np.testing.assert_array_equal(np.concatenate([outputs[place].ravel() for outputs in runs]), value)
