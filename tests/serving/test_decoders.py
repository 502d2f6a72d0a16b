"""The decoders of entities and answers on random logits, each compared with its definition in plain loops."""

import functools
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.bundle import files
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import fill_mask, question_answering, token_classification
from bertserve.service.tasks.decoding import Floats, activate
from bertserve.service.tasks.step import TextInput, drive
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from bertserve.service.text.windows import windows
from support import tiny
from support.app_client import assert_same
from support.fakes import Head
from support.task_runs import decode, encode, generator_of, ner_input

# Known words, words in several pieces, unknown words, punctuation, and combining marks that the tokenizer strips.
CHUNKS = ["good", "Film", "films", "quick", "x9", "看", "😴", "-", ",", "'", "é", "e\u0301x", "ñ\u0327", "\u200b", "ZÜRICH", "[SEP]", "##a"]
TEXTS = st.lists(st.tuples(st.sampled_from(CHUNKS), st.sampled_from([" ", "", "\t", "\r\n", "  "])), min_size=1, max_size=24).map(
    lambda parts: "".join(a + b for a, b in parts)
)
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "PER", "X-Y-Z", "Z-LOC")
SEEDS = st.integers(0, 2**32 - 1)


@functools.cache
def tokenizer_of(task: str, max_length: int, side: str = "right") -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        bundle = files.load_bundle(tiny.bundle(Path(folder), task=task, max_length=max_length))
        return Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer.model_copy(update={"truncation_side": side}))


