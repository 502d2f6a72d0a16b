"""Metrics against right answers: SQuAD's two metrics, entity F1, correlations and label scores, compared with other libraries."""

from __future__ import annotations

import random

import pytest
import seqeval.metrics
from seqeval.scheme import BILOU, IOB2, IOBES

from bertserve.export.tasks import quality

WORDS = [(0, 2), (3, 5), (6, 8), (9, 11)]


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Beatles!", "beatles"),
        ("Theatre", "theatre"),  # an article inside a word stays
        ("1,000", "1000"),
        ("“Ada”", "“ada”"),  # only ASCII punctuation is removed, as in the official script
        ("The-rapist", "therapist"),  # punctuation is removed before articles
    ],
)
def test_answers_are_normalized_as_in_squads_script(text: str, normalized: str) -> None:
    assert normalized == quality.normalize_answer(text)


@pytest.mark.parametrize(
    ("answer", "golds", "exact", "f1"),
    [
        ("the Normans", ["Normans"], 1.0, 1.0),
        ("in the 10th century", ["10th century"], 0.0, 2 * 2 / (3 + 2)),
        ("Paris", ["London", "Paris, France"], 0.0, 2 * 1 / (1 + 2)),
        ("la la land", ["la land"], 0.0, 2 * 2 / (3 + 2)),  # a repeated word counts as often as both answers have it
        ("", [], 1.0, 1.0),
        ("Paris", [], 0.0, 0.0),
        ("the", [""], 1.0, 1.0),  # both are empty after normalization
    ],
)
def test_answers_are_scored_by_exact_match_and_f1(answer: str, golds: list[str], exact: float, f1: float) -> None:
    assert (exact, f1) == (quality.exact_match(answer, golds), pytest.approx(quality.answer_f1(answer, golds)))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["I-PER", "I-PER", "I-LOC", "O"], {(0, 5, "PER"), (6, 8, "LOC")}),  # IOB1, and a change of label
        (["S-PER", "I-PER", "O", "O"], {(0, 2, "PER"), (3, 5, "PER")}),  # a single tag cannot continue
        (["PER", "PER", "O", "LOC"], {(0, 5, "PER"), (9, 11, "LOC")}),
    ],
)
def test_tags_become_entities(tags: list[str], expected: set[quality.Span]) -> None:
    assert expected == quality.spans_of_tags(tags, WORDS)


OFFSETS = [(3 * i, 3 * i + 2) for i in range(12)]
SCHEMES = {"IOB2": IOB2, "IOBES": IOBES, "BILOU": BILOU}


def sentence(rng: random.Random, scheme: str) -> list[str]:
    """Returns the tags of twelve words with random entities in a scheme."""
    inside, last, single = {"IOB2": ("I", "I", "B"), "IOBES": ("I", "E", "S"), "BILOU": ("I", "L", "U")}[scheme]
    tags: list[str] = []
    while len(tags) < 12:
        label, length = rng.choice(("PER", "LOC", "ORG")), min(rng.choice((0, 1, 1, 2, 3)), 12 - len(tags))
        prefixes = [] if length == 0 else [single] if length == 1 else ["B", *[inside] * (length - 2), last]
        tags += [f"{prefix}-{label}" for prefix in prefixes] or ["O"]
    return tags


@pytest.mark.parametrize("scheme", [*SCHEMES, None])
@pytest.mark.parametrize("seed", range(2))
def test_entity_f1_agrees_with_seqeval(scheme: str | None, seed: int) -> None:
    """Tags in any order, as a model can give them, are read like seqeval's default, which follows the CoNLL script."""
    rng = random.Random(seed)
    if scheme is None:
        right, found = ([[rng.choice(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")) for _ in range(12)] for _ in range(30)] for _ in range(2))
        expected = seqeval.metrics.f1_score(right, found)
    else:
        right = [sentence(rng, scheme) for _ in range(20)]
        found = [tags if rng.random() < 0.6 else sentence(rng, scheme) for tags in right]
        expected = seqeval.metrics.f1_score(right, found, mode="strict", scheme=SCHEMES[scheme])
    spans = [[quality.spans_of_tags(tags, OFFSETS) for tags in side] for side in (right, found)]

    assert 0 < expected < 1  # some right, some wrong
    assert expected == pytest.approx(quality.micro_f1(*spans), abs=1e-12)
