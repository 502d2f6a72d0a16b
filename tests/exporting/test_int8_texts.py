"""The texts for int8: how files are read, and the inputs that each task's graph gets from them."""

import csv
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from bertserve.export import int8_texts
from bertserve.export.errors import UsageError
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.bundle.files import load_bundle
from support import json_lines, tiny
from support.checkpoints import numbered_texts
from support.staged import Staged

pytestmark = pytest.mark.torch

EMPTY = "\u200b"  # the tokenizer removes this character
TEXTS = ["a good film", "the book was very dull !", EMPTY, "long " * 300]


def test_each_nonblank_line_of_a_file_is_a_text(tmp_path: Path) -> None:
    lines = [f"täxt {i} " for i in range(1005)]
    (tmp_path / "texts.txt").write_text("\n \n".join(lines), encoding="utf-8")

    assert int8_texts.read_texts(tmp_path / "texts.txt") == lines


def test_each_split_of_alternating_classes_has_all_classes(tmp_path: Path) -> None:
    """In NLI data sets, each premise has one line for each label."""
    (tmp_path / "texts.txt").write_bytes(b"".join(b"class%d text %d\n" % (i % 3, i) for i in range(600)))
    split = int8_texts.read_int8_texts(tmp_path / "texts.txt")

    for texts in split.values():
        assert {line.split()[0] for line in texts.lines} == {"class0", "class1", "class2"}


PAIRS = [
    {"text": "A man eats.", "text_pair": "Someone eats.", "label": "entailment"},
    {"premise": "A man eats.", "hypothesis": "Nobody eats."},
    {"inputs": {"text": "A man eats.", "text_pair": "It rains."}},
    {"question": "Who eats?", "context": "A man eats."},
    {"text": "alone"},
]


def test_json_lines_hold_pairs_and_texts(tmp_path: Path) -> None:
    """The fields have the names of a request or of the GLUE data sets."""
    path = json_lines(tmp_path / "pairs.jsonl", *PAIRS, *({"text": "a", "text_pair": str(i)} for i in range(16)))
    expected = [
        ("A man eats.", "Someone eats."),
        ("A man eats.", "Nobody eats."),
        ("A man eats.", "It rains."),
        ("Who eats?", "A man eats."),
        "alone",
    ]

    assert int8_texts.read_texts(path)[:5] == expected


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".TSV", "\t")])
def test_columns_of_a_table_hold_texts_and_pairs(tmp_path: Path, suffix: str, delimiter: str) -> None:
    """Cells can have delimiters, quotes and line ends. An empty second cell makes a single text; other columns are ignored."""
    cells = [["id", "text", "text_pair"], ["1", 'He said, "a\tb",\nand left.', ""], ["2", "A man eats.", "It rains."]]
    path = tmp_path / f"texts{suffix}"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([*cells, *([str(i), f"text {i}", ""] for i in range(14))])

    assert int8_texts.read_texts(path)[:2] == ['He said, "a\tb",\nand left.', ("A man eats.", "It rains.")]


def test_a_line_says_that_a_large_file_is_not_used_completely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"text {i}\n" for i in range(3000)))

    assert sizes(int8_texts.read_int8_texts(path)) == (667, 83, 250)
    assert "1000 of the 3000 texts" in capsys.readouterr().err


def test_pairs_are_refused_for_a_task_of_single_texts(tmp_path: Path) -> None:
    spec = load_bundle(tiny.bundle(tmp_path)).manifest.tokenizer
    with pytest.raises(UsageError, match=r"2 pairs, .* fill-mask "):
        EXPORT_TASKS["fill-mask"].refuse_pairs((SplitTexts(pairs=(("a", "b"), ("c", "d"))), SplitTexts(("e",))), spec)
    EXPORT_TASKS["text-classification"].refuse_pairs((SplitTexts(pairs=(("a", "b"),)),), spec)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("texts.txt", None, os.strerror(errno.ENOENT)),
        ("texts.txt", b"caf\xe9\n" * 20, "utf-8"),
        ("texts.txt", b"text\n" * 100, " 1 .* calibration .* 16, "),
        ("texts.txt", b"", " 0 .* calibration .* 16, "),
        *(
            ("texts.jsonl", b'{"text": "good"}\n\n' + line, "line 3")
            for line in (b"no JSON", b'{"label": 1}', b'{"text": 1}', b'{"question": "Who?", "choices": ["a", "b"]}', b'{"text": ""}')
        ),
        ("texts.csv", b"id;text\n1;good", "`id;text`.* separated by ','"),
        ("texts.csv", b"id,review\n1,good", "`review`.*`text`"),
        ("texts.csv", b"", "no header"),
        ("texts.csv", b"text,label\ngood, but long,1", "line 2: the row has 3 fields"),
        ("texts.csv", b"text,label\n,1", "line 2"),
        ("texts.csv", b'text\n"good', "line "),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(UsageError, match=reason) as caught:
        int8_texts.read_texts(path)
    assert f"`{path}`" in str(caught.value)


def sizes(split: int8_texts.Int8Texts) -> tuple[int, int, int]:
    """Returns the number of texts for calibration, for the gate and for validation."""
    return len(split["calibration"]), len(split["gate"]), len(split["validation"])