def random_logits(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(scale=2, size=shape).astype(np.float32)


def sentencepiece(folder: Path) -> Tokenizer:
    """Returns a Unigram tokenizer that has two words, lower-cases, and has no prefix for parts of words."""
    file_tokenizer = tokenizers.Tokenizer(
        tokenizers.models.Unigram(
            [(token, 0.0) for token in ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>")] + [("▁", -2.0), ("▁in", -3.0), ("▁london", -3.0)],
            unk_id=1,
        )
    )
    file_tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    file_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
    )
    file_tokenizer.save(str(folder / "tokenizer.json"))
    spec = files.load_bundle(tiny.bundle(folder, task=fill_mask.TASK)).manifest.tokenizer
    return Tokenizer(folder / "tokenizer.json", spec.model_copy(update={"subword_prefix": None}))


def entities_of(text: str, strategy: Any, tokenizer: Tokenizer, labels: tuple[str, ...], logits: Callable[[int], Floats]) -> list[Any]:
    """Returns all entities of a text, "O" included; `logits` returns the logits of a window with this number of tokens."""
    request = ner_input(text, aggregation_strategy=strategy, ignore_labels=[])
    encodings = encode(token_classification, request, tokenizer, Head(labels)).encodings
    rows = [{"logits": logits(len(encoding))} for encoding in encodings]
    return list(decode(token_classification, request, rows, Head(labels), tokenizer))


def test_an_unknown_token_begins_a_word(tmp_path: Path) -> None:
    """Otherwise a symbol behind a name would be averaged with it, and be part of the entity."""
    tokenizer, text = sentencepiece(tmp_path), "in London\U0001f389"
    (tokens,) = tokenizer.tokenize([text])
    assert list(token_classification.pipeline_words(tokens, tokenizer)) == [[0], [1], [2]]


def test_the_word_of_an_unknown_token_is_the_text(tmp_path: Path) -> None:
    """The library has the normalized spelling, which is not in the text."""
    tokens = entities_of("in Ж", "none", sentencepiece(tmp_path), LABELS, lambda count: random_logits(0, count, len(LABELS)))
    assert [token["word"] for token in tokens] == ["in", "Ж", "Ж"]  # the library splits off the mark of a new word


@functools.cache
def with_white_space(kind: str, task: str) -> Tokenizer:
    """Returns a tokenizer of letters and white space. Its tokens include the white space before words, or are white space."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if kind == "byte level":
        names = ["<pad>", "<unk>", "<cls>", "<sep>", *letters, "Ġa", "Ġab", "ĠĠ"]
        file_tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [("Ġ", "a"), ("Ġa", "b"), ("Ġ", "Ġ")])
        )
        file_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        names = ["<pad>", "<unk>", "<cls>", "<sep>", *"abc\t\n\xa0\u3000", "▁", "▁▁", "▁a", "▁ab", "ab"]
        file_tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram([(name, -float(len(name) < 2)) for name in names], unk_id=1))
        file_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=kind == "words")
    with tempfile.TemporaryDirectory() as folder:
        file_tokenizer.save(f"{folder}/tokenizer.json")
        spec = files.load_bundle(tiny.bundle(Path(folder), task=task, max_length=4096)).manifest.tokenizer
        return Tokenizer(Path(folder) / "tokenizer.json", spec.model_copy(update={"subword_prefix": None, "added_tokens": ()}))


KINDS = ["byte level", "words", "sentences"]
SPACED = st.text("abc \t\n\xa0\u3000", max_size=20)


def check_span(text: str, span: str, start: int, end: int) -> None:
    assert text[start:end] == span == span.strip() != ""


@given(st.sampled_from(KINDS), SPACED, st.sampled_from(["none", "simple", "first", "average", "max"]), SEEDS)
def test_entities_and_tokens_have_no_white_space_at_their_ends(kind: str, text: str, strategy: Any, seed: int) -> None:
    """`word` is the slice, and no letter is left out."""
    tokenizer = with_white_space(kind, token_classification.TASK)
    entities = entities_of(text, strategy, tokenizer, LABELS, lambda count: random_logits(seed, count, len(LABELS)))

    for entity in entities:
        check_span(text, entity["word"], entity["start"], entity["end"])
    places = {place for entity in entities for place in range(entity["start"], entity["end"])}
    assert {place for place, char in enumerate(text) if not char.isspace()} <= places


@given(
    st.sampled_from(KINDS),
    SPACED,
    st.sampled_from(["best", "sum"]),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 4),
    SEEDS,
    st.booleans(),
)
def test_answers_have_no_white_space_at_their_ends(
    kind: str, text: str, duplicates: Any, align: bool, top_k: int, longest: int, seed: int, explain: bool
) -> None:
    """There is always an answer, even if the best spans are white space. A passage of only white space is empty."""
    parameters = question_answering.QuestionAnsweringParameters(
        top_k=top_k,
        duplicates=duplicates,
        align_to_words=align,
        max_answer_len=longest,
        max_seq_len=12,
        doc_stride=1,
        explain=explain and duplicates == "best",
    )
    request, tokenizer = TextInput("a?", parameters, text), with_white_space(kind, question_answering.TASK)
    if not text.strip():
        with pytest.raises(InvalidValueError, match="`context`"):
            question_answering.cut_passage(request, tokenizer)
        return

    def rows(encodings: Sequence[Encoding]) -> list[dict[str, Floats]]:
        names = ("start_logits", "end_logits")
        return [{name: random_logits(seed + n, len(encoding)) * 4 for n, name in enumerate(names)} for encoding in encodings]

    result = drive(generator_of(question_answering, request, tokenizer), lambda step: rows(step.encodings))
    answers = as_list(result, top_k)
    assert len({answer["answer"].lower() for answer in answers}) == len(answers) > 0
    for answer in answers:
        check_span(text, answer["answer"], answer["start"], answer["end"])


@pytest.mark.parametrize("space", [" ", "\t", "\n", "\xa0", "\u3000"])
@pytest.mark.parametrize("strategy", ["first", "average", "max"])
def test_any_white_space_begins_a_word(space: str, strategy: Any) -> None:
    """In the pipeline, only U+0020 does."""
    tokenizer = with_white_space("byte level", token_classification.TASK)
    certain = np.array([0, 1], dtype=np.float32)
    entities = entities_of(f"bc{space}bc", strategy, tokenizer, ("O", "B-X"), lambda count: np.tile(certain, (count, 1)))
    assert [(entity["start"], entity["end"]) for entity in entities] == [(0, 2), (3, 5)]


@given(TEXTS, st.sampled_from(["none", "simple", "first", "average", "max"]), st.integers(1, 9), st.data(), SEEDS)
def test_windows_with_equal_logits_give_the_entities_of_the_whole_text(
    text: str, strategy: Any, room: int, data: st.DataObject, seed: int
) -> None:
    """If all windows have the same logits for a token, no entity is split or duplicated at the edge of a window."""
    stride = data.draw(st.integers(0, room - 1))
    request = ner_input(text, aggregation_strategy=strategy, stride=stride)
    whole, cutting = (tokenizer_of(token_classification.TASK, length) for length in (4096, room + 2))
    ids = whole.tokenize([text])[0].ids
    count = len(ids)
    logits = random_logits(seed, count, len(LABELS))
    border = random_logits(seed + 1, 1, len(LABELS))
    cuts = [[range(count)], windows(count, room, stride if count > room else 0)] if count else [[], []]
    rows = [[{"logits": np.concatenate([border, logits[part.start : part.stop], border])} for part in parts] for parts in cuts]
    head = Head(LABELS)
    encodings = encode(token_classification, request, cutting).encodings

    assert [encoding.ids[1:-1].tolist() for encoding in encodings] == [ids[part.start : part.stop] for part in cuts[1]]
    assert all(len(encoding) <= room + 2 for encoding in encodings)
    assert decode(token_classification, request, rows[1], head, cutting) == decode(token_classification, request, rows[0], head, whole)


def probabilities(passage_windows: question_answering.PassageWindows, rows: Sequence[dict[str, Floats]]) -> list[tuple[Floats, Floats]]:
    """Returns start and end probabilities of each window over [CLS], at index 0, and the window's part of the passage."""
    pairs = []
    for encoding, token_range, row in zip(passage_windows.encodings, passage_windows.token_ranges, rows, strict=True):
        indexes = [passage_windows.tokenizer.spec.cls_index, *(encoding.start + i for i in range(len(token_range)))]
        start, end = (activate(np.array([row[name][i] for i in indexes]), "softmax") for name in ("start_logits", "end_logits"))
        pairs.append((start, end))
    return pairs


def plain_text(
    request: TextInput[question_answering.QuestionAnsweringParameters], passage: Any, first: int, last: int, token_range: range
) -> tuple[int, int, str]:
    """Returns start, end and text of a span of tokens, extended to whole words within `cut` if the request aligns to words."""
    words = passage.library_encoding.word_ids
    while request.parameters.align_to_words and first > token_range.start and words[first - 1] == words[first]:
        first -= 1
    while request.parameters.align_to_words and last + 1 < token_range.stop and words[last + 1] == words[last]:
        last += 1
    start, end = passage.offsets[first][0], passage.offsets[last][1]
    next_start = passage.offsets[last + 1][0] if last + 1 < len(words) else len(request.text_pair)
    # the reference implementation omits combining marks that the tokenizer strips
    while request.parameters.duplicates == "best" and end < next_start and unicodedata.category(request.text_pair[end]).startswith("M"):
        end += 1
    return start, end, request.text_pair[start:end]


def best_answers(
    request: TextInput[question_answering.QuestionAnsweringParameters],
    passage_windows: question_answering.PassageWindows,
    rows: Sequence[dict[str, Floats]],
) -> list[dict[str, Any]]:
    """Returns all distinct answers, found by loops over windows, starts and ends: by descending score, then start, then end."""
    pairs = probabilities(passage_windows, rows)
    spans = []
    for token_range, (start, end) in zip(passage_windows.token_ranges, pairs, strict=True):
        for i in range(len(token_range)):
            for j in range(i, len(token_range)):
                if j < i + request.parameters.max_answer_len:
                    spans.append((float(start[i + 1] * end[j + 1]), token_range.start + i, token_range.start + j))
    whole = range(len(passage_windows.passage))
    by_text: dict[str, dict[str, Any]] = {}
    for score, first, last in sorted(spans, key=lambda span: (-span[0], span[1], span[2])):
        begin, stop, text = plain_text(request, passage_windows.passage, first, last, whole)
        by_text.setdefault(text.lower(), {"answer": text, "score": score, "start": begin, "end": stop})
    answers = sorted(by_text.values(), key=lambda item: (-item["score"], item["start"], item["end"]))
    empty = {"answer": "", "score": min(float(start[0]) * float(end[0]) for start, end in pairs), "start": 0, "end": 0}
    return [*answers[: request.parameters.top_k], *([empty] if request.parameters.handle_impossible_answer else [])]


def as_list(result: Any, top_k: int) -> list[dict[str, Any]]:
    """Checks that a result is a list if and only if `top_k` is over 1, and returns it as a list."""
    assert (top_k > 1) == isinstance(result, list)
    return result if isinstance(result, list) else [result]


PASSAGES = TEXTS.filter(lambda text: len(tokenizer_of(question_answering.TASK, 4096).tokenize([text])[0]) > 0)
# many spans have the same text, because spans are extended to whole words
LONG_WORDS = st.lists(st.text("qxz", min_size=6, max_size=22), min_size=2, max_size=5).map(" ".join)
REQUESTS = st.builds(
    lambda **fields: fields,
    context=PASSAGES | LONG_WORDS,
    top_k=st.integers(1, 60),
    max_answer_len=st.integers(1, 20),
    handle_impossible_answer=st.booleans(),
    align_to_words=st.booleans(),
)


def question_of(fields: dict[str, Any], room: int, stride: int, seed: int) -> tuple[Any, Any, Any]:
    """Returns a request whose windows have `room` tokens of the passage, these windows, and random rows."""
    how = {name: value for name, value in fields.items() if name != "context"}
    parameters = question_answering.QuestionAnsweringParameters(**how, max_seq_len=room + 5, doc_stride=stride)
    request = TextInput("good?", parameters, fields["context"])
    passage_windows = question_answering.cut_passage(request, tokenizer_of(question_answering.TASK, 4096))
    rows = [
        {name: random_logits(seed + 2 * n + m, len(encoding)) for m, name in enumerate(("start_logits", "end_logits"))}
        for n, encoding in enumerate(passage_windows.encodings)
    ]
    return request, passage_windows, rows


@given(REQUESTS, st.integers(1, 40), st.data(), SEEDS)
def test_the_best_answers_equal_loops_over_all_spans(fields: dict[str, Any], room: int, data: st.DataObject, seed: int) -> None:
    """This holds for any windows, `top_k`, answer length and alignment. Equal texts appear once, and every score is a probability."""
    request, passage_windows, rows = question_of(fields, room, data.draw(st.integers(0, room - 1)), seed)
    expected = best_answers(request, passage_windows, rows)
    expected = sorted(expected, key=lambda item: -item["score"])[: request.parameters.top_k]
    result = decode(question_answering, request, rows, tokenizer=tokenizer_of(question_answering.TASK, 4096))
    actual = as_list(result, request.parameters.top_k)

    assert_same(actual, expected, tolerance=1e-6)
    assert all(0 <= item["score"] <= 1 for item in actual)


def certain_of_good(passage_windows: question_answering.PassageWindows) -> list[dict[str, Floats]]:
    """Returns rows in which the word "good" of the passage is certainly the answer."""
    rows = []
    for encoding in passage_windows.encodings:
        logits = np.where(encoding.ids == tiny.VOCABULARY.index("good"), 20, 0).astype(np.float32)
        logits[: encoding.start] = 0
        rows.append({"start_logits": logits, "end_logits": logits})
    return rows


def test_equal_answers_with_summed_scores_keep_the_place_of_the_reference() -> None:
    """If the tokenizer cuts on the left, the reference reads the last window first, and keeps the place of the first of equal answers."""
    parameters = question_answering.QuestionAnsweringParameters(duplicates="sum", max_answer_len=1, max_seq_len=8, doc_stride=0)
    request = TextInput("good?", parameters, "good bad bad bad bad good")
    for side, place in (("right", 0), ("left", 21)):
        tokenizer = tokenizer_of(question_answering.TASK, 4096, side)
        rows = certain_of_good(question_answering.cut_passage(request, tokenizer))
        assert decode(question_answering, request, rows, tokenizer=tokenizer)["start"] == place
