"""Text classification equals the reference: stored logits decode to the results of the transformers pipeline, and the bundle agrees.

`tests/golden/make_text_classification.py` wrote the file of cases; these tests need no checkpoint.
"""

from typing import Any

import numpy as np
import pytest

from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.tasks import classify
from bertserve.service.tasks.decoding import activate
from bertserve.service.tasks.step import TextInput
from golden import cases
from support.app_client import assert_same
from support.bundles import STEPS, included
from support.fakes import Head
from support.task_runs import classify_input, decode

CASES = cases.load_cases("text_classification")
SENTIMENT = included("sentiment")
HEAD = Head(("negative", "positive"))
NEAR_TIE = 0.1
FLOOR = 0.98


def requests_of(case: dict[str, Any]) -> list[TextInput[classify.ClassifyParameters]]:
    """Returns the task requests of a case, parsed from JSON as in the service."""
    return list(SENTIMENT.parse(case["request"]).task_inputs(SENTIMENT.manifest))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_stored_logits_decode_to_the_reference_answer(case: dict[str, Any]) -> None:
    requests = requests_of(case)
    answers = [
        decode(classify, request, [{"logits": np.array(row, dtype=np.float32)} for row in windows], HEAD)
        for request, windows in zip(requests, case["logits"], strict=True)
    ]
    assert_same(answers, case["answer"], tolerance=1e-6)


def test_every_text_has_as_many_windows_as_in_the_reference() -> None:
    for case in CASES:
        counts = [len(SENTIMENT.encode(request).encodings) for request in requests_of(case)]
        assert counts == [len(windows) for windows in case["logits"]], case["id"]


@pytest.mark.parametrize("step", STEPS)
def test_the_embedded_bundle_agrees_with_the_checkpoint(step: int) -> None:
    clear = matches = ties = 0
    outputs_of: dict[bytes, Outputs] = {}  # many cases have the same text
    for case in CASES[::step]:
        for request, windows in zip(requests_of(case), case["logits"], strict=True):
            best = classify_input(request.text, request.text_pair, window=request.parameters.window, stride=request.parameters.stride)
            encodings = SENTIMENT.encode(best).encodings
            for encoding in encodings:
                if encoding.ids.tobytes() not in outputs_of:
                    outputs_of[encoding.ids.tobytes()] = SENTIMENT.engine.run([encoding])[0]
            rows = [outputs_of[encoding.ids.tobytes()] for encoding in encodings]
            expected = [{"logits": np.array(row, dtype=np.float32)} for row in windows]
            probabilities = np.sort(activate(np.array(windows, dtype=np.float32), "softmax").mean(axis=0))
            same = decode(classify, best, rows, HEAD)[0]["label"] == decode(classify, best, expected, HEAD)[0]["label"]
            if probabilities[-1] - probabilities[-2] >= NEAR_TIE:
                clear, matches = clear + 1, matches + same
            else:
                ties += 1
    print(f"\nembedded sentiment bundle: {matches} of {clear} labels agree with fp32; {ties} near ties left out")

    assert matches / clear >= FLOOR
