"""Writes the golden answers of token classification, computed with PyTorch and the Hugging Face pipeline.

    python tests/golden/make_token_classification.py CHECKPOINT_DIR

The script reads the cases from `token_classification.jsonl` and replaces that file. Each line has `id` and `request`, and

- `windows`: the windows of each input. Each has `first`, the index of its first text token; `count`, its number of text
  tokens; and `logits`, of the text tokens, rounded to seven digits. Each window runs alone, without padding. A text
  without tokens has one empty window;
- `answer`: the entities of each input, or of the single text if `inputs` is not a list. If the text fits one window, they
  come from the pipeline, and so does `word`. Otherwise the pipeline would truncate the text, so they come from
  `aggregate()`. There `word` is the text between `start` and `end`, or the token if the strategy is "none";
- `corrected`, if the pipeline's answer is wrong: the answer of `aggregate()` without the mistake. The pipeline treats a token as
  the continuation of a word if its length differs from the length of its text. This includes the first token of a word with
  combining marks or zero-width characters. The tokenizer's offsets exclude a combining mark after the last letter of a token.

The script checks `aggregate()`: for every text of one window, the stored logits must give the pipeline's answer.

It requires torch and transformers.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import transformers
from numpy.typing import NDArray

from reference import Model

ROOM = 510  # text tokens per window, without [CLS] and [SEP]
DEFAULT_STRATEGY = "simple"
DEFAULT_STRIDE = 128
DEFAULT_IGNORED = ("O",)
TOLERANCE = 1e-6
Floats = NDArray[np.float32]
Entity = dict[str, Any]


@dataclass(frozen=True)
class Token:
    """One token of a text."""

    word: str  # its spelling in the vocabulary, or its text if it is unknown
    start: int
    end: int
    is_subword: bool  # it continues the word of the previous token


@dataclass(frozen=True)
class _Group:
    """Adjacent words of one entity: its label, the score of each word, and the indices of all tokens."""

    label: str
    scores: list[np.float32]
    tokens: list[int]


def softmax(logits: Floats) -> Floats:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def aggregate(
    text: str, tokens: list[Token], scores: Floats, labels: list[str], strategy: str, ignore_labels: Sequence[str]
) -> list[Entity]:
    """Returns the entities of a text from the label scores of its tokens, float32 [tokens, labels].

    The strategy "none" gives one entity per token. The others give one label per token ("simple") or per word ("first", "average",
    "max"). They join adjacent tokens or words with the same tag; a "B-" label starts a new entity.
    """
    entities: list[Entity] = []
    if strategy == "none":
        for index, (token, row) in enumerate(zip(tokens, scores, strict=True), 1):
            best = int(row.argmax())
            entity = {"entity": labels[best], "score": float(row[best]), "index": index}
            entities.append({**entity, "word": token.word, "start": token.start, "end": token.end})
        return [entity for entity in entities if entity["entity"] not in ignore_labels]

    words: list[list[int]] = []
    for number, token in enumerate(tokens):
        if strategy != "simple" and token.is_subword and words:
            words[-1].append(number)
        else:
            words.append([number])

    groups: list[_Group] = []
    previous = None
    for word in words:
        row = word_scores(scores[word], strategy)
        label = labels[int(row.argmax())]
        tag = label[2:] if label.startswith(("B-", "I-")) else label
        if tag != previous or label.startswith("B-"):
            groups.append(_Group(label.split("-", 1)[-1], [], []))
        groups[-1].scores.append(row.max())
        groups[-1].tokens.extend(word)
        previous = tag

    for group in groups:
        start, end = tokens[group.tokens[0]].start, tokens[group.tokens[-1]].end
        score = float(np.mean(group.scores, dtype=np.float32))
        entities.append({"entity_group": group.label, "score": score, "word": text[start:end], "start": start, "end": end})
    return [entity for entity in entities if entity["entity_group"] not in ignore_labels]


def word_scores(rows: Floats, strategy: str) -> Floats:
    """Returns the label scores of a word from the scores of its tokens."""
    if strategy == "average":
        mean: Floats = rows.mean(axis=0)
        return mean
    # If maxima are equal, the first token wins.
    return rows[int(rows.max(axis=1).argmax())] if strategy == "max" else rows[0]


class Reference(Model):
    """A checkpoint in PyTorch and its pipeline."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, transformers.AutoModelForTokenClassification, "token-classification")

    def encode(self, text: str) -> tuple[list[int], list[Token]]:
        """Returns the token ids of a text, without special tokens, and the tokens as the pipeline interprets them."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoding["input_ids"]
        tokens = []
        for token_id, (start, end) in zip(ids, encoding["offset_mapping"], strict=True):
            word = self.tokenizer.convert_ids_to_tokens(token_id)
            is_unknown = token_id == self.tokenizer.unk_token_id
            is_subword = not is_unknown and len(word) != end - start
            tokens.append(Token(text[start:end] if is_unknown else word, start, end, is_subword))
        return ids, tokens

    def pipeline_answer(self, text: str, strategy: str, ignore_labels: Sequence[str]) -> list[Entity]:
        """Returns the pipeline's answer to a text that fits one window."""
        answer = self.pipeline(text, aggregation_strategy=strategy, ignore_labels=list(ignore_labels))
        return [{name: float(value) if name == "score" else value for name, value in entity.items()} for entity in answer]


