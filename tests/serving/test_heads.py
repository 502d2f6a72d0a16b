"""Decoding on plain numbers, compared with plain formulas: classes, embeddings, reranking, zero-shot labels, and tag schemes."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Activation
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import classify, embed, rerank, token_classification, zero_shot
from bertserve.service.tasks.decoding import activate
from bertserve.service.tasks.step import TextInput
from bertserve.service.text.tokenizer import Tokenizer
from support.fakes import Head
from support.task_runs import classify_input, decode, encode, ner_input

Floats = NDArray[np.float32]
NLI = Head(labels=("contradiction", "neutral", "entailment"))
ROOM = 30  # text tokens that fit into a tiny bundle; 29 for a pair


def logits(*rows: tuple[float, ...]) -> list[dict[str, Floats]]:
    return [{"logits": np.array(row, dtype=np.float32)} for row in rows]


NUMBERS = st.floats(-50, 50, width=32)


def test_labels_with_equal_scores_are_in_reverse_order() -> None:
    """The pipeline has this order too, because it reverses numpy's argsort."""
    request = TextInput("text", zero_shot.ZeroShotParameters(candidate_labels=["a", "b", "c"]))
    items = decode(zero_shot, request, logits((0, 0, 1), (0, 0, 1), (0, 0, 1)), NLI)
    assert [item["label"] for item in items] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("task", "labels", "place"),
    [
        (zero_shot, ("contradiction", "neutral", "entailment"), 2),
        (zero_shot, ("Entails", "other"), 0),
        (zero_shot, ("LABEL_0", "LABEL_1"), None),
        (zero_shot, ("not_entailment", "entailment"), 1),
        (zero_shot, ("entailment",), None),
        (zero_shot, (), None),
        (rerank, ("LABEL_0",), 0),
        (rerank, ("irrelevant", "relevant"), 1),
        (rerank, ("RELEVANT", "other"), 0),
        (rerank, ("no", "yes"), 1),
        (rerank, ("yes", "perhaps"), None),
        (rerank, ("negative", "positive"), None),
        (rerank, ("relevant", "relevant_too"), None),
        (rerank, ("irrelevant", "relevant", "perfect"), None),
        (rerank, (), None),
    ],
)
def test_models_of_a_derived_task_are_recognized_by_their_labels(task: Any, labels: tuple[str, ...], place: int | None) -> None:
    """An NLI model has several labels, and the first that begins with "entail" counts. A cross-encoder has one, or a relevant one of two."""
    find = {zero_shot: zero_shot.entailment, rerank: rerank.relevant_label}[task]
    assert find(labels) == place
    assert task.SPEC.derivation.compatible(Head(labels=labels)) == (place is not None)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8), st.sampled_from([0, 1]))
