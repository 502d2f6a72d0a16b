"""The texts that calibrate and validate int8: reads them from a file, and splits them.

The built-in texts (`int8_texts.txt`) were written for this project: reviews, encyclopedic sentences, passages, questions and
everyday messages. Texts of the model's domain and language are better: `bert-export --int8-texts FILE`.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bertserve.export.errors import UsageError, log
from bertserve.export.input_fields import INPUT_KEYS, naming_line, read_input
from bertserve.service.bundle.manifest import Int8Split, Manifest, TextDigests
from bertserve.service.errors import StartError
from bertserve.service.messages import plural, quote_names
from bertserve.service.scoring.rows import DELIMITERS, Row, read_delimited, read_json_lines
from bertserve.service.text.tokenizer import Tokenizer

MIN_FILE_TEXTS = 16  # distinct texts: 11 calibrate, 2 are for the gate, and 3 for validation
MAX_FILE_TEXTS = 1000  # maximum texts of a file, for all splits, because each text takes time
HASH_BYTES = 4  # length of a text's hash: 1,000 texts need 5 KB, and a set of 1,000 others has a match with a probability of 0.02 %
TextOrPair = str | tuple[str, str]
T = TypeVar("T")
BUILT_IN_TEXTS = Path(__file__).with_name("int8_texts.txt")
MAX_LINE_TOKENS = 128  # longer lines are cut; passages are longer
# Most lines are short, but errors can grow with the length. So neighboring lines are joined to passages: maximum tokens -> number.
PASSAGE_COUNTS = {256: 12, 512: 6}


def read_texts(path: Path, purpose: str = "calibration") -> list[TextOrPair]:
    """Returns the distinct texts of a file: one per line, or the texts and pairs of JSON Lines, CSV or TSV, by the end of its name."""
    suffix = path.suffix.lower()
    try:
        if delimiter := DELIMITERS.get(suffix.removeprefix(".")):
            columns, rows = read_delimited(path, delimiter)
            if INPUT_KEYS.isdisjoint(columns):
                names = quote_names(columns[:8])
                raise UsageError(f"`{path}` has {names}, separated by {delimiter!r}, but no column `text`, or `question` and `context`.")
            texts = [_read_row(path, row) for row in rows]
        elif suffix in (".jsonl", ".ndjson", ".json"):
            texts = [_read_row(path, row) for row in read_json_lines(path, ())]
        else:
            texts = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError, StartError) as error:
        raise UsageError(
            f"the {purpose} texts `{path}` cannot be read: {error}; give UTF-8 text with one text per line, JSON Lines, CSV or TSV."
        ) from error
    text_of: dict[str, TextOrPair] = {}
    for text in texts:
        text_of.setdefault(_normalized(text), text)
    distinct_texts = list(text_of.values())
    if len(distinct_texts) < MIN_FILE_TEXTS:
        raise UsageError(
            f"`{path}` has {plural(len(distinct_texts), 'different text')}, but {purpose} needs {MIN_FILE_TEXTS}, or better a few hundred."
        )
    return distinct_texts


def _read_row(path: Path, row: Row) -> TextOrPair:
    with naming_line(path, row.line):
        if row.error is not None:
            raise row.error
        value: Any = read_input({name: value for name, value in row.values.items() if value != ""})
        if isinstance(value, dict):
            fields = next((names for names in (("text",), ("text", "text_pair"), ("question", "context")) if value.keys() == {*names}), ())
            value = value["text"] if fields == ("text",) else tuple(value[name] for name in fields)
        parts = value if isinstance(value, tuple) else (value,)
        if not parts or not all(isinstance(part, str) and part.strip() for part in parts):
            raise ValueError("it has no text and no pair; give `text`, `text` and `text_pair`, or `question` and `context`.")
    return value


def sample(items: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` items, in order: one from each of `count` equal parts, at a fixed random position.

    Items at equal distances would all have the same class if classes alternate.
    """
    if len(items) <= count:
        return list(items)
    starts = np.arange(count + 1) * len(items) // count
    return [items[position] for position in np.random.default_rng(0).integers(starts[:-1], starts[1:])]


def shuffled(items: Sequence[T]) -> list[T]:
    """Returns the items with every twelve neighbors in a fixed random order, to break patterns such as one line per class."""
    rng = np.random.default_rng(0)
    return [items[start + i] for start in range(0, len(items), 12) for i in rng.permutation(min(12, len(items) - start))]


def decode_hashes(split: TextDigests) -> list[bytes]:
    """Returns the hashes in a manifest's entry, `HASH_BYTES` each, in the order of the texts."""
    digests = base64.b64decode(split.hashes)
    return [digests[start : start + HASH_BYTES] for start in range(0, len(digests), HASH_BYTES)]


def hash_text(text: TextOrPair) -> bytes:
    """Returns the short hash of a text or pair."""
    return hashlib.sha256(_normalized(text).encode()).digest()[:HASH_BYTES]


def _normalized(text: TextOrPair) -> str:
    """Returns a text, or both texts of a pair, with each run of white space replaced by one space."""
    return "\x00".join(" ".join(part.split()) for part in ((text,) if isinstance(text, str) else text))


