"""The wire of /ner, /answer and /fill-mask over tiny bundles of all tasks: shapes, parameters, errors, long texts, pages."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

import tiny
from application import LONG, Send, answered, ask, assert_same, classify, refused, rejected
from bertserve.service.http.inference import _headers
from bertserve.service.serving.build import build
from bertserve.service.serving.work import Prediction
from bertserve.service.settings import Settings
from bertserve.service.tasks import fill_mask
from bertserve.service.tasks.body import Limits
from bertserve.service.wire.call import Call, Content
from bertserve.service.wire.reading import validate_body

NER, ANSWER, FILL = "/ner", "/answer", "/fill-mask"
QUESTION = {"question": "good?", "context": "a great film and a dull book"}
INPUTS: dict[str, Any] = {"/classify": "good", NER: "a good film was bad", ANSWER: QUESTION, FILL: "a [MASK] film"}
FIELDS = {
    NER: ["end", "entity_group", "score", "start", "word"],
    ANSWER: ["answer", "end", "score", "start"],
    FILL: ["score", "sequence", "token", "token_str"],
}
EVERYTHING: dict[str, Any] = {"ignore_labels": []}
ROOM = 30  # text tokens that a tiny bundle takes
UNICODE = "a cafe\u0301 \U0001f600 日本語 was good\r\nfilm,\tbad\u200b book \U0001f469\u200d\U0001f469\u200d\U0001f467 x\ufe0f n\u0303o. "
WINDOWED = UNICODE * 4  # several windows


# Shapes


@pytest.mark.parametrize("path", [NER, FILL])
def test_one_text_gives_a_list_of_objects(api: Send, path: str) -> None:
    """A text gives the list of its entities, or of the tokens for its mask, each with exactly the documented fields."""
    result = answered(api, path, INPUTS[path])
    assert result
    assert [FIELDS[path]] * len(result) == [sorted(item) for item in result]


def test_one_question_gives_an_object(api: Send) -> None:
    assert FIELDS[ANSWER] == sorted(answered(api, ANSWER, QUESTION))


@pytest.mark.parametrize("text", ["", " \r\n\t", "\u200b"])
def test_a_text_without_tokens_has_no_entities(api: Send, text: str) -> None:
    assert [] == answered(api, NER, text)
    assert_same([[], answered(api, NER, "good"), []], answered(api, NER, [text, "good", text]))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"question": "", "context": "good"}, "inputs: `question` is empty"),
        ({"question": "good?", "context": ""}, "inputs: `context` is empty"),
        ({"question": " \n", "context": "good"}, "inputs: `question` is empty"),
        ([QUESTION, {"question": "good?", "context": "\t"}], "inputs[1]: `context` is empty"),
    ],
)
def test_an_empty_question_or_passage_is_an_error(api: Send, inputs: Any, message: str) -> None:
    """Without a question or a passage there is no answer, which is said, with the place in a list."""
    assert refused(api, ANSWER, inputs).startswith(message)


@pytest.mark.parametrize(("inputs", "name"), [("", "inputs"), ("a film", "inputs"), (["a [MASK]", "a film"], "inputs[1]")])
def test_a_text_without_a_mask_is_an_error(api: Send, inputs: Any, name: str) -> None:
    """A text with nothing to fill in is refused, and the message shows the mask."""
    assert refused(api, FILL, inputs).startswith(f"{name}: the text has no mask; write `[MASK]`")


# What is refused


# /ner


def test_entities_tile_the_text_when_nothing_is_ignored(api: Send) -> None:
    """With no label ignored the entities cover the text from its first token to its last, in order and without overlap."""
    entities = answered(api, NER, "  a good film, zq. ", **EVERYTHING)
    assert (2, 18) == (entities[0]["start"], entities[-1]["end"])
    assert all(one["end"] <= other["start"] for one, other in pairwise(entities))


@pytest.mark.parametrize("name", ["simple", "SIMPLE", "Simple"])
def test_the_strategy_is_read_in_any_case(api: Send, name: str) -> None:
    """`aggregation_strategy` in any case is the same, and `simple` is the default."""
    assert answered(api, NER, UNICODE) == answered(api, NER, UNICODE, aggregation_strategy=name)


def test_the_strategy_none_gives_tokens(api: Send) -> None:
    """`none` gives each token as the vocabulary spells it, with its label and its index from 1."""
    tokens = answered(api, NER, "zq good.", aggregation_strategy="none", **EVERYTHING)
    assert ["end", "entity", "index", "score", "start", "word"] == sorted(tokens[0])
    assert [("z", 1, 0, 1), ("##q", 2, 1, 2), ("good", 3, 3, 7), (".", 4, 7, 8)] == [
        (token["word"], token["index"], token["start"], token["end"]) for token in tokens
    ]
    assert {token["entity"] for token in tokens} <= set(tiny.LABELS_OF["token-classification"])


@pytest.mark.parametrize("strategy", ["first", "average", "max"])
def test_word_strategies_do_not_cut_words(api: Send, strategy: str) -> None:
    text = "zqxw good abcdef bad"
    entities = answered(api, NER, text, aggregation_strategy=strategy, **EVERYTHING)
    assert " ".join(text.split()) == " ".join(entity["word"] for entity in entities)


def test_ignored_labels_are_left_out(api: Send) -> None:
    """`ignore_labels` replaces the default, by entity group, and by label for the strategy none."""
    everything = answered(api, NER, INPUTS[NER], **EVERYTHING)
    groups = {entity["entity_group"] for entity in everything}
    assert {"O", "PER"} <= groups
    assert_same([e for e in everything if e["entity_group"] != "PER"], answered(api, NER, INPUTS[NER], ignore_labels=["PER"]))
    assert_same([e for e in everything if e["entity_group"] != "O"], answered(api, NER, INPUTS[NER]))
    assert [] == answered(api, NER, INPUTS[NER], ignore_labels=list(groups))
    tokens = answered(api, NER, INPUTS[NER], aggregation_strategy="none", ignore_labels=["B-PER", "O"])
    assert not {"B-PER", "O"} & {token["entity"] for token in tokens}


@pytest.mark.parametrize("stride", [None, 0, 1, 15, 29])
def test_a_long_text_is_read_to_its_end(api: Send, stride: int | None) -> None:
    """Every token of a text of several windows comes out once, in order, whatever the windows share."""
    tokens = answered(api, NER, LONG, aggregation_strategy="none", stride=stride, **EVERYTHING)
    assert LONG.split() == [token["word"] for token in tokens]
    assert list(range(1, 61)) == [token["index"] for token in tokens]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("text", [UNICODE, WINDOWED], ids=["one window", "several windows"])
def test_offsets_of_entities_are_slices(api: Send, strategy: str, text: str) -> None:
    """Offsets count the code points of the caller's text, of one window and of several, beside emoji, marks, CJK and CRLF."""
    entities = answered(api, NER, text, aggregation_strategy=strategy, **EVERYTHING)
    for entity in entities:
        part = text[entity["start"] : entity["end"]]
        if strategy != "none":
            assert part == entity["word"]
        assert part == part.strip()
        assert text[entity["end"] : entity["end"] + 1] not in ("\u0301", "\u0303")
    assert all(one["end"] <= other["start"] for one, other in pairwise(entities))
    assert (0, len(text.rstrip())) == (entities[0]["start"], entities[-1]["end"])


