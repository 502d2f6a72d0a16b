"""Makes the golden answers of question answering with PyTorch and the Hugging Face pipeline of transformers 5.2.0, the last one.

    python3 -m venv ENV
    ENV/bin/pip install torch==2.13.0
    ENV/bin/pip install transformers==5.2.0
    ENV/bin/python tests/golden/make_question_answering.py CHECKPOINT_DIR

The cases are those of `question_answering.jsonl`, which this replaces. Each line has `id` and `request`, and

- `windows`: for each input its windows in order, each run alone, without padding, in float32:
  `start` and `end`, the logits of every token, special tokens included ([CLS] question [SEP] passage part [SEP]), with 8
  significant digits; `first`, the index of the window's first passage token among all tokens of the passage; `count`, the
  number of passage tokens in the window; `question`, the number of tokens of the question. So passage token `first + i`
  lies at `question + 2 + i` in the window;
- `answer`: what the pipeline returned for the input, or for a list the list of what it returned for each input alone;
- `reference`: what made the answer.

Every answer is checked here against `brute_force`, which says in plain Python what the pipeline does. One thing it leaves
out on purpose: in a window with fewer spans than the candidate limit the pipeline goes on with spans of score 0 ([CLS] to a
token, end before start, too long), whose choice hangs on the sorting routine. They come back as answers of score 0, often
the empty text, where `top_k` has room for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import cases
import torch
import transformers

Answer = dict[str, Any]
Window = dict[str, Any]
Parameters = dict[str, Any]

VERSION = "5.2.0"
DIGITS = 8
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Passage:
    """A passage and, for each token of it, the token's characters [start, end) and the index of its word."""

    text: str
    offsets: Sequence[tuple[int, int]]
    words: Sequence[int]


class Reference:
    """A checkpoint in PyTorch (float32, eager attention), and the pipeline around it."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self.model = model.eval()
        if self.tokenizer.padding_side != "right":
            raise SystemExit("The checkpoint's tokenizer puts the passage before the question, which these files do not know.")
        self.pipeline = transformers.pipeline("question-answering", model=model, tokenizer=self.tokenizer, device="cpu")

    def passage(self, context: str) -> tuple[list[int], Passage]:
        """Returns the token ids of a whole passage, without special tokens, and the passage."""
        encoding = self.tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], Passage(context, encoding["offset_mapping"], encoding.word_ids())

    def windows(self, item: dict[str, str], parameters: Parameters) -> list[Window]:
        """Returns the windows of a question and passage, cut as the pipeline does, with their logits."""
        length = parameters.get("max_seq_len", min(self.tokenizer.model_max_length, 384))
        stride = parameters.get("doc_stride", min(length // 2, 128))
        encoding = self.tokenizer(
            item["question"],
            item["context"],
            truncation="only_second",
            max_length=length,
            stride=stride,
            return_token_type_ids=True,
            return_overflowing_tokens=True,
        )
        ids, _ = self.passage(item["context"])
        windows, first = [], 0
        for row in range(len(encoding["input_ids"])):
            sequence = encoding.sequence_ids(row)
            question, count = sequence.count(0), sequence.count(1)
            if sequence != [None, *[0] * question, None, *[1] * count, None]:
                raise SystemExit(f"This is no [CLS] question [SEP] passage [SEP]: {sequence}.")
            if encoding["input_ids"][row][question + 2 : -1] != ids[first : first + count]:
                raise SystemExit(f"Window {row} does not begin at token {first} of the passage: {item}.")
            batch = {name: torch.tensor([encoding[name][row]]) for name in self.tokenizer.model_input_names}
            windows.append({**self._logits(batch), "first": first, "count": count, "question": question})
            first += count - stride
        return windows

    @torch.inference_mode()
    def _logits(self, batch: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        output = self.model(**batch)
        return {"start": _rounded(output.start_logits[0].tolist()), "end": _rounded(output.end_logits[0].tolist())}

    def piped(self, item: dict[str, str], parameters: Parameters) -> Answer | list[Answer]:
        """Returns the pipeline's answer to one question and passage: a dict, also where only one of several was found, or a list."""
        answer: Answer | list[Answer] = self.pipeline(question=item["question"], context=item["context"], **parameters)
        return [_plain(entry) for entry in answer] if isinstance(answer, list) else _plain(answer)