@dataclass(frozen=True)
class SplitTexts:
    """The texts of one split.

    Attributes:
        lines: Single texts of the file, without duplicates.
        passages: Neighboring lines joined, each with more than `MAX_LINE_TOKENS` tokens.
        pairs: Pairs of the file, without duplicates; for question answering, a question and its context.
    """

    lines: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.lines) + len(self.passages) + len(self.pairs)

    @classmethod
    def of(cls, texts: Sequence[TextOrPair]) -> "SplitTexts":
        """Returns the texts of a file, without passages."""
        return cls(tuple(text for text in texts if isinstance(text, str)), pairs=tuple(text for text in texts if isinstance(text, tuple)))

    def digests(self) -> TextDigests:
        """Returns the manifest's entry for the texts of the file."""
        hashes = [*map(hash_text, self.lines), *map(hash_text, self.pairs)]
        return TextDigests(texts=len(hashes), hashes=base64.b64encode(b"".join(hashes)).decode())

    def with_passages(self, tokenizer: Tokenizer) -> "SplitTexts":
        """Returns the same texts with passages of the lengths in `PASSAGE_COUNTS`, as far as the lines and the model's length allow."""
        tokens = [len(entry.ids) for entry in tokenizer.tokenize(self.lines)]
        max_tokens = tokenizer.max_text_tokens(pair=False)
        lengths: dict[int, int] = {}  # for a model with few positions, several lengths are equal
        for length, count in PASSAGE_COUNTS.items():
            lengths[min(length, max_tokens)] = max(lengths.get(min(length, max_tokens), 0), count)
        passages = [passage for length, count in lengths.items() for passage in sample(self._joined(tokens, length), count)]
        return replace(self, passages=tuple(dict.fromkeys(passages)))

    def _joined(self, tokens: Sequence[int], length: int) -> list[str]:
        """Returns consecutive lines joined to at most `length` tokens, if they have more than `MAX_LINE_TOKENS`."""
        passages, start = [], 0
        while start < len(self.lines):
            end, total = start + 1, tokens[start]
            while end < len(self.lines) and total + tokens[end] <= length:
                total, end = total + tokens[end], end + 1
            if total > MAX_LINE_TOKENS:
                passages.append(" ".join(self.lines[start:end]))
            start = end
        return passages


# calibration: texts for the choice of scales, rounding and bias; gate: texts that decide which matrices stay in float, and whether int8
# exists at all; validation: texts of the validation report of int8. No text is in two splits.
Int8Texts = Mapping[Int8Split, SplitTexts]


def digest_texts(texts: Int8Texts) -> dict[Int8Split, TextDigests]:
    """Returns the manifest's entries for the texts of each split."""
    return {name: split.digests() for name, split in texts.items()}


def read_int8_texts(calibration: Path, validation: Path | None = None) -> Int8Texts:
    """Returns the texts of all splits, without passages. Without `validation`, the first file also gives the validation texts."""
    texts = read_texts(calibration)
    selection = sample(texts, MAX_FILE_TEXTS)
    if len(texts) > MAX_FILE_TEXTS:
        log(f"int8 uses {MAX_FILE_TEXTS} of the {len(texts)} texts of `{calibration}`.")
    if calibration != BUILT_IN_TEXTS:  # its lines have no pattern
        selection = shuffled(selection)
    held_out = selection[2::3]
    # a quarter is for the gate, but at least 8 texts, or half of them if there are fewer; the others are for validation
    count = max(len(held_out) // 4, min(8, len(held_out) // 2))
    positions = {i * len(held_out) // count for i in range(count)}
    gate = [held_out[i] for i in sorted(positions)]
    validation_texts = [text for i, text in enumerate(held_out) if i not in positions]
    if validation is not None:
        validation_texts = read_texts(validation, "validation")
        if shared := len({*map(_normalized, texts)} & {*map(_normalized, validation_texts)}):
            raise UsageError(
                f"`{calibration}` and `{validation}` share {shared} texts, but int8 must be validated on other texts than it is calibrated "
                "on; remove them from one of the files, or remove --int8-validation."
            )
    held_out_texts = {*gate, *validation_texts}
    calibration_texts = [text for text in selection if text not in held_out_texts]
    return {
        "calibration": SplitTexts.of(calibration_texts),
        "gate": SplitTexts.of(gate),
        "validation": sample_validation_texts(validation_texts),
    }


def sample_validation_texts(texts: Sequence[TextOrPair]) -> SplitTexts:
    """Returns the texts for a validation report: with passages at most 350, because more would take long and add little information."""
    return SplitTexts.of(sample(texts, 350 - sum(PASSAGE_COUNTS.values())))


def read_validation_texts(manifest: Manifest, validation: Path | None) -> SplitTexts:
    """Returns the texts to validate int8 again, without passages: the export's own if the file contains them all, otherwise others from it.

    Raises:
        UsageError: The file cannot be read, or some of its texts were used to create int8; or there is no file, and the texts of the
            export are not built in.
    """
    path = validation or BUILT_IN_TEXTS
    splits = manifest.int8_texts or digest_texts(read_int8_texts(BUILT_IN_TEXTS))
    texts = {hash_text(text): text for text in read_texts(path, "validation")}
    validation_hashes = decode_hashes(splits["validation"])
    if texts.keys() >= set(validation_hashes):
        return SplitTexts.of([texts[digest] for digest in validation_hashes])
    if validation is None:
        raise UsageError(
            f"int8 of `{manifest.name}` was validated on {len(validation_hashes)} texts of a file; give it with --int8-validation."
        )
    if shared_hashes := texts.keys() & {*decode_hashes(splits["calibration"]), *decode_hashes(splits["gate"])}:
        raise UsageError(
            f"int8 of `{manifest.name}` was made with {len(shared_hashes)} of the {len(texts)} texts of `{path}`; give others with "
            f"--int8-validation, or the file of the {len(validation_hashes)} texts on which it was validated at the export."
        )
    return sample_validation_texts(list(texts.values()))
