"""With `truncation_side: left` in the tokenizer, a long text loses its beginning, and windows start from its end.

`tests/exporting/test_random_checkpoints.py` compares the tokens of both sides with transformers'.
"""

from dataclasses import replace

import pytest

from bertserve.service.bundle.files import load_bundle
from bertserve.service.tasks import classify, embed, rerank, zero_shot
from bertserve.service.tasks.step import Step, TextInput
from bertserve.service.text.tokenizer import Tokenizer
from support import tiny
from support.fakes import Head
from support.task_runs import classify_input, encode

LENGTH = 32
TEXT = " ".join(word for word in tiny.VOCABULARY * 3 if word.isalpha())
CLS, SEP = 2, 3


@pytest.fixture(name="left", scope="module")
def left_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    bundle = load_bundle(tiny.bundle(tmp_path_factory.mktemp("left")))
    return Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer.model_copy(update={"truncation_side": "left"}))


def ids(step: Step) -> list[list[int]]:
    return [encoding.ids.tolist() for encoding in step.encodings]


def test_zero_shot_only_cuts_the_text(left: Tokenizer) -> None:
    request = TextInput(TEXT, zero_shot.ZeroShotParameters(candidate_labels=["good"], hypothesis_template="a {} film"))
    text, hypothesis = left.tokenize([TEXT, "a good film"])
    room = LENGTH - 3 - len(hypothesis)

    assert ids(encode(zero_shot, request, left)) == [[CLS, *text.ids[-room:], SEP, *hypothesis.ids, SEP]]


def test_windows_start_from_the_end(left: Tokenizer) -> None:
    """They are in text order, and only the first one can be shorter."""
    windows_input = classify_input(TEXT, window="mean", stride=5)
    [text], encodings = left.tokenize([TEXT]), encode(classify, windows_input, left)

    assert ids(encodings)[-1] == [CLS, *text.ids[2 - LENGTH :], SEP]
    assert {len(window) for window in ids(encodings)[1:]} == {LENGTH}
    starts = [start for _, start, _ in encodings.read_spans]
    assert sorted(starts) == starts


def test_a_request_overrides_the_truncation_side(left: Tokenizer, tokenizer: Tokenizer) -> None:
    right = embed.EmbedParameters(truncation_direction="right")
    for task, override, plain in (
        (embed, embed.EmbedInput(TEXT, right), embed.EmbedInput(TEXT, embed.EmbedParameters())),
        (rerank, rerank.RerankInput("a", [TEXT], truncation_side="right"), rerank.RerankInput("a", [TEXT])),
        (classify, replace(classify_input(TEXT), truncation_side="right"), classify_input(TEXT)),
    ):
        cut_right, override_cut, cut_left = (
            ids(encode(task, request, tokens, Head(labels=("LABEL_0",))))
            for request, tokens in ((plain, tokenizer), (override, left), (plain, left))
        )
        assert cut_right == override_cut != cut_left


def test_the_end_of_a_long_text_is_read(left: Tokenizer) -> None:
    text = " ".join(["bad"] * 30 + ["good"] * (LENGTH - 2))
    encodings = encode(classify, classify_input(text), left)
    assert encodings.truncated
    assert (("", text.index("good"), len(text)),) == encodings.read_spans
    pair = encode(classify, classify_input("a film", text), left)
    (first_field, first_start, _), (second_field, second_start, second_end) = pair.read_spans
    assert first_field == "text"
    assert second_field == "text_pair"
    assert first_start == 0
    assert second_end == len(text)
    assert "bad" not in text[second_start:]