def test_the_relevant_one_of_two_labels_gives_the_score(values: list[tuple[float, ...]], place: int) -> None:
    """With softmax, the raw score is the log odds. With sigmoid, the raw score is the logit of this label only."""
    names = ["not_relevant"]
    names.insert(place, "Relevant")
    texts = [f"text {i}" for i in range(len(values))]
    matrix = np.array(values, dtype=np.float64)
    shares = np.exp(matrix - matrix.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    cases: dict[Activation, tuple[Any, Any]] = {
        "softmax": (shares[:, place], matrix[:, place] - matrix[:, 1 - place]),
        "sigmoid": (1 / (1 + np.exp(-matrix[:, place])), matrix[:, place]),
    }
    for activation, (expected, logits_) in cases.items():
        head = Head(labels=tuple(names), activation=activation)
        for raw, numbers in ((False, expected), (True, logits_)):
            items = decode(rerank, rerank.RerankInput("query", texts, raw_scores=raw), logits(*values), head)
            assert dict(enumerate(numbers.tolist())) == {item["index"]: pytest.approx(item["score"], abs=1e-4) for item in items}
            assert all(a["score"] >= b["score"] for a, b in pairwise(items))


def test_logits_give_the_order_where_all_scores_are_1() -> None:
    request = rerank.RerankInput("query", ["a", "b", "c"])
    answer = decode(rerank, request, logits((18.0,), (20.0,), (19.0,)), Head(labels=("LABEL_0",)))
    assert [(item["index"], item["score"]) for item in answer] == [(1, 1.0), (2, 1.0), (0, 1.0)]


def test_a_zero_vector_stays_zero() -> None:
    assert embed.normalized(np.zeros(2, dtype=np.float32)).tolist() == [0.0, 0.0]


def chunks(labels: list[str]) -> list[tuple[str, int, int]]:
    """Returns the chunks of BIOES labels by the rules of conlleval and seqeval: (tag, first, last)."""
    items: list[tuple[str, int, int]] = []
    start = 0
    pairs = [("O", "O"), *((label[0], label[2:] or "O") for label in labels), ("O", "O")]
    for i, ((before, tag_before), (letter, tag)) in enumerate(pairwise(pairs)):
        ends = (
            before in "ES"
            or (before, letter) in {("B", "B"), ("B", "S"), ("B", "O"), ("I", "B"), ("I", "S"), ("I", "O")}
            or (before != "O" and tag_before != tag)
        )
        starts = (
            letter in "BS"
            or (before, letter) in {("E", "E"), ("E", "I"), ("S", "E"), ("S", "I"), ("O", "E"), ("O", "I")}
            or (letter != "O" and tag_before != tag)
        )
        if ends and before != "O":
            items.append((tag_before, start, i - 1))
        if starts:
            start = i
    return items


def entities(labels: list[str], names: tuple[str, ...], tokenizer: Tokenizer, tags: tuple[str, ...] = ()) -> list[tuple[str, int, int]]:
    """Returns the service's entity groups for a text with one token per label: (tag, first, last)."""
    text = " ".join(["film"] * len(labels))
    request = ner_input(text)
    scores = np.zeros((len(labels) + 2, len(names)), dtype=np.float32)
    for i, label in enumerate(labels):
        scores[i + 1, names.index(label)] = 9
    items = decode(token_classification, request, [{"logits": scores}], Head(labels=names, tags=tags), tokenizer)
    return [(item["entity_group"], item["start"] // 5, item["end"] // 5) for item in items]


BIOES = ("O", *(f"{letter}-{tag}" for letter in "BIES" for tag in ("PER", "LOC")))
TO_BILOU = str.maketrans("ES", "LU")


@given(labels=st.lists(st.sampled_from(BIOES), min_size=1, max_size=ROOM))
def test_bioes_and_bilou_entities_equal_those_of_conlleval(labels: list[str], tokenizer: Tokenizer) -> None:
    assert entities(labels, BIOES, tokenizer) == chunks(labels)
    other = tuple(label[:1].translate(TO_BILOU) + label[1:] for label in BIOES)
    assert entities([label[:1].translate(TO_BILOU) + label[1:] for label in labels], other, tokenizer) == chunks(labels)


def test_labels_that_are_no_tags_keep_their_names(tokenizer: Tokenizer) -> None:
    """Neighbors with the same label are one entity, and a hyphen in a label does not make a letter."""
    names, tags = ("O", "E-MAIL", "PER"), ("O", "I-E-MAIL", "PER")
    assert entities(["PER", "PER", "E-MAIL", "E-MAIL", "O"], names, tokenizer, tags) == [("PER", 0, 1), ("E-MAIL", 2, 3)]


@pytest.mark.parametrize("strategy", ["none", "simple"])
@pytest.mark.parametrize(("ignored_labels", "count"), [(["O"], 1), (["o"], 1), ([], 2)])
def test_a_models_own_spelling_of_o_is_ignored_like_o(tokenizer: Tokenizer, strategy: Any, ignored_labels: list[str], count: int) -> None:
    logits = np.array([[0, 0], [9, 0], [0, 9], [0, 0]], dtype=np.float32)
    head = Head(labels=("o", "b-per"), tags=("O", "B-per"))
    request = ner_input("film film", aggregation_strategy=strategy, ignore_labels=ignored_labels)
    assert len(decode(token_classification, request, [{"logits": logits}], head, tokenizer)) == count


def test_equal_scores_keep_the_order_of_the_labels() -> None:
    rows = [{"logits": np.array([1.0, 2.0, 1.0, 2.0], dtype=np.float32)}]

    assert [item["label"] for item in decode(classify, classify_input(""), rows, Head(tuple("abcd")))] == list("bdac")


def test_the_models_own_activation_is_the_default() -> None:
    """Without `function_to_apply`, a multi-label model applies a sigmoid to each label."""
    rows = [{"logits": np.array([0.0, 0.0], dtype=np.float32)}]

    assert [item["score"] for item in decode(classify, classify_input(""), rows, Head(("a", "b"), "sigmoid"))] == [0.5, 0.5]


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=8), st.sampled_from(["softmax", "sigmoid"])
)
def test_scores_are_finite_for_every_logit(logits: list[float], activation: str) -> None:
    """The maximum is subtracted, so that no exponential overflows: scores are probabilities for any logits."""
    with np.errstate(over="ignore"):
        scores = activate(np.array(logits, dtype=np.float32), activation)

    assert scores.dtype == np.float32
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (classify_input("good " * 40, window="mean", stride=30), "`stride` is 30, .* 30 tokens;"),
        (classify_input("film " * 25, "bad " * 30, window="mean", stride=4), "`stride` is 4, .* 4 tokens;"),
        (classify_input("film " * 40, "bad " * 2, window="mean"), "no room .* 2 tokens; shorten the f"),
    ],
)
def test_windows_without_tokens_of_the_text_are_an_error(
    tokenizer: Tokenizer, request_: TextInput[classify.ClassifyParameters], numbers: str
) -> None:
    with pytest.raises(InvalidValueError, match=numbers):
        encode(classify, request_, tokenizer)
