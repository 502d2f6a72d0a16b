"""The agreement of results with a reference's, and the metrics of results on labeled data."""

import random
from typing import Any

import pytest
import seqeval.metrics
from seqeval.scheme import BILOU, IOB2, IOBES

from bertserve.export.tasks import EXPORT_TASKS, evaluation
from bertserve.service.bundle.graph_spec import Agreement
from support.fakes import Head

ADA = {"entity_group": "PER", "score": 0.9, "word": "Ada", "start": 0, "end": 3}
ROME = {"entity_group": "LOC", "score": 0.9, "word": "Rome", "start": 9, "end": 13}


LABELS, SETS = Head(("a", "b")), Head(("a", "b"), activation="sigmoid")
SCORE, VALUES = Head(("score",), activation="sigmoid"), Head(("a", "b", "c"), activation="none")


def measure(task: str, config: Head, *pairs: tuple[Any, Any]) -> Agreement:
    """Returns the agreement over pairs of an expected and an actual result."""
    return EXPORT_TASKS[task].agreement([one for one, _ in pairs], [other for _, other in pairs], config)


def scored(**scores: float) -> list[dict[str, Any]]:
    return [{"label": label, "score": score} for label, score in sorted(scores.items(), key=lambda item: -item[1])]


def token(id_: int) -> dict[str, Any]:
    return {"score": 0.5, "token": id_, "token_str": str(id_), "sequence": f"a {id_}"}


def span(start: int, end: int, **fields: Any) -> dict[str, Any]:
    return {"answer": "x" * (end - start), "score": 0.5, "start": start, "end": end} | fields


@pytest.mark.parametrize(
    ("task", "one", "other", "expected"),
    [
        ("text-classification", scored(a=0.9, b=0.06, c=0.04), scored(a=0.8, c=0.15, b=0.05), 1),
        ("text-classification", scored(a=0.5, b=0.3, c=0.2), scored(b=0.5, a=0.3, c=0.2), 0),
        ("question-answering", span(1, 3), span(1, 4), 0),
        ("question-answering", [span(1, 3), span(5, 6)], [span(1, 3), span(7, 9)], 1),
        ("fill-mask", [token(5), token(6)], [token(5), token(7)], 1),
        ("fill-mask", [[token(5)], [token(6)]], [[token(5)], [token(7)]], 0),
        ("token-classification", [ADA], [ADA | {"score": 0.1}], 1),
        ("token-classification", [ADA], [ADA | {"entity_group": "LOC"}], 0),
        ("token-classification", [span(1, 3, entity="B-PER")], [span(1, 3, entity="B-LOC")], 0),
    ],
)
def test_results_agree_if_their_decisions_are_equal(task: str, one: Any, other: Any, expected: float) -> None:
    assert measure(task, Head(("a", "b", "c")), (one, other)).value == expected


NONE, ONE, BOTH = scored(a=0.1, b=0.1), scored(a=0.9, b=0.1), scored(a=0.9, b=0.9)


@pytest.mark.parametrize(
    ("task", "config", "pairs", "expected"),
    [
        ("text-classification", LABELS, [(scored(a=0.9, b=0.1), ONE), (scored(a=0.6, b=0.4), scored(a=0.4, b=0.6))], ("label", 0.5, 2)),
        ("text-classification", SETS, [(NONE, NONE), (ONE, BOTH), (NONE, ONE), (BOTH, BOTH)], ("set_f1", 0.75, 3)),
        ("token-classification", LABELS, [([], []), ([ADA, ROME], [ADA]), ([], [ROME])], ("span_f1", 0.5, 2)),
        # results without entities, without labels, or with one score for all texts are equal, but do not count as agreement
        ("token-classification", LABELS, [([], [])] * 18, ("span_f1", None, 0)),
        ("text-classification", SETS, [(NONE, NONE)] * 18, ("set_f1", None, 0)),
        ("text-classification", SCORE, [(scored(score=0.5), scored(score=0.5))] * 18, ("spearman", None, 0)),
    ],
)
def test_agreement_is_the_share_of_equal_labels_or_the_f1_of_sets(
    task: str, config: Head, pairs: list[tuple[Any, Any]], expected: tuple[str, float | None, int]
) -> None:
    result = measure(task, config, *pairs)
    assert (result.measure, result.value, result.decisions) == expected


