"""`explain` of /classify and /answer: the importance of each word, compared with texts without the word; and what it costs."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.tasks import classify
from bertserve.service.tasks.decoding import activate
from bertserve.service.tasks.occlusion import MAX_WORDS
from bertserve.service.tasks.step import drive
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.text.words import Word, find_words, most_within
from support import tiny
from support.app_client import Send, error_of_inputs, fake_service, open_api, post, result_of, serving
from support.bundles import Service, included
from support.fakes import FakeEngine
from support.task_runs import classify_input, generator_of

CLASSIFY, ANSWER = "/classify", "/answer"
TEXT = "the film was not bad , but very long"


def span_score(model: Service, question: str, context: str, first: int, last: int) -> float:
    """Returns p(start) * p(end) of a span of the context's tokens; with -1 and -1, of "no answer"."""
    a, b = model.tokenizer.tokenize([question, context])
    encoding = model.tokenizer.assemble(a.ids, b.ids)
    row = model.engine.run([encoding])[0]
    place = [0, *range(encoding.start, encoding.start + len(b))]
    start, end = (activate(row[name][place], "softmax") for name in ("start_logits", "end_logits"))
    return float(start[first + 1] * end[last + 1])


@pytest.fixture(name="api", scope="module")
def explain_api(tmp_path_factory: pytest.TempPathFactory) -> Send:
    folder = tmp_path_factory.mktemp("served")
    tiny.bundle(folder, "labels", max_length=64)
    tiny.bundle(folder, "several", activation="sigmoid", seed=3)
    tiny.bundle(folder, "value", labels=("stars",), activation="none")
    tiny.bundle(folder, "passages", task="question-answering", max_length=64)
    send, names = open_api(folder), {CLASSIFY: "labels", ANSWER: "passages"}  # the other paths are names of models
    return lambda method, path, **request: send(method, f"/models/{names.get(path, path.strip('/'))}", **request)


def without(inputs: Any, word: dict[str, Any]) -> Any:
    """Returns the inputs without an explained word."""
    text = inputs[word["field"]] if "field" in word else inputs
    rest = text[: word["start"]] + text[word["end"] :]
    return inputs | {word["field"]: rest} if "field" in word else rest


def assert_explained(api: Send, path: str, inputs: Any, item: dict[str, Any]) -> None:
    """Asserts that the importance of each word is the score of the label minus its score without the word."""
    for word in item["explanation"]:
        (scores,) = result_of(api, path, without(inputs, word))
        score = next(entry["score"] for entry in scores if entry["label"] == item["label"])
        assert word["importance"] == pytest.approx(item["score"] - score, abs=1e-5)


@cache
def tokenizer() -> Tokenizer:
    return included("sentiment").tokenizer


def words(text: str, span: range | None = None) -> list[str]:
    """Returns the words of a text, with the tokenizer of the included sentiment model."""
    (tokens,) = tokenizer().tokenize([text])
    return [text[word.start : word.end] for word in find_words(tokens, span)]


def test_tokens_are_joined_to_words() -> None:
    """Word pieces, contractions, compounds and numbers are joined. Punctuation is separate. Without spaces, each token is a word."""
    expected = ["Don't", "call", "it", "state-of-the-art", ":", "3.5", "stars", ",", "1,000", "reviews", "(", "ok", ")", "."]
    assert words("Don't call it state-of-the-art: 3.5 stars, 1,000 reviews (ok).") == expected
    assert words("'quoted' words' end-") == ["'", "quoted", "'", "words", "'", "end", "-"]
    assert words("  A naïve\tcafé 👍 ") == ["A", "naïve", "café", "👍"]
    assert words("看电影") == ["看", "电", "影"]
    assert words("हिन्दी शब्द") == ["हिन्दी", "शब्द"]
    assert words("") + words(" \n") == []


def test_a_word_at_the_edge_of_a_window_has_only_its_part_inside() -> None:
    (part, dot), (end,) = words("floccinaucinihilipilification.")[:2], words("floccinaucinihilipilification", range(3, 6))
    assert (part, dot) == ("floccinaucinihilipilification", ".")
    assert "floccinaucinihilipilification" not in end
    assert end in part
    assert most_within([Word(0, 1, range(3)), Word(2, 3, range(3, 4))], [range(1), range(2, 4), range(3, 4)]) == 2