def test_a_stride_that_leaves_no_room_names_the_numbers(api: Send) -> None:
    """A stride of a window or more is refused for a text that needs windows, and does not matter for another."""
    message = refused(api, NER, ["good", LONG], stride=ROOM)
    assert message.startswith("inputs[1]: `stride` is 30, which is too large for windows of 30 tokens")
    assert_same(answered(api, NER, "good"), answered(api, NER, "good", stride=ROOM))


@pytest.mark.parametrize(
    ("path", "inputs", "parameters"),
    [
        (NER, LONG, {"stride": ROOM}),
        (NER, LONG, {"stride": 10**9}),
        (ANSWER, {"question": "good?", "context": LONG}, {"doc_stride": 10**9}),
        (ANSWER, {"question": "good " * 40, "context": LONG}, {}),
    ],
)
def test_what_has_no_room_is_not_refused_for_its_size(tmp_path: Path, path: str, inputs: Any, parameters: dict[str, Any]) -> None:
    """A stride or a question that never fits is 422 and not 413 or 429, however small the queue: it would never run."""
    tiny.bundle(tmp_path, task="token-classification" if path == NER else "question-answering")
    settings = {"max_batch_tokens": 64, "max_queue_tokens": 512}
    response = classify(tmp_path, {"inputs": inputs, "parameters": parameters}, path=path, settings=settings)
    assert "stride" in rejected(response, 422, "invalid_value")