def test_agreement_of_vectors_is_their_cosine() -> None:
    """The share of equal labels would be 1 for any vectors, because vectors have no labels. For token vectors, the worst token counts."""
    result = measure(
        "feature-extraction", Head(), ([1.0, 0.0], [2.0, 0.0]), ([1.0, 0.0], [0.0, 1.0]), ([[1.0, 0.0]] * 2, [[1.0, 0.0], [0.6, 0.8]])
    )

    assert (result.measure, result.decisions) == ("cosine", 3)
    assert (result.value, result.worst) == (pytest.approx((1 + 0 + 0.6) / 3), pytest.approx(0.0))


@pytest.mark.parametrize(
    ("expected", "actual", "value"),
    [
        ((0.1, 0.5, 0.9), (0.05, 0.25, 0.45), 1.0),
        ((0.1, 0.5, 0.9), (0.9, 0.5, 0.1), -1.0),
        ((0.1, 0.5, 0.9), (0.5, 0.5, 0.5), 0.0),
        # scores near 1 differ from PyTorch's in the seventh digit, which is only rounding
        ((0.9999999, 0.9999998, 1.0, 0.2), (0.9999998, 1.0, 0.9999999, 0.2), 1.0),
    ],
)
def test_agreement_of_single_scores_is_their_rank_correlation(expected: tuple[float, ...], actual: tuple[float, ...], value: float) -> None:
    """The share of equal best labels would be 1 even for a reversed order, because there is only one label."""
    pairs = [(scored(score=a), scored(score=b)) for a, b in zip(expected, actual, strict=True)]
    assert measure("text-classification", SCORE, *pairs).value == pytest.approx(value)


def test_agreement_of_several_values_is_that_of_the_worst_value() -> None:
    """The label with the largest value is not compared because it can be the same for all texts."""
    pairs = [(scored(a=x, b=x, c=1.0), scored(a=x, b=y, c=1.0)) for x, y in zip((0.1, 0.2, 0.3), (0.1, 0.3, 0.2), strict=True)]

    assert measure("text-classification", VALUES, *pairs).value == pytest.approx(0.5)
    with pytest.raises(ValueError, match="`label`"):
        EXPORT_TASKS["text-classification"].read_gold({"label": "a"}, VALUES)


WORDS = [(0, 2), (3, 5), (6, 8), (9, 11)]


@pytest.mark.parametrize(
    ("answer", "golds", "exact", "f1"),
    [
        ("The Normans!", ["normans"], 1.0, 1.0),
        ("Theatre", ["atre"], 0.0, 0.0),  # an article inside a word stays
        ("“Ada”", ["Ada"], 0.0, 0.0),  # only ASCII punctuation is removed, as in the official script
        ("The-rapist", ["therapist"], 1.0, 1.0),  # punctuation is removed before articles
        ("in the 10th century", ["10th century"], 0.0, 2 * 2 / (3 + 2)),
        ("Paris", ["London", "Paris, France"], 0.0, 2 * 1 / (1 + 2)),
        ("la la land", ["la land"], 0.0, 2 * 2 / (3 + 2)),  # a repeated word counts as often as both answers have it
        ("", [], 1.0, 1.0),
        ("Paris", [], 0.0, 0.0),
        ("the", [""], 1.0, 1.0),  # both are empty after normalization
    ],
)
def test_answers_are_scored_by_exact_match_and_f1_as_in_squads_script(answer: str, golds: list[str], exact: float, f1: float) -> None:
    assert (evaluation.exact_match(answer, golds), pytest.approx(evaluation.answer_f1(answer, golds))) == (exact, f1)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["I-PER", "I-PER", "I-LOC", "O"], {(0, 5, "PER"), (6, 8, "LOC")}),  # IOB1, and a change of label
        (["S-PER", "I-PER", "O", "O"], {(0, 2, "PER"), (3, 5, "PER")}),  # a single tag cannot continue
        (["PER", "PER", "O", "LOC"], {(0, 5, "PER"), (9, 11, "LOC")}),
    ],
)
def test_tags_become_entities(tags: list[str], expected: set[evaluation.Span]) -> None:
    assert evaluation.spans_of_tags(tags, WORDS) == expected


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
        right, guesses = ([[rng.choice(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")) for _ in range(12)] for _ in range(30)] for _ in range(2))
        expected = seqeval.metrics.f1_score(right, guesses)
    else:
        right = [sentence(rng, scheme) for _ in range(20)]
        guesses = [tags if rng.random() < 0.6 else sentence(rng, scheme) for tags in right]
        expected = seqeval.metrics.f1_score(right, guesses, mode="strict", scheme=SCHEMES[scheme])
    spans = [[evaluation.spans_of_tags(tags, OFFSETS) for tags in side] for side in (right, guesses)]

    assert 0 < expected < 1  # some right, some wrong
    assert evaluation.micro_f1(*spans) == pytest.approx(expected, abs=1e-12)
