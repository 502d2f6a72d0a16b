"""Writes the golden answers of token classification, computed with PyTorch and the Hugging Face pipeline.

    python tests/golden/make_token_classification.py CHECKPOINT_DIR

The script reads the cases from `token_classification.jsonl` and replaces that file. Each line has `id` and `request`, and

- `windows`: the windows of each input. Each has `first`, the index of its first text token; `count`, its number of text
  tokens; and `logits`, those of the text tokens, rounded to seven digits. Each window runs alone, without padding. A text
  without tokens has one empty window;
- `answer`: the entities of each input, or of the single text if `inputs` is not a list. If the text fits one window, they
  come from the pipeline, and so does `word`. Otherwise the pipeline would truncate the text, so they come from
  `aggregate()`. There `word` is the text between `start` and `end`, or the token if the strategy is "none";
- `reference`: the source of the answer: the pipeline, or `aggregate()` over the windows;
- `deviation` and `corrected`, if the pipeline's answer is wrong: the reason, and the answer of `aggregate()` without the
  mistake. `words`: the pipeline treats a token as the continuation of a word if its length differs from the length of its
  text. This includes the first token of a word with combining marks or zero-width characters. `marks`: the tokenizer's
  offsets exclude a combining mark after the last letter of a token.

The script checks `aggregate()`: for every text of one window, the stored logits must give the pipeline's answer.

It requires torch and transformers.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import transformers
from aggregation import Entity, Floats, Token, aggregate, softmax

from reference import Model

ROOM = 510  # text tokens per window, without [CLS] and [SEP]
DEFAULT_STRATEGY = "simple"
DEFAULT_STRIDE = 128
DEFAULT_IGNORED = ("O",)
TOLERANCE = 1e-6
REASONS = {
    "words": "words: a token whose length differs from its text's is taken for the continuation of a word",
    "marks": "marks: an entity ends before the combining mark of its last letter",
}


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

    def piped(self, text: str, strategy: str, ignore_labels: Sequence[str]) -> list[Entity]:
        """Returns the pipeline's answer to a text that fits one window."""
        answer = self.pipeline(text, aggregation_strategy=strategy, ignore_labels=list(ignore_labels))
        return [{name: float(value) if name == "score" else value for name, value in entity.items()} for entity in answer]


def windows(count: int, stride: int) -> list[range]:
    """Returns the range of each window over `count` tokens. Neighboring windows share `stride` tokens."""
    return [range(start, min(start + ROOM, count)) for start in range(0, max(count - stride, 1), ROOM - stride)]


def best_window(token: int, spans: list[range], count: int) -> int:
    """Returns the first window in which a token is farthest from a window edge. The ends of the text do not count as edges."""

    def distance(span: range) -> int:
        left = token - span.start if span.start > 0 else count
        right = span.stop - 1 - token if span.stop < count else count
        return min(left, right) if token in span else -1

    return max(range(len(spans)), key=lambda number: distance(spans[number]))


def combine(spans: list[range], logits: list[Floats]) -> Floats:
    """Returns the logits of all tokens of a text, each from its best window."""
    count = spans[-1].stop
    rows = []
    for token in range(count):
        number = best_window(token, spans, count)
        rows.append(logits[number][token - spans[number].start])
    return np.array(rows, np.float32)


def corrected(text: str, tokens: list[Token], ids: list[int], to_word: Callable[[int], str]) -> dict[str, list[Token]]:
    """Returns a text's tokens with each of the pipeline's mistakes corrected, and with both corrected."""
    starts = {token.start for token in tokens}

    def subword(token: Token, token_id: int) -> Token:
        return replace(token, is_subword=to_word(token_id).startswith("##"))

    def whole(token: Token) -> Token:
        end = token.end
        while end < len(text) and end not in starts and unicodedata.category(text[end]).startswith("M"):
            end += 1
        return replace(token, end=end)

    by_prefix = [subword(token, token_id) for token, token_id in zip(tokens, ids, strict=True)]
    return {"words": by_prefix, "marks": [whole(token) for token in tokens], "both": [whole(token) for token in by_prefix]}


def golden(case: dict[str, Any], reference: Reference) -> dict[str, Any]:
    """Returns the golden line of a case."""
    inputs, parameters = case["request"]["inputs"], case["request"].get("parameters", {})
    strategy = parameters.get("aggregation_strategy", DEFAULT_STRATEGY)
    ignored = parameters.get("ignore_labels", DEFAULT_IGNORED)
    stored, answers, corrections, forced, found = [], [], [], [], set()
    for number, text in enumerate(inputs if isinstance(inputs, list) else [inputs]):
        ids, tokens = reference.encode(text)
        spans = windows(len(ids), parameters.get("stride", DEFAULT_STRIDE))
        logits = [seven_digits(reference.token_logits(ids[span.start : span.stop])) for span in spans]
        scores = softmax(combine(spans, logits)) if ids else np.empty((0, len(reference.labels)), np.float32)

        def answer_with(changed: list[Token], text: str = text, scores: Floats = scores, ignored: Sequence[str] = ignored) -> list[Entity]:
            return aggregate(text, changed, scores, reference.labels, strategy, ignored)

        answer = answer_with(tokens)
        fixed = {name: answer_with(changed) for name, changed in corrected(text, tokens, ids, _words(reference)).items()}
        reasons = {name for name in REASONS if not _same(answer, fixed[name])}
        if len(spans) > 1:
            forced.append(number)
            if reasons:
                raise SystemExit(f"{case['id']}: a text of several windows should not differ by {reasons}.")
        elif ids:
            computed, answer = answer, reference.piped(text, strategy, ignored)
            if not _same(computed, answer):
                raise SystemExit(f"{case['id']}: the logits give {computed}, the pipeline {answer}.")
        found |= reasons
        stored.append(
            [
                {"first": span.start, "count": len(span), "logits": [[_short(logit) for logit in row] for row in rows]}
                for span, rows in zip(spans, logits, strict=True)
            ]
        )
        answers.append(answer)
        corrections.append(fixed["both"])
    pick = (lambda values: values) if isinstance(inputs, list) else (lambda values: values[0])
    row = {**case, "windows": stored, "answer": pick(answers), "reference": cases.source(transformers.__version__, len(stored), forced)}
    if found:
        row |= {"deviation": "; ".join(REASONS[name] for name in REASONS if name in found), "corrected": pick(corrections)}
    return row


def seven_digits(logits: Floats) -> Floats:
    return np.array([[_short(logit) for logit in row] for row in logits], np.float32)


def _short(logit: np.float32) -> float:
    return float(f"{float(logit):.7g}")


def _words(reference: Reference) -> Callable[[int], str]:
    return lambda token_id: str(reference.tokenizer.convert_ids_to_tokens(token_id))


def _same(ours: list[Entity], theirs: list[Entity]) -> bool:
    """Returns whether two answers are equal, except for the words and the last digits of the scores."""

    def facts(entity: Entity) -> list[Any]:
        return [entity.get(name) for name in ("entity", "entity_group", "index", "start", "end")]

    return [facts(entity) for entity in ours] == [facts(entity) for entity in theirs] and all(
        abs(our["score"] - their["score"]) <= TOLERANCE for our, their in zip(ours, theirs, strict=True)
    )


if __name__ == "__main__":
    cases.remake("token_classification", __doc__, Reference, golden)