# /answer


@pytest.mark.parametrize(("top_k", "kind"), [(None, dict), (1, dict), (2, list), (3, list), (1000, list)])
def test_answers_are_a_list_if_more_than_one_is_asked_for(api: Send, top_k: int | None, kind: type) -> None:
    """The answer is an object, and a list exactly if `top_k` is over 1; the same holds for each of a list."""
    parameters = {} if top_k is None else {"top_k": top_k}
    alone = answered(api, ANSWER, QUESTION, **parameters)
    assert isinstance(alone, kind)
    assert_same([alone, alone], answered(api, ANSWER, [QUESTION, QUESTION], **parameters))
    best = alone[0] if isinstance(alone, list) else alone
    assert_same(answered(api, ANSWER, QUESTION), best)


def test_a_list_of_answers_may_have_one(api: Send) -> None:
    """Where there is but one answer, `top_k` over 1 still gives a list."""
    assert ["good"] == [answer["answer"] for answer in answered(api, ANSWER, {"question": "a", "context": "good"}, top_k=5)]


def test_answers_come_by_score_and_once(api: Send) -> None:
    """Answers fall in score within 0 and 1, and no text comes twice, case aside."""
    found = answered(api, ANSWER, {"question": "good?", "context": "Good film good FILM bad good"}, top_k=100)
    scores = [answer["score"] for answer in found]
    assert sorted(scores, reverse=True) == scores
    assert all(0 <= score <= 1 for score in scores)
    assert len({answer["answer"].lower() for answer in found}) == len(found)


def test_no_answer_is_longer_than_allowed(api: Send) -> None:
    """`max_answer_len` limits the tokens of an answer."""
    for longest in (1, 2, 99):
        found = answered(api, ANSWER, QUESTION, top_k=1000, max_answer_len=longest)
        assert min(longest, 7) == max(len(answer["answer"].split()) for answer in found)


def test_answers_are_widened_to_words_unless_told(api: Send) -> None:
    """With `align_to_words` an answer is whole words, without it a word's pieces are answers too."""
    inputs = {"question": "good?", "context": "zqx film"}
    assert {"zqx", "film"} == {answer["answer"] for answer in answered(api, ANSWER, inputs, top_k=9, max_answer_len=1)}
    pieces = answered(api, ANSWER, inputs, top_k=9, max_answer_len=1, align_to_words=False)
    assert {"z", "q", "x", "film"} == {answer["answer"] for answer in pieces}


def test_no_answer_can_be_the_answer(api: Send) -> None:
    """`handle_impossible_answer` lets the empty answer in, at 0, and nothing else does."""
    inputs = {"question": "good?", "context": "film"}
    assert "" not in [answer["answer"] for answer in answered(api, ANSWER, inputs, top_k=10)]
    found = answered(api, ANSWER, inputs, top_k=10, handle_impossible_answer=True)
    [null] = [answer for answer in found if not answer["answer"]]
    assert (0, 0) == (null["start"], null["end"])
    assert 0 < null["score"] < 1


def test_equal_answers_add_up_when_asked(api: Send) -> None:
    """`duplicates: sum` adds the scores of equal texts up, in any case; `best`, the default, keeps the best."""
    inputs = {"question": "good?", "context": "film film film film"}
    best, summed = (answered(api, ANSWER, inputs, max_answer_len=1, duplicates=how) for how in ("best", "SUM"))
    assert_same(answered(api, ANSWER, inputs, max_answer_len=1), best)
    assert ("film", "film") == (best["answer"], summed["answer"])
    assert pytest.approx(4 * best["score"], rel=1e-4) == summed["score"]


@pytest.mark.parametrize("longest", [1, 64, None])
def test_the_length_of_questions_has_no_effect(api: Send, longest: int | None) -> None:
    """`max_question_len` is accepted and does nothing."""
    assert answered(api, ANSWER, QUESTION) == answered(api, ANSWER, QUESTION, max_question_len=longest)


