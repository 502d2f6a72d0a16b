"""What a graph's tensors look like on real text: the inputs of its matrices, and its outputs, for quantization.

The built-in texts (`calibration.txt`) were written for this project: reviews, encyclopedic sentences, passages, questions,
everyday messages. Texts of one's own domain and language are better: `bert-export --calibration FILE`.

Texts have two sides. What is chosen for int8 is chosen on one; what comes of it is judged on the other, which nothing was chosen on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from export.checkpoint.checkpoint import Checkpoint
from export.choices import asked
from export.errors import CheckpointError
from export.inference import Feed
from service.bundle.graph_spec import InputSpec
from service.text.tokenizer import Encoding, Tokenizer

BUILT_IN = Path(__file__).with_name("calibration.txt")
MAX_TOKENS = 128
MAX_TEXTS = 1000
MIN_TEXTS = 16
HELD_OUT = 3  # of the texts for calibration one in so many is kept for validation, where there are no others for that

# Most lines are short, and errors may grow with the length: so many passages of up to so many tokens are made of neighboring lines.
PASSAGES = {256: 12, 512: 6}
MAX_VALIDATION = 350  # texts, passages counted: more would take long and say little more

Item = TypeVar("Item")


@dataclass(frozen=True)
class Texts:
    """The texts of one side.

    Attributes:
        lines: As they stand in the file, none twice.
        passages: Neighboring ones of them joined, each of more than `MAX_TOKENS` tokens.
    """

    lines: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lines) + len(self.passages)

    def with_passages(self, tokenizer: Tokenizer) -> Texts:
        """Returns the same lines with passages of the lengths of `PASSAGES`, as far as the lines and the model's length go.

        Args:
            tokenizer: The service's tokenizer of the model.
        """
        tokens = [len(entry.ids) for entry in tokenizer.tokenize(self.lines)]
        room = tokenizer.room(pair=False)
        lengths: dict[int, int] = {}  # of a model of few positions several lengths become one
        for length, count in PASSAGES.items():
            lengths[min(length, room)] = max(lengths.get(min(length, room), 0), count)
        made = [passage for length, count in lengths.items() for passage in spread(self._joined(tokens, length), count)]
        return Texts(self.lines, tuple(dict.fromkeys(made)))

    def _joined(self, tokens: Sequence[int], length: int) -> list[str]:
        """Returns the lines, one after the other, joined while they have at most `length` tokens; of these the long ones."""
        found, start = [], 0
        while start < len(self.lines):
            end, total = start + 1, tokens[start]
            while end < len(self.lines) and total + tokens[end] <= length:
                total, end = total + tokens[end], end + 1
            if total > MAX_TOKENS:
                found.append(" ".join(self.lines[start:end]))
            start = end
        return found


@dataclass(frozen=True)
class Split:
    """Texts for int8, of which no line stands on both sides.

    Attributes:
        calibration: What scales, rounding and bias are chosen on.
        validation: What int8 is judged on: the gate and the evidence.
    """

    calibration: Texts
    validation: Texts

    def with_passages(self, tokenizer: Tokenizer) -> Split:
        """Returns both sides with passages, each made of its own lines."""
        return Split(self.calibration.with_passages(tokenizer), self.validation.with_passages(tokenizer))


def read_split(calibration: Path, validation: Path | None = None) -> Split:
    """Returns the texts of both sides, without passages.

    Without a file for validation every third line of the other is held out for it: the third, the sixth and so on, so that both sides
    have of whatever the file has.

    Args:
        calibration: A file of texts, one a line.
        validation: Another, of whose lines none is calibrated on.

    Raises:
        CheckpointError: A file cannot be read, or holds too few texts.
    """
    lines = read_texts(calibration)
    if validation is None:
        seen, held = [line for i, line in enumerate(lines) if (i + 1) % HELD_OUT], lines[HELD_OUT - 1 :: HELD_OUT]
    else:
        held = read_texts(validation, "validation")
        seen = [line for line in lines if line not in set(held)]
        if len(seen) < MIN_TEXTS:
            raise CheckpointError(
                f"all but {len(seen)} texts of `{calibration}` stand in `{validation}` too, and calibration needs {MIN_TEXTS} others at "
                "least; give other texts, or leave out --validation, and a third is held out."
            )
    return Split(Texts(tuple(seen)), Texts(tuple(spread(held, MAX_VALIDATION - sum(PASSAGES.values())))))


def read_texts(path: Path, purpose: str = "calibration") -> list[str]:
    """Returns the texts of a file, one a line; one that stands there again is left out, so that a split has it on one side alone.

    Args:
        path: The file.
        purpose: What its texts are for, for the error.

    Raises:
        CheckpointError: The file cannot be read, or holds fewer than `MIN_TEXTS` texts.
    """
    try:
        texts = [line for line in dict.fromkeys(path.read_text(encoding="utf-8").split("\n")) if line.strip()][:MAX_TEXTS]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the {purpose} texts `{path}` cannot be read: {error}.") from error
    if len(texts) < MIN_TEXTS:
        raise CheckpointError(
            f"`{path}` holds {len(texts)} different texts, and {purpose} needs {MIN_TEXTS} at least, one a line; some hundred are better."
        )
    return texts


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Returns at most so many of the items, at even distances."""
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else list(items)