def test_a_duplicate_text_is_in_only_one_split(tmp_path: Path) -> None:
    """A copy with other white space is also a duplicate. Sixteen texts are enough for all splits."""
    content = numbered_texts(tmp_path / "texts.txt", range(16)).read_bytes()
    (tmp_path / "texts.txt").write_bytes(content * 2 + content.replace(b" ", b"  "))
    split = int8_texts.read_int8_texts(tmp_path / "texts.txt")

    assert sizes(split) == (11, 2, 3)
    assert len({line for texts in split.values() for line in texts.lines}) == 16


def test_a_validation_file_gives_all_validation_texts(tmp_path: Path) -> None:
    """The first file is split between calibration and the gate."""
    own = numbered_texts(tmp_path / "own.txt", range(40))
    split = int8_texts.read_int8_texts(own, numbered_texts(tmp_path / "validation.txt", range(41, 60)))

    assert sizes(split) == (34, 6, 19)
    assert {*split["calibration"].lines, *split["gate"].lines} == {f"text {i}" for i in range(40)}
    assert split["validation"].lines == tuple(f"text {i}" for i in range(41, 60))


def test_files_that_share_texts_are_an_error(tmp_path: Path) -> None:
    own, validation = numbered_texts(tmp_path / "own.txt", range(40)), numbered_texts(tmp_path / "validation.txt", range(37, 60))

    with pytest.raises(UsageError, match=r"own.txt` .*validation.txt` .* 3 texts"):
        int8_texts.read_int8_texts(own, validation)


def test_passages_join_neighboring_texts_of_one_split(all_staged: dict[str, Staged]) -> None:
    """Each passage is longer than a truncated text, fits the model, and contains no text of the other split."""
    staged = all_staged["text-classification"]
    split = int8_texts.read_int8_texts(int8_texts.BUILT_IN_TEXTS)
    calibration, validation = (split[name].with_passages(staged.tokenizer) for name in ("calibration", "validation"))
    room = staged.tokenizer.max_text_tokens(pair=False)

    for side, other in ((calibration, validation), (validation, calibration)):
        joined = [passage for passage in side.passages if passage not in side.lines]
        lengths = [len(entry.ids) for entry in staged.tokenizer.tokenize(joined)]
        assert len(side.passages) == 12
        assert 0 < len(joined) < 24
        assert all(int8_texts.MAX_LINE_TOKENS < length <= room for length in lengths)
        assert all(passage in " ".join(side.lines) for passage in side.passages)
        assert not any(line in passage for passage in joined for line in other.lines if len(line) > 40)


def test_a_text_is_fed_as_the_checkpoints_tokenizer_encodes_it(all_staged: dict[str, Staged]) -> None:
    """Each text is a batch of one without padding. A long text is truncated to `MAX_LINE_TOKENS`."""
    staged = all_staged["token-classification"]
    expected = [
        staged.loaded.hf_tokenizer(text, truncation=True, max_length=int8_texts.MAX_LINE_TOKENS + 2, return_tensors="np") for text in TEXTS
    ]
    feeds = staged.feeds(TEXTS)

    assert list(feeds[0]) == [spec.name for spec in staged.loaded.inputs]
    assert [len(feed["input_ids"]) for feed in feeds] == [1, 1, 1, 1]
    assert feeds[3]["input_ids"].shape[1] == 130
    for encoded, feed in zip(expected, feeds, strict=True):
        for name in feed:
            np.testing.assert_array_equal(encoded[name], feed[name])


def test_every_second_text_of_a_classifier_is_also_fed_as_a_pair(all_staged: dict[str, Staged]) -> None:
    feeds = all_staged["text-classification"].feeds(TEXTS)

    assert [feed["token_type_ids"].any() for feed in feeds] == [False] * 4 + [True] * 2


def test_the_context_of_a_question_is_the_next_text(all_staged: dict[str, Staged]) -> None:
    """The type ids are a pair's, the first text follows the last, and a long text leaves space for the other text."""
    staged = all_staged["question-answering"]
    texts = [TEXTS[0], TEXTS[1], TEXTS[3]]
    feeds = staged.feeds(texts)
    pair = staged.loaded.hf_tokenizer(texts[0], texts[1], return_tensors="np")
    room = staged.loaded.tokenizer.max_length - 3
    long, first = [staged.loaded.hf_tokenizer(text, add_special_tokens=False)["input_ids"] for text in (texts[2], texts[0])]

    for name in ("input_ids", "token_type_ids", "attention_mask"):
        np.testing.assert_array_equal(pair[name], feeds[0][name])
    assert feeds[0]["token_type_ids"][0].tolist() == [0] * 5 + [1] * 7
    assert feeds[2]["input_ids"][0].tolist() == [2, *long[: room // 4], 3, *first, 3]
    assert feeds[1]["input_ids"].shape[1] == staged.loaded.tokenizer.max_length


def test_a_short_text_also_has_a_mask(all_staged: dict[str, Staged]) -> None:
    """A text of one token or none also gives the projection an input."""
    for feed in all_staged["fill-mask"].feeds([EMPTY, "good"]):
        assert (feed["input_ids"].tolist(), feed["mask_index"].tolist()) == ([[2, 4, 3]], [1])
