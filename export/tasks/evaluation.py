"""Scores predictions against correct answers: F1 of spans, answers and labels, exact match, correlations."""

import re
import string
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from bertserve.service.tasks.token_classification import OUTSIDE, split_tag

# names of metrics in `--min-metric`
ACCURACY, F1, MACRO_F1, MICRO_F1 = "accuracy", "F1", "macro F1", "micro F1"
MATTHEWS, PEARSON, SPEARMAN = "Matthews correlation", "Pearson correlation", "Spearman correlation"
MEAN_ABSOLUTE_ERROR = "mean absolute error"  # the only metric for which less is better; it has no minimum
ENTITY_F1, EXACT_MATCH, TOP_1 = "entity F1", "exact match", "top-1"

Span = tuple[int, int, str]  # start, end (exclusive, code points), label
MetricValue = tuple[float, str]  # a metric, and a remark for readers, such as that 0 replaces a missing value


def f1(right: int, predicted: int, expected: int) -> float:
    """Returns the harmonic mean of precision and recall, from numbers of items; 0 if none is expected and none predicted."""
    return 2 * right / (predicted + expected) if predicted + expected else 0.0


def micro_f1(expected: Sequence[Collection[Any]], predicted: Sequence[Collection[Any]]) -> float:
    """Returns the strict F1 over the spans or labels of all texts: a span is correct if start, end and label are."""
    pairs = [(set(a), set(b)) for a, b in zip(expected, predicted, strict=True)]
    return f1(sum(len(a & b) for a, b in pairs), sum(len(b) for _, b in pairs), sum(len(a) for a, _ in pairs))


def result_spans(result: Any) -> set[Span]:
    """Returns the entities or answers in a task's result: all of its items with a start and an end."""
    if isinstance(result, list):
        return {span for item in result for span in result_spans(item)}
    if isinstance(result, dict) and {"start", "end"} <= result.keys():
        return {(result["start"], result["end"], str(result.get("entity_group", result.get("entity", ""))))}
    return set()


def normalize_answer(text: str) -> str:
    """Returns an answer in the normalized form of SQuAD's official script: lower case, no punctuation, no articles, single spaces."""
    letters = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """Returns 1 if the normalized answer is one of the correct ones, else 0; without correct answers, "" is correct."""
    return float(any(normalize_answer(answer) == normalize_answer(gold) for gold in golds or [""]))


def answer_f1(answer: str, golds: Sequence[str]) -> float:
    """Returns SQuAD's F1 of an answer, by words, with the most similar correct answer; without correct answers, "" is correct."""
    return max(_words_f1(normalize_answer(answer).split(), normalize_answer(gold).split()) for gold in golds or [""])


def _words_f1(answer: Sequence[str], gold: Sequence[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)  # an empty answer has no words to compare
    return f1((Counter(answer) & Counter(gold)).total(), len(answer), len(gold))


def spans_of_tags(tags: Sequence[str], offsets: Sequence[tuple[int, int]]) -> set[Span]:
    """Returns the entities of words, by their tags in IOB1, IOB2, BIOES, BILOU, or without a letter, and their starts and ends.

    As in the CoNLL evaluation, a tag begins an entity if it continues none, or continues one with another label.
    """
    spans: list[Span] = []
    open_ = False
    for tag, (start, end) in zip(tags, offsets, strict=True):
        if tag == OUTSIDE:
            open_ = False
            continue
        letter, label = split_tag(tag)
        if open_ and letter in ("", "I", "E", "L") and spans[-1][2] == label:
            spans[-1] = (spans[-1][0], end, label)
        else:
            spans.append((start, end, label))
        open_ = letter in ("", "B", "I")
    return set(spans)


def widen_to_words(spans: Collection[Span], words: Sequence[tuple[int, int]]) -> set[Span]:
    """Returns spans extended to whole words, because correct answers by word do not say anything about parts of words.

    `words` has the start and end of each word; if it is empty, the spans are returned unchanged.
    """
    widened_spans = set()
    for start, end, label in spans:
        touched_words = [word for word in words if word[0] < end and start < word[1]]
        widened_spans.add((touched_words[0][0], touched_words[-1][1], label) if touched_words else (start, end, label))
    return widened_spans


def macro_f1(expected: Sequence[str], predicted: Sequence[str]) -> float:
    """Returns the mean F1 of all labels in either series."""
    right = Counter(a for a, b in zip(expected, predicted, strict=True) if a == b)
    a, b = Counter(expected), Counter(predicted)
    labels = a.keys() | b.keys()
    return sum(f1(right[label], b[label], a[label]) for label in labels) / len(labels)


def pearson(a: Any, b: Any) -> float:
    """Returns the correlation of two series of finite numbers, or of vectors [n, width]; 0 if one series is constant."""
    x, y = (np.asarray(series, dtype=np.float64) for series in (a, b))
    if (x == x[0]).all() or (y == y[0]).all():
        return 0.0  # checked here, because the computed mean of equal numbers can differ from them
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    return float(np.clip((x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y)), -1, 1))


def matthews(expected: Sequence[str], predicted: Sequence[str]) -> float:
    """Returns the Matthews correlation of two series of labels, which is that of their one-hot vectors; 0 if one series is constant."""
    labels = np.unique([*expected, *predicted])
    return pearson(*(np.array(series)[:, None] == labels for series in (expected, predicted)))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the rank correlation of two series, with mean ranks for equal numbers; 0 if one series is constant."""
    return pearson(_ranks(a), _ranks(b))


def cosine(a: Any, b: Any) -> float:
    """Returns the cosine of two vectors; for a text's token vectors, the lowest one of corresponding vectors."""
    x, y = (np.atleast_2d(np.asarray(value, dtype=np.float64)) for value in (a, b))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return min(float(np.min((x * y).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny))), 1.0)


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns each value's rank from 0; equal values get the mean of their ranks."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[positions].tolist()
