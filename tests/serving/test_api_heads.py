"""The wire format of /embed, /similarity, /rerank and /zero-shot on tiny bundles: results, parameters and errors of these tasks."""

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import tiny
from support.app_client import Send, assert_same, call, error_of, error_of_body, error_of_inputs, result, result_of

EMBED, SIMILARITY, RERANK, ZERO_SHOT = "/embed", "/similarity", "/rerank", "/zero-shot"
LABELS = {"candidate_labels": ["good", "bad", "a very dull book"]}
SENTENCES = {"source_sentence": "a good film", "sentences": ["a great film", "the book was dull"]}


def test_token_vectors_are_pooled_with_the_requested_method(api: Send) -> None:
    """Each method pools the vectors of all tokens, including special tokens; this bundle's default is the mean."""
    tokens = np.array(result_of(api, EMBED, "a good film", pooling="none")[0])
    assert tokens.shape == (5, tiny.HIDDEN)
    expected = {"mean": tokens.mean(axis=0), "max": tokens.max(axis=0), "cls": tokens[0]}
    for pooling, vector in expected.items():
        np.testing.assert_allclose([vector], result_of(api, EMBED, "a good film", pooling=pooling.upper()), atol=1e-5)
    np.testing.assert_allclose([expected["mean"]], result_of(api, EMBED, "a good film"), atol=1e-5)


def test_options_can_be_top_level_keys_or_parameters(api: Send) -> None:
    """The official client's flat keys have the same effect as the same names in `parameters`. Conflicting values are an error."""
    flat = result(api, EMBED, inputs="a good film", normalize=True, dimensions=3, truncate=None, encoding_format="float")
    assert_same(result_of(api, EMBED, "a good film", normalize=True, dimensions=3), flat)
    assert float(np.linalg.norm(flat[0])) == pytest.approx(1, abs=1e-6)
    assert_same(result(api, EMBED, inputs="a good film", normalize=True, parameters={"normalize": True, "dimensions": 3}), flat)
    assert "`normalize`" in error_of_body(api, EMBED, {"inputs": "a", "normalize": True, "parameters": {"normalize": False}})


@pytest.mark.parametrize("options", [{}, {"normalize": True, "dimensions": 3}, {"pooling": "none"}])
def test_vectors_can_be_encoded_as_base64(api: Send, options: dict[str, Any]) -> None:
    numbers = result_of(api, EMBED, ["a good film", ""], **options)
    texts_of_rows = result(api, EMBED, inputs=["a good film", ""], encoding_format="base64", **options)
    assert result_of(api, "/models/vectors", ["a good film", ""], encoding_format="BASE64", **options) == texts_of_rows
    rows = [row if isinstance(row, list) else [row] for row in texts_of_rows]
    decoded_rows = [np.array([np.frombuffer(base64.b64decode(text), dtype="<f4") for text in row]) for row in rows]
    for vectors, actual in zip(numbers, decoded_rows, strict=True):
        np.testing.assert_array_equal(np.atleast_2d(np.array(vectors, dtype=np.float32)), actual)
    assert result_of(api, EMBED, [], encoding_format="base64") == []


def test_similarity_is_the_cosine_of_the_vectors(api: Send) -> None:
    vectors = np.array(result_of(api, EMBED, [SENTENCES["source_sentence"], *SENTENCES["sentences"]], normalize=True))
    assert result_of(api, SIMILARITY, SENTENCES) == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)
    assert result_of(api, SIMILARITY, {"source_sentence": "good", "sentences": ["good"]}, pooling="cls") == pytest.approx([1.0], abs=1e-6)
    assert result_of(api, SIMILARITY, {"source_sentence": "good", "sentences": []}) == []


def test_similarity_needs_a_pooling(tmp_path: Path) -> None:
    """A model whose own pooling is `none` has no vector of a text, unless the request names a pooling."""
    tiny.bundle(tmp_path, task="feature-extraction", embedding=tiny.EMBEDDING | {"pooling": "none"})
    assert "`pooling`" in error_of(call(tmp_path, "POST", SIMILARITY, json={"inputs": SENTENCES}), 422, "invalid_value")
    pooled = call(tmp_path, "POST", SIMILARITY, json={"inputs": SENTENCES, "parameters": {"pooling": "mean"}})
    assert pooled.status_code == 200
    assert len(pooled.json()) == 2


def test_a_label_becomes_the_hypothesis_of_a_pair(api: Send) -> None:
    pair = {"text": "a good film", "text_pair": "the film was bad !"}
    [scores] = result_of(api, "/models/nli", pair, function_to_apply="none")
    logits = {item["label"]: item["score"] for item in scores}
    expected = 1 / (1 + np.exp(logits["contradiction"] - logits["entailment"]))
    [item] = result_of(api, ZERO_SHOT, "a good film", candidate_labels="bad", hypothesis_template="the film was {} !")
    assert item["score"] == pytest.approx(expected, abs=1e-6)


def test_labels_can_be_a_text_with_commas(api: Send) -> None:
    """A text is split at commas and stripped, as in the transformers pipeline; labels in a list can contain commas."""
    split, listed = (result_of(api, ZERO_SHOT, "x", candidate_labels=labels) for labels in (" good,bad ,, ", ["good", "bad"]))
    assert split == listed
    assert [item["label"] for item in result_of(api, ZERO_SHOT, "x", candidate_labels=["good, bad"])] == ["good, bad"]


@pytest.mark.parametrize(
    ("path", "parameters", "value"),
    [
        *((ZERO_SHOT, {"candidate_labels": labels}, r"`parameters\.candidate_labels`") for labels in ([], " , ", ["good", " "])),
        (ZERO_SHOT, {"candidate_labels": ["good", "bad", "good"]}, "items 0 and 2"),
        *(
            (ZERO_SHOT, LABELS | {"hypothesis_template": template}, r"`parameters\.hypothesis_template`")
            for template in ("It is.", "{} {}", "{0.__class__}")
        ),
        (ZERO_SHOT, {"candidate_labels": [" ".join(["good"] * 29)]}, "`good good"),
        (EMBED, {"layers": [-5]}, "`layers` has -5, .* -4, -3, -2, -1;"),
        (EMBED, {"layers": [3]}, "`layers` has 3, "),
        (EMBED, {"layers": [-1, -2, -1]}, r"\[-1, -2, -1\]"),
    ],
)
def test_invalid_labels_and_layers_are_refused(api: Send, path: str, parameters: dict[str, Any], value: str) -> None:
    assert re.search(value, error_of_inputs(api, path, "a good film", **parameters))


@pytest.mark.parametrize("path", ["/ner", "/answer"])
def test_offsets_have_the_requested_unit(api: Send, path: str) -> None:
    text = "a \U0001f600 caf\u00e9 日本 was good\U0001f600 film"
    inputs = text if path == "/ner" else {"question": "good?", "context": text}
    parameters = {"ignore_labels": []} if path == "/ner" else {"top_k": 20}
    units = {"code_points": ("utf-32-le", 4), "utf16": ("utf-16-le", 2), "utf8": ("utf-8", 1)}
    parts = {}
    for unit, (codec, size) in units.items():
        items = result_of(api, path, inputs, offset_unit=unit.upper(), **parameters)
        data = text.encode(codec)
        parts[unit] = [data[item["start"] * size : item["end"] * size].decode(codec) for item in items]
        assert parts[unit] == [item["word"] if path == "/ner" else item["answer"] for item in items]
    assert parts["code_points"] == parts["utf16"] == parts["utf8"]
    assert any("\U0001f600" in part or "日" in part for part in parts["utf8"])