def test_the_best_label_is_explained_by_its_score_without_each_word(api: Send) -> None:
    (label,) = result_of(api, CLASSIFY, TEXT, explain=True)
    (plain,) = result_of(api, CLASSIFY, TEXT)
    best = label[0]
    assert_explained(api, CLASSIFY, TEXT, best)
    assert TEXT.split() == [item["word"] for item in best["explanation"]] == [TEXT[i["start"] : i["end"]] for i in best["explanation"]]
    assert [{key: value for key, value in item.items() if key != "explanation"} for item in label] == plain
    assert result_of(api, CLASSIFY, TEXT, explain=True, top_k=1)[0] == [best]


@pytest.mark.parametrize("text", ["good", "a dull book", "the very very good film", "poor , poor !"])
def test_independent_labels_are_explained_from_a_score_of_one_half(api: Send, text: str) -> None:
    """The best label is always explained."""
    (labels,) = result_of(api, "/several", text, explain=True)
    explanation = [item for item in labels if "explanation" in item]
    assert explanation == [labels[0], *(item for item in labels[1:] if item["score"] >= 0.5)]
    for item in explanation:
        assert_explained(api, "/several", text, item)


def test_the_value_of_a_regression_is_explained(api: Send) -> None:
    ((value,),) = result_of(api, "/value", "good film", explain=True)
    assert [item["word"] for item in value["explanation"]] == ["good", "film"]
    assert_explained(api, "/value", "good film", value)


def test_words_of_a_pair_name_their_text(api: Send) -> None:
    pair = {"text": "a good film", "text_pair": "the film is good"}
    ((best, *_),) = result_of(api, CLASSIFY, pair, explain=True)
    words = [(field, word) for field, text in pair.items() for word in text.split()]
    assert [(item["field"], item["word"]) for item in best["explanation"]] == words
    assert_explained(api, CLASSIFY, pair, best)


def test_each_of_several_texts_is_explained(api: Send) -> None:
    texts = ["good", "", "a bad film", " ", "good"]
    assert result_of(api, CLASSIFY, texts, explain=True) == [result_of(api, CLASSIFY, text, explain=True)[0] for text in texts]
    assert [len(labels[0]["explanation"]) for labels in result_of(api, CLASSIFY, texts, explain=True)] == [1, 0, 3, 0, 1]


@pytest.mark.parametrize(("unit", "expected"), [("code_points", (3, 7)), ("utf16", (4, 8)), ("UTF8", (6, 10))])
def test_offsets_are_in_the_requested_unit(api: Send, unit: str, expected: tuple[int, int]) -> None:
    ((best, *_),) = result_of(api, CLASSIFY, "👍 good", explain=True, offset_unit=unit)
    item = best["explanation"][-1]
    assert item["word"] == "good"
    assert (item["start"], item["end"]) == (expected[0] - 1, expected[1] - 1)


def test_only_the_kept_words_of_a_truncated_text_are_explained(api: Send) -> None:
    """A variant without a word gets no word from the truncated rest. Headers report the truncation."""
    text = " ".join(["good", "film", "bad"] * 30)
    response = post(api, {"inputs": text, "parameters": {"explain": True}}, path=CLASSIFY)
    explanation = response.json()[0][0]["explanation"]
    visible_text = text[: explanation[-1]["end"]]
    assert len(explanation) == 62
    assert (response.headers["x-truncated"], response.headers["x-windows"]) == ("1", f"0-{len(visible_text)}")
    (alone,) = result_of(api, CLASSIFY, visible_text, explain=True)
    assert explanation == alone[0]["explanation"]


QUESTION, PASSAGE = "was the film good ?", "the book was dull . a very good film , but long . not bad"


def test_importance_for_an_answer_uses_the_score_of_its_span(tmp_path: Path, api: Send) -> None:
    model = Service(tiny.bundle(tmp_path, task="question-answering", max_length=64))
    inputs = {"question": QUESTION, "context": PASSAGE}
    best, second = result_of(api, ANSWER, inputs, explain=True, top_k=2, max_answer_len=3)
    assert "explanation" not in second
    places = [len(PASSAGE[:at].split()) for at in (best["start"], best["end"])]
    span = range(places[0], places[1])
    words = PASSAGE.split()
    assert [item["word"] for item in best["explanation"]] == [*QUESTION.split(), *words[: span.start], *words[span.stop :]]
    for item in best["explanation"]:
        variant = without(inputs, item)
        shift = item["field"] == "context" and item["start"] < best["start"]
        score = span_score(model, variant["question"], variant["context"], span.start - shift, span.stop - 1 - shift)
        assert item["importance"] == pytest.approx(best["score"] - score, abs=1e-6)