def windows(count: int, stride: int) -> list[range]:
    """Returns the range of each window over `count` tokens. Neighboring windows share `stride` tokens."""
    return [range(start, min(start + ROOM, count)) for start in range(0, max(count - stride, 1), ROOM - stride)]


def best_window(token: int, spans: list[range], count: int) -> int:
    """Returns the first window in which a token is farthest from a window edge. The ends of the text do not count as edges."""

    def distance(span: range) -> int:
        before_edge = token - span.start if span.start > 0 else count
        right = span.stop - 1 - token if span.stop < count else count
        return min(before_edge, right) if token in span else -1

    return max(range(len(spans)), key=lambda number: distance(spans[number]))


def combine(spans: list[range], logits: list[Floats]) -> Floats:
    """Returns the logits of all tokens of a text, each from its best window."""
    count = spans[-1].stop
    rows = []
    for token in range(count):
        number = best_window(token, spans, count)
        rows.append(logits[number][token - spans[number].start])
    return np.array(rows, np.float32)


def correct(text: str, tokens: list[Token], pieces: list[str]) -> list[Token]:
    """Returns the tokens without the pipeline's mistakes; `pieces` are their spellings in the vocabulary."""
    starts = {token.start for token in tokens}
    whole = []
    for token, piece in zip(tokens, pieces, strict=True):
        end = token.end
        while end < len(text) and end not in starts and unicodedata.category(text[end]).startswith("M"):
            end += 1
        whole.append(replace(token, end=end, is_subword=piece.startswith("##")))
    return whole


def golden(request: dict[str, Any], reference: Reference) -> dict[str, Any]:
    inputs, parameters = request["inputs"], request.get("parameters", {})
    strategy = parameters.get("aggregation_strategy", DEFAULT_STRATEGY)
    ignored_labels = parameters.get("ignore_labels", DEFAULT_IGNORED)
    all_windows, answers, corrections = [], [], []
    for text in inputs if isinstance(inputs, list) else [inputs]:
        ids, tokens = reference.encode(text)
        spans = windows(len(ids), parameters.get("stride", DEFAULT_STRIDE))
        rows_of_spans = [reference.token_logits(ids[span.start : span.stop]) for span in spans]
        logits = [np.array([[_short(logit) for logit in row] for row in rows], np.float32) for rows in rows_of_spans]
        scores = softmax(combine(spans, logits)) if ids else np.empty((0, len(reference.labels)), np.float32)
        right = correct(text, tokens, reference.tokenizer.convert_ids_to_tokens(ids))
        answer, correction = (aggregate(text, words, scores, reference.labels, strategy, ignored_labels) for words in (tokens, right))
        if len(spans) == 1 and ids:
            ours, answer = answer, reference.pipeline_answer(text, strategy, ignored_labels)
            if not _same(ours, answer):
                raise SystemExit(f"{text!r}: the logits give {ours}, the pipeline {answer}.")
        all_windows.append(
            [
                {"first": span.start, "count": len(span), "logits": [[_short(logit) for logit in row] for row in rows]}
                for span, rows in zip(spans, logits, strict=True)
            ]
        )
        answers.append(answer)
        corrections.append(correction)
    results = {"answer": answers}
    if not all(map(_same, answers, corrections)):
        results["corrected"] = corrections
    if not isinstance(inputs, list):
        results = {name: values[0] for name, values in results.items()}
    return {"windows": all_windows, **results}


def _short(logit: np.float32) -> float:
    return float(f"{float(logit):.7g}")


def _same(ours: list[Entity], theirs: list[Entity]) -> bool:
    """Returns whether two answers are equal, except for the words and the last digits of the scores."""

    def facts(entity: Entity) -> list[Any]:
        return [entity.get(name) for name in ("entity", "entity_group", "index", "start", "end")]

    return [facts(entity) for entity in ours] == [facts(entity) for entity in theirs] and all(
        abs(our["score"] - their["score"]) <= TOLERANCE for our, their in zip(ours, theirs, strict=True)
    )


if __name__ == "__main__":
    cases.remake("token_classification", __doc__, Reference, golden)
