"""With `truncation_side: left` in the tokenizer, a long text loses its beginning, and windows start from its end, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import tiny
from bertserve.service.bundle.files import load_bundle
from bertserve.service.tasks import classify, embed, multiple_choice, rerank, token_classification, zero_shot
from bertserve.service.tasks.batch import Batch, ReadSpan
from bertserve.service.text.tokenizer import Tokenizer
from bundles import exported
from checkpoints import bert, edit_json
from task_runs import encode

pytestmark = pytest.mark.torch

LENGTH = 24
WORDS = [word for word in tiny.VOCABULARY if word.isalpha()]
Rows = list[tuple[list[int], list[int]]]

texts = st.lists(st.sampled_from([*WORDS, "goodish", "unfilmed", "很"]), max_size=60).map(" ".join)
long_text = st.lists(st.sampled_from(WORDS), min_size=LENGTH, max_size=90).map(" ".join)
some_text = st.lists(st.sampled_from(WORDS), min_size=1, max_size=60).map(" ".join)


@pytest.fixture(name="left", scope="module")
def left_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    bundle = load_bundle(tiny.bundle(tmp_path_factory.mktemp("left"), max_length=LENGTH))
    return Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer.model_copy(update={"truncation_side": "left"}))


def transformers_tokenizer(side: Literal["left", "right"] = "left") -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer(), unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", truncation_side=side
    )


def expected(*texts: str, truncation: str = "longest_first", stride: int | None = None, side: Literal["left", "right"] = "left") -> Rows:
    """Returns the ids and type ids of each window from transformers, in text order."""
    batch = transformers_tokenizer(side)(
        *texts,
        truncation=truncation,
        max_length=LENGTH,
        stride=stride or 0,
        return_overflowing_tokens=stride is not None,
        return_token_type_ids=True,
    )
    if stride is None:
        return [(batch["input_ids"], batch["token_type_ids"])]
    return list(zip(batch["input_ids"], batch["token_type_ids"], strict=True))[::-1]


def rows(encoded: Batch) -> Rows:
    return [(encoding.ids.tolist(), encoding.type_ids.tolist()) for encoding in encoded.encodings]


@given(texts | long_text, st.none() | some_text | long_text)
def test_texts_and_pairs_keep_their_ends(left: Tokenizer, text: str, pair: str | None) -> None:
    """/classify, /embed, /rerank and /choose read the same tokens as transformers with `longest_first`."""
    assert rows(encode(classify, classify.ClassifyRequest(text, pair), left)) == expected(text, *([] if pair is None else [pair]))
    assert rows(encode(embed, embed.EmbedRequest(text), left)) == expected(text)
    if pair is not None:
        both = [*expected(text, pair), *expected(text, pair * 2)]
        assert rows(encode(rerank, rerank.RerankRequest(text, (pair, pair * 2), rerank.RerankOptions()), left)) == both
        assert rows(encode(multiple_choice, multiple_choice.ChooseRequest(text, (pair, pair * 2)), left)) == both


@given(texts | long_text, st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True))
def test_zero_shot_only_cuts_the_text(left: Tokenizer, text: str, labels: list[str]) -> None:
    request = zero_shot.ZeroShotRequest(text, zero_shot.ZeroShotParameters(candidate_labels=labels, hypothesis_template="a {} film"))
    assert rows(encode(zero_shot, request, left)) == [
        row for label in labels for row in expected(text, f"a {label} film", truncation="only_first")
    ]


@given(some_text | long_text, st.integers(0, 10))
def test_windows_agree_with_transformers(left: Tokenizer, text: str, stride: int) -> None:
    windowed = classify.ClassifyRequest(text, parameters=classify.ClassifyParameters(window="mean", stride=stride))
    assert rows(encode(classify, windowed, left)) == expected(text, stride=stride)
    found = encode(token_classification, token_classification.NerRequest(text, token_classification.NerParameters(stride=stride)), left)
    assert rows(found) == expected(text, stride=stride)
    # the spans are in text order
    assert [span.start for span in found.read] == sorted(span.start for span in found.read)


def test_a_request_overrides_the_truncation_side(left: Tokenizer) -> None:
    text = " ".join(WORDS * 9)
    direction: Any = {"truncation_direction": "right"}
    assert rows(encode(embed, embed.EmbedRequest(text, embed.EmbedParameters(**direction)), left)) == expected(text, side="right")
    ranked = rerank.RerankRequest("a", (text,), rerank.RerankOptions(**direction))
    assert rows(encode(rerank, ranked, left)) == expected("a", text, side="right")
    assert rows(encode(classify, classify.ClassifyRequest(text, truncation_side="right"), left)) == expected(text, side="right")


def test_the_end_of_a_long_text_is_read(left: Tokenizer) -> None:
    text = " ".join(["bad"] * 30 + ["good"] * (LENGTH - 2))
    found = encode(classify, classify.ClassifyRequest(text), left)
    assert found.truncated
    assert found.read == (ReadSpan("", text.index("good"), len(text)),)
    pair = encode(classify, classify.ClassifyRequest("a film", text), left)
    assert [span.field for span in pair.read] == ["text", "text_pair"]
    assert (pair.read[0].start, pair.read[1].end) == (0, len(text))
    assert "bad" not in text[pair.read[1].start :]


def cut_at_the_beginning(folder: Path, **options: Any) -> Path:
    source = bert(folder, **options)
    edit_json(source / "tokenizer_config.json", truncation_side="left")
    return source


@pytest.mark.parametrize(
    "head",
    ["ForSequenceClassification", "ForQuestionAnswering"]
    + [pytest.param(head, marks=pytest.mark.full_grid) for head in ("ForTokenClassification", "Model", "ForMultipleChoice")],
)
def test_checkpoints_of_each_task_are_exported(tmp_path: Path, head: str) -> None:
    """The samples include truncated texts and windows, so that parity compares both with transformers."""
    bundle = exported(cut_at_the_beginning(tmp_path, architecture=f"Bert{head}", positions=64, labels=("first", "second")))
    assert bundle.manifest.tokenizer.truncation_side == "left"