def make_feeds(
    texts: Sequence[str],
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    inputs: Sequence[InputSpec] | None = None,
    *,
    passages: Sequence[str] = (),
) -> list[Feed]:
    """Returns the graph's inputs for each text, cut to `MAX_TOKENS`, and then for each passage; a batch of one without padding.

    Question answering, and a model that takes pairs alone, get a text and the next one as a pair, and a text and a passage. Multiple choice gets each text, and each passage, as
    a choice for another text. Fill-mask gets one token in eight masked.

    Args:
        texts: The texts.
        checkpoint: Its task decides what is made of them.
        tokenizer: The service's tokenizer.
        inputs: What the graph takes, where that is not what the traced one does.
        passages: Long texts, of which none is cut before the longest of `PASSAGES`, or the model's length.
    """
    # a text of control characters has no tokens, and where no special ones are added there is nothing to run
    bare = tokenizer.room(pair=False) == tokenizer.max_length
    short, long = ([entry.ids for entry in tokenizer.tokenize(side) if not bare or len(entry)] for side in (texts, passages))
    taken = checkpoint.inputs if inputs is None else inputs
    if checkpoint.task == "multiple-choice":
        pairs = [(short[asked(i, len(short))], ids, 2 * MAX_TOKENS) for i, ids in enumerate(short)]
        pairs += [(short[asked(i, len(short))], ids, max(PASSAGES)) for i, ids in enumerate(long)]
        return [_feed(_pair(*pair, tokenizer), taken) for pair in pairs]
    if checkpoint.task == "question-answering" or checkpoint.pairs_only:
        pairs = [(ids, short[(i + 1) % len(short)], 2 * MAX_TOKENS) for i, ids in enumerate(short)]
        pairs += [(short[i % len(short)], ids, max(PASSAGES)) for i, ids in enumerate(long)]
        return [_feed(_pair(*pair, tokenizer), taken) for pair in pairs]
    singles = [*((ids, MAX_TOKENS) for ids in short), *((ids, max(PASSAGES)) for ids in long)]
    return [_feed(_single(ids, most, i, checkpoint, tokenizer), taken) for i, (ids, most) in enumerate(singles)]


def _pair(question: Sequence[int], context: Sequence[int], most: int, tokenizer: Tokenizer) -> Encoding:
    room = min(tokenizer.room(pair=True), most)
    a = question[: min(room, 2 * MAX_TOKENS) // 4]
    return tokenizer.assemble(a, context[: room - len(a)])


def _single(tokens: Sequence[int], most: int, i: int, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Encoding:
    ids = list(tokens[: min(tokenizer.room(pair=False), most)])
    if checkpoint.mask is None:
        return tokenizer.assemble(ids)
    ids = ids or [checkpoint.mask.id]
    masks = list(range(i % min(8, len(ids)), len(ids), 8))
    for mask in masks:
        ids[mask] = checkpoint.mask.id
    return tokenizer.assemble(ids, masks=masks)


def _feed(encoding: Encoding, inputs: Sequence[InputSpec]) -> Feed:
    values: dict[str, Any] = {
        "token_ids": [encoding.ids],
        "attention_mask": [[1] * len(encoding)],
        "type_ids": [encoding.type_ids],
        "mask_index": encoding.masks,
        "lengths": [len(encoding)],
        "attention_index": np.zeros((0, 3)),
    }
    return {spec.name: np.array(values[spec.fill], dtype=spec.dtype) for spec in inputs}


def pad(feed: Feed, inputs: Sequence[InputSpec], *, pad_id: int, tokens: int) -> Feed:
    """Returns the inputs of one text with some padding behind it, where a mask has other values.

    Args:
        feed: The inputs without.
        inputs: What the graph takes.
        pad_id: Token id of the padding.
        tokens: How much of it.
    """
    fills = {"token_ids": pad_id, "attention_mask": 0, "type_ids": 0}
    return {
        spec.name: np.pad(feed[spec.name], ((0, 0), (0, tokens)), constant_values=fills[spec.fill])
        if spec.fill in fills
        else feed[spec.name]
        for spec in inputs
    }