def test_an_empty_answer_is_explained(tmp_path: Path, api: Send) -> None:
    model = Service(tiny.bundle(tmp_path, task="question-answering", max_length=64))
    answers = {
        text: result_of(api, ANSWER, {"question": "not ?", "context": text}, explain=True, handle_impossible_answer=True)
        for text in ("good", "dull film", "a book", "bad !", "very long .")
    }
    nothing = {text: answer for text, answer in answers.items() if answer["answer"] == ""}
    assert nothing
    for text, answer in nothing.items():
        assert len(answer["explanation"]) == 2 + len(text.split())
        for item in answer["explanation"]:
            texts = without({"question": "not ?", "context": text}, item)
            assert item["importance"] == pytest.approx(answer["score"] - span_score(model, **texts, first=-1, last=-1), abs=1e-6)


def test_the_window_with_the_answer_to_a_long_passage_is_explained(api: Send) -> None:
    passage = " ".join(f"{word} {i}" for i, word in enumerate(["book", "good", "film", "dull"] * 10))
    parameters = {"explain": True, "max_seq_len": 32, "doc_stride": 8}
    response = post(api, {"inputs": {"question": "good ?", "context": passage}, "parameters": parameters}, path=ANSWER)
    result_ = response.json()
    windows = [tuple(map(int, part.removeprefix("context=").split("-"))) for part in response.headers["x-windows"].split(", ")]
    context = [item for item in result_["explanation"] if item["field"] == "context"]
    span = (min(item["start"] for item in [*context, result_]), max(item["end"] for item in [*context, result_]))
    assert (windows[0][0], windows[-1][1]) == (0, len(passage))
    assert all(left[1] > right[0] > left[0] for left, right in pairwise(windows))
    assert span in windows
    assert [passage[item["start"] : item["end"]] for item in context] == [item["word"] for item in context]


def test_too_many_words_are_refused_with_their_number(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, max_length=512)
    tiny.bundle(tmp_path, "passages", task="question-answering", max_length=512)
    text = "good " * (MAX_WORDS + 1)
    assert f" {MAX_WORDS + 1} words " in error_of_inputs(tmp_path, CLASSIFY, text, explain=True)
    long = error_of_inputs(tmp_path, ANSWER, {"question": "good", "context": text}, explain=True, max_seq_len=512)
    assert f" {MAX_WORDS + 2} words " in long
    assert "`max_seq_len`" in long


def test_parameters_that_do_not_fit_an_explanation_are_refused(api: Send) -> None:
    assert "needs `explain`" in error_of_inputs(api, CLASSIFY, "good", offset_unit="utf8")
    assert "`duplicates`" in error_of_inputs(api, ANSWER, {"question": "good ?", "context": "a film"}, explain=True, duplicates="sum")
    assert "needs 3" in error_of_inputs(api, CLASSIFY, "good film " * 60, explain=True, window="mean")
    assert result_of(api, CLASSIFY, TEXT, explain=True, window="max") == result_of(api, CLASSIFY, TEXT, explain=True)


async def test_admission_counts_the_variants(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, max_length=64)
    engine = FakeEngine()
    async with serving(fake_service(tmp_path, engine, max_queue_tokens=600)) as client:
        body = {"inputs": "good " * 40}
        answers = [await client.post(CLASSIFY, json=body | {"parameters": {"explain": explain}}) for explain in (False, True)]
        assert [response.status_code for response in answers] == [200, 413]
    assert engine.batches == [1]


def test_the_most_important_word_is_the_obvious_one() -> None:
    model = included("sentiment")
    for text, key in {"The script is awful.": "awful", "I loved every minute of it.": "loved", "It never bores.": "never"}.items():
        request = classify_input(text, explain=True, function_to_apply="none")
        words_ = drive(generator_of(classify, request, model.tokenizer, model.manifest), lambda step: model.rows(step.encodings))
        assert max(words_[0]["explanation"], key=lambda item: item["importance"])["word"] == key