@pytest.mark.parametrize(
    "parameters",
    [{}, {"doc_stride": 0}, {"doc_stride": 20}, {"max_seq_len": 16}, {"max_seq_len": 9, "doc_stride": 2}, {"duplicates": "sum"}],
)
def test_a_long_passage_is_read_to_its_end(api: Send, parameters: dict[str, Any]) -> None:
    """Each word of a passage of several windows can be the answer, whatever the windows' length and stride."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = [f"{one}{other}" for one in letters[:4] for other in letters[:9]]
    inputs = {"question": "good?", "context": " ".join(words)}
    found = answered(api, ANSWER, inputs, top_k=1000, max_answer_len=1, **parameters)
    # a word at a window's edge may be halved in "sum", as in the reference
    assert set(words) <= {answer["answer"] for answer in found}
    for answer in found:
        assert inputs["context"][answer["start"] : answer["end"]] == answer["answer"]


@pytest.mark.parametrize("text", [UNICODE, WINDOWED], ids=["one window", "several windows"])
@pytest.mark.parametrize("longest", [1, 2, 15])
def test_offsets_of_answers_are_slices(api: Send, text: str, longest: int) -> None:
    """Offsets count the code points of the caller's passage, of one window and of several."""
    found = answered(api, ANSWER, {"question": "wer 😀 e\u0301?", "context": text}, top_k=1000, max_answer_len=longest)
    assert {"日", "\U0001f600", "book"} <= {answer["answer"] for answer in found}
    for answer in found:
        assert text[answer["start"] : answer["end"]] == answer["answer"]
        assert answer["answer"] == answer["answer"].strip()


def test_an_answer_keeps_its_combining_marks(api: Send) -> None:
    found = answered(api, ANSWER, {"question": "good?", "context": "a cafe\u0301 film"}, top_k=9, max_answer_len=1)
    assert {"a", "cafe\u0301", "film"} == {answer["answer"] for answer in found}


@pytest.mark.parametrize(
    ("question", "parameters", "numbers"),
    [
        (20, {}, (32, 9, 20, 16)),
        (5, {"doc_stride": 24}, (32, 24, 5, 24)),
        (40, {"doc_stride": 0}, (32, 0, 40, 0)),
        (5, {"max_seq_len": 10, "doc_stride": 3}, (10, 2, 5, 3)),
        (5, {"max_seq_len": 1}, (1, 0, 5, 0)),
    ],
)
def test_no_room_for_the_passage_names_the_numbers(
    api: Send, question: int, parameters: dict[str, Any], numbers: tuple[int, int, int, int]
) -> None:
    """A question that leaves no room for the stride is 422, with window, room, question and stride."""
    inputs = {"question": " ".join(["good"] * question), "context": LONG}
    length, room, asked, stride = numbers
    expected = f"inputs[1]: `doc_stride` is {stride}, but a window of {length} tokens has room for {room} tokens of the passage after a question of {asked};"
    assert refused(api, ANSWER, [{"question": "who?", "context": "x y z"}, inputs] if length > 8 else [inputs], **parameters).startswith(
        expected if length > 8 else expected.replace("inputs[1]", "inputs[0]")
    )


@pytest.mark.parametrize(("length", "ok"), [(32, True), (33, False), (384, False)])
def test_a_window_over_the_models_length_is_an_error(api: Send, length: int, ok: bool) -> None:
    """`max_seq_len` over what the model takes is refused with both numbers."""
    if ok:
        assert_same(answered(api, ANSWER, QUESTION), answered(api, ANSWER, QUESTION, max_seq_len=length))
    else:
        message = refused(api, ANSWER, QUESTION, max_seq_len=length)
        assert message.startswith(f"inputs: `max_seq_len` is {length} and the model takes 32")


# /fill-mask


@pytest.mark.parametrize("top_k", [1, 2, 5, 100_000])
def test_top_k_limits_the_tokens(api: Send, top_k: int) -> None:
    """The `top_k` best tokens come by falling score, at most all of the vocabulary; five by default."""
    everything = answered(api, FILL, INPUTS[FILL], top_k=len(tiny.VOCABULARY))
    found = answered(api, FILL, INPUTS[FILL], top_k=top_k)
    assert_same(everything[:top_k], found)
    assert_same(everything[:5], answered(api, FILL, INPUTS[FILL]))
    assert pytest.approx(1, abs=1e-5) == sum(item["score"] for item in everything)
    assert [(tiny.VOCABULARY[item["token"]]) for item in everything] == [item["token_str"] for item in everything]