def brute_force(passage: Passage, windows: list[Window], parameters: Parameters) -> list[Answer]:
    """Returns the answers that the pipeline gives, best first, but for its fillers of score 0."""
    top_k, align = parameters.get("top_k", 1), parameters.get("align_to_words", True)
    max_answer_len = parameters.get("max_answer_len", 15)
    # Of each window, only so many spans are looked at; the others add nothing, not even to the score of an equal text.
    limit = 2 * top_k + 10 if align else top_k
    answers: list[Answer] = []
    null = math.inf
    for window in windows:
        p_start, p_end = probabilities(window, "start"), probabilities(window, "end")
        null = min(null, p_start[0] * p_end[0])
        # Position 0, [CLS], takes part in the softmax but in no span, whether impossible answers are allowed or not.
        spans = [
            (p_start[1 + i] * p_end[1 + j], i, j)
            for i in range(window["count"])
            for j in range(i, min(i + max_answer_len, window["count"]))
        ]
        for score, i, j in sorted(spans, key=lambda span: -span[0])[:limit]:
            start, end = characters(passage, window, i, j, align=align)
            text = passage.text[start:end]
            # The first answer of an equal text, ignoring case, in an earlier window or this one, keeps its place and takes the score.
            known = next((answer for answer in answers if answer["answer"].lower() == text.lower()), None)
            if known:
                known["score"] += score
            else:
                answers.append({"score": score, "start": start, "end": end, "answer": text})
    if parameters.get("handle_impossible_answer", False):
        answers.append({"score": null, "start": 0, "end": 0, "answer": ""})
    return sorted(answers, key=lambda answer: -answer["score"])[:top_k]


def probabilities(window: Window, name: str) -> list[float]:
    """Returns the softmax over [CLS], which comes first, and the passage tokens of a window; nothing else takes part."""
    passage = window["question"] + 2
    logits = [window[name][0], *window[name][passage : passage + window["count"]]]
    highest = max(logits)
    exponentials = [math.exp(logit - highest) for logit in logits]
    total = math.fsum(exponentials)
    return [exponential / total for exponential in exponentials]


def characters(passage: Passage, window: Window, i: int, j: int, *, align: bool) -> tuple[int, int]:
    """Returns the characters [start, end) of passage tokens i to j of a window, aligned to words only as far as the window shows them."""
    first, last = window["first"], window["first"] + window["count"] - 1
    i, j = first + i, first + j
    if align:
        while i > first and passage.words[i - 1] == passage.words[i]:
            i -= 1
        while j < last and passage.words[j + 1] == passage.words[j]:
            j += 1
    return passage.offsets[i][0], passage.offsets[j][1]


def golden(case: dict[str, Any], reference: Reference) -> dict[str, Any]:
    """Returns the golden line of a case."""
    inputs, parameters = case["request"]["inputs"], case["request"].get("parameters", {})
    items = inputs if isinstance(inputs, list) else [inputs]
    all_windows, answers = [], []
    for item in items:
        windows, answer = reference.windows(item, parameters), reference.piped(item, parameters)
        _, passage = reference.passage(item["context"])
        _check_equal(case["id"], brute_force(passage, windows, parameters), answer)
        all_windows.append(windows)
        answers.append(answer)
    answer = answers if isinstance(inputs, list) else answers[0]
    return {**case, "windows": all_windows, "answer": answer, "reference": f"transformers {VERSION} pipeline"}


def _rounded(logits: list[float]) -> list[float]:
    return [float(f"{logit:.{DIGITS}g}") for logit in logits]


def _plain(entry: Answer) -> Answer:
    return {"score": float(entry["score"]), "start": int(entry["start"]), "end": int(entry["end"]), "answer": entry["answer"]}


def _check_equal(case_id: str, computed: list[Answer], piped: Answer | list[Answer]) -> None:
    """Stops the script if the stored logits do not give the pipeline's answers: the same, in order, those of equal score as a set.

    Fillers of score 0 may follow, in any choice, where the spans of the passage are too few.
    """
    entries = piped if isinstance(piped, list) else [piped]
    found = [entry for entry in entries if entry["score"] > 0]
    same = (
        len(found) == len(computed)
        and entries[: len(found)] == found
        and all(abs(ours["score"] - theirs["score"]) <= TOLERANCE for ours, theirs in zip(computed, found, strict=True))
        and _spans(computed, found) == _spans(found, found)
    )
    if not same:
        raise SystemExit(f"{case_id}: the logits give {computed}, the pipeline {piped}.")


def _spans(answers: list[Answer], scored: list[Answer]) -> list[list[tuple[int, int, str]]]:
    """Returns the spans and texts of answers, those next to each other sorted where `scored` has equal scores for them."""
    pairs = zip(answers, scored, strict=True)
    groups = groupby(pairs, key=lambda pair: pair[1]["score"])
    return [sorted((answer["start"], answer["end"], answer["answer"]) for answer, _ in group) for _, group in groups]


def main() -> None:
    """Replaces the golden file."""
    folder = cases.checkpoint(__doc__)
    if transformers.__version__ != VERSION:
        raise SystemExit(f"The answers are those of transformers {VERSION}, this is {transformers.__version__}.")
    torch.set_num_threads(1)
    reference = Reference(folder)
    rows = [golden(case, reference) for case in cases.requests("question_answering")]
    cases.write("question_answering", rows, separators=(",", ":"))


if __name__ == "__main__":
    main()
