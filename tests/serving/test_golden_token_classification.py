"""Entities equal the reference: stored logits decode to the entities of the transformers pipeline.

Deliberate differences are compared with `corrected`, the result of the pipeline without its mistake. "##" and not a comparison
of lengths tells that a token continues a word. A combining mark that the tokenizer strips belongs to the letter before
it. `word` is a slice of the caller's text. For texts with several windows, the reference is brute force.
"""

from typing import Any

import numpy as np
import pytest

from bertserve.service.tasks import token_classification
from bertserve.service.tasks.decoding import activate
from bertserve.service.tasks.step import TextInput
from golden import cases
from support.bundles import STEPS, included
from support.task_runs import ner_input

CASES = cases.load_cases("token_classification")
NER = included("ner")
LABELS = len(NER.manifest.labels)
FLOOR = 0.9


def answer(request: TextInput[token_classification.TokenClassificationParameters], windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the entities of stored logits, which are placed between the special tokens."""
    batch, (tokens,) = NER.encode(request), NER.tokenizer.tokenize([request.text])
    cuts = [range(w["first"], w["first"] + w["count"]) for w in windows if w["count"]]
    assert [encoding.ids[1:-1].tolist() for encoding in batch.encodings] == [tokens.ids[span.start : span.stop] for span in cuts]
    assert batch.read_spans == (tokens.read_spans(cuts) if len(cuts) > 1 else ())
    rows = []
    for encoding, window in zip(batch.encodings, windows, strict=False):
        logits = np.zeros((len(encoding), LABELS), dtype=np.float32)
        logits[encoding.start : encoding.start + window["count"]] = window["logits"]
        rows.append({"logits": logits})
    return list(NER.decode(request, rows))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_stored_logits_decode_to_the_reference_entities(case: dict[str, Any]) -> None:
    """Labels, offsets and order are equal, and scores agree to 1e-6; `word` is the text between the offsets."""
    body = NER.parse(case["request"])
    requests, expected = list(body.task_inputs(NER.manifest)), case.get("corrected", case["answer"])
    actual = [answer(request, windows) for request, windows in zip(requests, case["windows"], strict=True)]

    assert body.to_response(actual) == (actual if body.is_list else actual[0])
    for request, expected_text, actual_text in zip(requests, expected if body.is_list else [expected], actual, strict=True):
        keys = [key for key in ("entity", "entity_group", "index", "start", "end") if expected_text and key in expected_text[0]]
        assert [[item[key] for key in keys] for item in actual_text] == [[item[key] for key in keys] for item in expected_text]
        assert [item["score"] for item in actual_text] == [pytest.approx(item["score"], abs=1e-6) for item in expected_text]
        assert [item["word"] for item in actual_text] == [request.text[item["start"] : item["end"]] for item in actual_text]


@pytest.mark.parametrize("step", STEPS)
def test_the_embedded_bundle_agrees_with_the_checkpoint(step: int) -> None:
    """Entity spans of the served graph and of float32 have an F1 of at least 0.9, for texts without near ties."""
    right = num_actual = num_expected = texts = 0
    for case in CASES[::step]:
        for request, windows in zip(NER.parse(case["request"]).task_inputs(NER.manifest), case["windows"], strict=True):
            logits = [np.array(window["logits"], dtype=np.float32) for window in windows if window["count"]]
            best = [np.sort(activate(x, "softmax")) for x in logits]
            if not best or min((x[:, -1] - x[:, -2]).min() for x in best) < 0.1:
                continue
            plain = ner_input(request.text, stride=request.parameters.stride)
            rows = NER.rows(NER.encode(plain).encodings)
            actual = NER.decode(plain, rows)
            a, b = ({(e["entity_group"], e["start"], e["end"]) for e in entities} for entities in (answer(plain, windows), actual))
            right, num_actual, num_expected, texts = right + len(a & b), num_actual + len(b), num_expected + len(a), texts + 1
    f1 = 2 * right / (num_actual + num_expected)
    print(f"\nembedded ner bundle: entity F1 against fp32 {f1:.4f} over {texts} texts with {num_expected} entities")

    assert f1 >= FLOOR