def test_a_sequence_is_the_text_with_the_token(api: Send) -> None:
    """`sequence` is the text with its mask filled."""
    for item in answered(api, FILL, INPUTS[FILL], targets=["good", "bad"]):
        assert f"a {item['token_str']} film" == item["sequence"]


def test_several_masks_give_a_list_for_each(api: Send) -> None:
    """Several masks give a list each, from left to right, with the other masks left in `sequence`."""
    first, second = answered(api, FILL, "a [MASK] film, [MASK]!", targets=["good", "bad"])
    for item in first:
        assert f"[CLS] a {item['token_str']} film, [mask]! [SEP]" == lowered(item["sequence"])
    for item in second:
        assert f"[CLS] a [mask] film, {item['token_str']}! [SEP]" == lowered(item["sequence"])
    mixed = answered(api, FILL, ["a [MASK] film", "a [MASK] film, [MASK]!"], targets=["good", "bad"])
    assert_same([answered(api, FILL, "a [MASK] film", targets=["good", "bad"]), [first, second]], mixed)


def lowered(sequence: str) -> str:
    """Returns a sequence with the tiny tokenizer's spaces before marks of punctuation taken away, and its mask in lower case."""
    return sequence.replace(" ,", ",").replace(" !", "!").replace("[MASK]", "[mask]")


@pytest.mark.parametrize("targets", ["good", ["good"], ["good", "good"]])
def test_one_target_gives_one_token(api: Send, targets: Any) -> None:
    """A target, alone or in a list, once or twice, gives its token with the score that it has among all."""
    everything = {item["token_str"]: item for item in answered(api, FILL, INPUTS[FILL], top_k=1000)}
    response = ask(api, FILL, INPUTS[FILL], targets=targets)
    assert_same([everything["good"]], response.json())
    assert "x-hf-warning" not in response.headers


def test_targets_limit_top_k(api: Send) -> None:
    """With targets at most their number is returned, and `top_k` counts among them."""
    targets = ["good", "bad", "dull"]
    everything = answered(api, FILL, INPUTS[FILL], targets=targets)
    assert sorted(targets) == sorted(item["token_str"] for item in everything)
    assert_same(everything[:2], answered(api, FILL, INPUTS[FILL], targets=targets, top_k=2))


def test_targets_outside_the_vocabulary_are_warned_of(api: Send) -> None:
    """A target that is no vocabulary entry stands for its first piece, which the warning says with numbers."""
    response = ask(api, FILL, INPUTS[FILL], targets=["zebra", "good", "Film"])
    assert {"z", "good", "film"} == {item["token_str"] for item in response.json()}
    expected = "targets; 2 of 3 are not in the vocabulary, so their first tokens are used: z, film"
    assert [expected] == response.headers.get_list("x-hf-warning")
    assert "x-truncated" not in response.headers


def test_the_warning_does_not_grow_with_the_list(api: Send) -> None:
    """Targets belong to the whole request, so their warning comes once, however many inputs there are."""
    response = ask(api, FILL, [INPUTS[FILL]] * 40, targets=["zebra"])
    assert "targets; 1 of 1 are not in the vocabulary, so their first tokens are used: z" == response.headers["x-hf-warning"]


def test_a_warning_is_a_header_whatever_the_target(api: Send) -> None:
    """Targets of any characters, more than a few, make a header of ASCII that stays short."""
    response = ask(api, FILL, INPUTS[FILL], targets=["日本", "\U0001f600", "é\r\nx-evil: 1", *(f"z{i}" for i in range(500))])
    assert 200 == response.status_code
    assert response.headers["x-hf-warning"].isascii()
    assert len(response.headers["x-hf-warning"]) < 300
    assert "x-evil" not in response.headers


def test_headers_have_printable_ascii_only(models: Path) -> None:
    """A piece of a vocabulary with a newline, or a letter of no Latin alphabet, does not end a header's line or break it."""
    prediction = Prediction([[]], [], ["targets; the first pieces were used: \n\r\x00\x7f, é, 日, \U0001f600, a\\b"], warned=[0])
    model = build(Settings(models=models)).registry.models["tiny"]
    body = validate_body("text-classification", {"inputs": "good"}, Limits(1, 9))
    headers = _headers(Call("text-classification", model, body, lambda _: []), Content(b"[]", "application/json", {}), prediction)

    assert r"targets; the first pieces were used: \n\r\x00\x7f, \xe9, \u65e5, \U0001f600, a\\b" == dict(headers)[b"x-hf-warning"].decode()
    assert all(32 <= byte < 127 for _, value in headers for byte in value)


