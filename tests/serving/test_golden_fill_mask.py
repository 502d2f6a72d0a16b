"""Fill-mask equals the reference: stored logits decode to the tokens and sequences of the transformers pipeline.

Scores are compared with the exact softmax of the same logits. The pipeline sums 30,522 entries in float32, with an error of up
to 1.5e-5. A row is rebuilt from the 100 best logits, the targets, and a constant tail of equal mass.
"""

import math
from typing import Any

import numpy as np
import pytest

from bertserve.service.tasks import fill_mask
from golden import cases
from support.bundles import STEPS, included

CASES = cases.load_cases("fill_mask")
FILL = included("fill-mask")
FLOOR = 0.9


def rebuilt(mask: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns float32 [vocabulary] with the stored logits; all other entries are one constant that preserves the log-sum-exp."""
    logits_by_token = dict([*map(tuple, mask["best"]), *map(tuple, mask.get("targets", []))])
    rest = math.exp(mask["logsumexp"]) - sum(math.exp(logit) for logit in logits_by_token.values())
    row = np.full(mask["vocabulary"], math.log(max(rest, 1e-30) / (mask["vocabulary"] - len(logits_by_token))), dtype=np.float32)
    row[list(logits_by_token)] = list(logits_by_token.values())
    return row


def decode_masks(request: fill_mask.FillMaskInput, masks: list[dict[str, Any]]) -> list[Any]:
    """Returns the results of stored logits, after a check that the windows equal the golden file's."""
    encodings, (tokens,) = FILL.encode(request).encodings, FILL.tokenizer.tokenize([request.text])
    places = [place for place, id_ in enumerate(tokens.ids) if FILL.tokenizer.spec.mask is not None and id_ == FILL.tokenizer.spec.mask.id]
    assert len(places) == len(masks)
    if "window" in masks[0]:
        cuts = [place - encoding.masks[0] + encoding.start for place, encoding in zip(places, encodings, strict=True)]
        assert cuts == [mask["window"]["first"] for mask in masks]
    logits = [rebuilt(mask)[None] for mask in masks]
    rows = [{"logits": row} for row in logits] if "window" in masks[0] else [{"logits": np.concatenate(logits)}]
    return list(FILL.decode(request, rows))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_stored_logits_decode_to_the_reference_tokens(case: dict[str, Any]) -> None:
    body = FILL.parse(case["request"])
    results = [decode_masks(request, masks) for request, masks in zip(body.task_inputs(FILL.manifest), case["masks"], strict=True)]
    answers = case["answer"] if body.is_list else [case["answer"]]
    for masks, scores, expected, actual in zip(case["masks"], case["scores"], answers, results, strict=True):
        expected_masks, actual_masks = (expected, actual) if len(masks) > 1 else ([expected], [actual])
        for per_mask, want, actual_mask in zip(scores, expected_masks, actual_masks, strict=True):
            assert [item["score"] for item in actual_mask] == [pytest.approx(score, abs=1e-6) for score in per_mask]
            keys = ("token", "token_str", "sequence")
            assert [[item[key] for key in keys] for item in actual_mask] == [[item[key] for key in keys] for item in want]


@pytest.mark.parametrize("step", STEPS)
def test_the_embedded_bundle_agrees_with_the_checkpoint(step: int) -> None:
    """The served graph has the best token of float32 for at least 90 % of the masks without a near tie."""
    same = count = 0
    for case in CASES[::step]:
        for request, masks in zip(FILL.parse(case["request"]).task_inputs(FILL.manifest), case["masks"], strict=True):
            encodings = FILL.encode(request).encodings
            logits = np.concatenate([row["logits"] for row in FILL.rows(encodings)])
            for mask, row in zip(masks, logits, strict=True):
                first, second = (math.exp(logit - mask["logsumexp"]) for _, logit in mask["best"][:2])
                if first - second >= 0.1:
                    same, count = same + (int(row.argmax()) == mask["best"][0][0]), count + 1
    print(f"\nembedded fill-mask bundle: best token as fp32 in {same} of {count} masks")

    assert same / count >= FLOOR