@pytest.mark.parametrize("targets", ["", [""], ["", " \n", "\u200b"]])
def test_targets_without_a_token_are_an_error(api: Send, targets: Any) -> None:
    assert "`targets` has no word" in refused(api, FILL, INPUTS[FILL], targets=targets)


@pytest.mark.parametrize(
    "text",
    ["a [mask] film", "a [Mask] film", "a <mask> film", "a ___ film", "a [ MASK ] film", "a {{mask}} film", "a [MASK film", "a MASK film"],
)
def test_a_mask_spelled_wrongly_shows_the_right_one(api: Send, text: str) -> None:
    """A mask of another model, or with odd spacing, is no mask, and the message has the one to write."""
    message = refused(api, FILL, ["a [MASK] film", text])
    assert message.startswith("inputs[1]: ")
    assert message.endswith("; write `[MASK]` for each word to fill in.")


def test_an_answer_of_too_many_tokens_is_refused(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens for one mask are given, for many masks and texts they are too many; few for each are not."""
    vocabulary = len(answered(api, FILL, "a [MASK] film", top_k=10**9))
    candidate = fill_mask.CANDIDATE_BYTES + fill_mask.PIECE_BYTES + len('"a [MASK] film"') + 3
    monkeypatch.setattr("bertserve.service.tasks.cost.MAX_ANSWER_BYTES", vocabulary * candidate)
    assert vocabulary == len(answered(api, FILL, "a [MASK] film", top_k=10**9))
    for inputs in (["a [MASK] film"] * 2, "[MASK] [MASK]"):
        message = rejected(ask(api, FILL, inputs, top_k=vocabulary), 413, "too_large")
        assert "the response would have" in message
        assert "a smaller `top_k`" in message
    assert 2 == len(answered(api, FILL, ["a [MASK] film"] * 2, top_k=3))


def test_masks_have_a_limit(api: Send) -> None:
    """More than 64 masks in a text are refused with both numbers; 64 are answered."""
    assert [1] * 64 == [len(found) for found in answered(api, FILL, "[MASK]" * 64, top_k=1)]
    assert refused(api, FILL, "[MASK] " * 65).startswith("inputs: the text has 65 masks and 64 are allowed")


@pytest.mark.parametrize("place", [0, 1, 29, 30, 45, 60])
def test_a_mask_anywhere_in_a_long_text_is_filled(api: Send, place: int) -> None:
    """A mask is filled wherever it stands in a text over the model's length, and `sequence` is the whole text."""
    words = LONG.split()
    text = " ".join([*words[:place], "[MASK]", *words[place:]])
    [item] = answered(api, FILL, text, targets=["book"])
    assert text.replace("[MASK]", "book") == item["sequence"]


def test_each_mask_of_a_long_text_has_its_window(api: Send) -> None:
    """A mask far from the others is scored as it is within the text around it."""
    text = f"a [MASK] film {LONG} the [MASK] was dull"
    first, last = answered(api, FILL, text)
    words = text.split()
    assert_same(
        [item["score"] for item in answered(api, FILL, " ".join(words[:ROOM]))],
        [item["score"] for item in first],
    )
    assert_same(
        [item["score"] for item in answered(api, FILL, " ".join(words[-ROOM:]))],
        [item["score"] for item in last],
    )


# All three


def test_special_tokens_in_a_text_are_text(api: Send) -> None:
    """Special tokens that a caller spells are read as the words and brackets that they consist of."""
    spelled = {token: ["[", token[1:-1].lower(), "]"] for token in ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")}
    text = " ".join(spelled)
    tokens = answered(api, NER, text, aggregation_strategy="none", **EVERYTHING)
    assert list(chain(*spelled.values())) == [token["word"] for token in tokens]
    found = answered(api, ANSWER, {"question": "[SEP]", "context": text}, top_k=1000, max_answer_len=3)
    assert set(spelled) <= {answer["answer"] for answer in found}
    [item] = answered(api, FILL, "[CLS] [MASK] [SEP] [PAD]", targets=["good"])
    assert "[ cls ] good [ sep ] [ pad ]" == item["sequence"]
