"""Model families with each head of transformers: exports in fp32 and int8, and outputs that match PyTorch.

`make test` runs a sample, `make test-all` every family with every head.
"""

from __future__ import annotations

from typing import Any

import pytest

import bertserve.service.cli
from bertserve.export.validation.comparison import MAX_ABS_ERROR
from families import CASES, FAMILIES, HEADS, LENGTH, SAMPLE
from grid import Measured, measure, most_of_int8

pytestmark = pytest.mark.torch


def parameter(case: tuple[str, str]) -> Any:
    """Returns a case as a parameter; `make test` runs only the cases of the sample."""
    return pytest.param(case, id="-".join(case).replace(" ", "-"), marks=() if case in SAMPLE else pytest.mark.full_grid)


@pytest.fixture(name="measured", params=map(parameter, CASES), scope="module")
def measured_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Measured]:
    """Returns a family, a task, and their measurements."""
    family, task = request.param
    return family, task, measure(family, task, tmp_path_factory.mktemp("family"))


def test_fp32_outputs_match_pytorch(measured: tuple[str, str, Measured]) -> None:
    """Logits of all lengths, alone and padded, are within 1e-4 of PyTorch's, and the decoded results of the samples agree.

    The maximum length is the size of the position table, or the tokenizer's limit if positions are relative.
    """
    found = measured[2]
    validation = found.fp32_graph.validation

    assert found.error <= MAX_ABS_ERROR["fp32"]
    assert validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]
    assert validation.agreement is not None
    assert pytest.approx(1, abs=1e-3) == validation.agreement.value
    assert validation.samples >= 10
    assert LENGTH == found.bundle.manifest.tokenizer.max_length


def test_int8_errors_are_within_the_limit(measured: tuple[str, str, Measured]) -> None:
    found, most = measured[2], most_of_int8(measured[1])
    validation = found.int8_graph.validation

    assert validation.quantized["MatMulIntegerToFloat"] >= 1 + (measured[1] != "multiple-choice")
    assert 0 < validation.quantization_error < most
    assert 0 < found.int8 < most


def test_the_service_reproduces_the_stored_answer(measured: tuple[str, str, Measured], capsys: pytest.CaptureFixture[str]) -> None:
    assert all(graph.batch_invariant for graph in measured[2].bundle.manifest.graphs)
    assert 0 == bertserve.service.cli.main(["check", "--models", str(measured[2].bundle.path.parent)])
    assert capsys.readouterr().out.endswith("cpu/int8: ok\n")


def test_every_family_has_every_head_that_transformers_has() -> None:
    missing = {(name, task) for name in FAMILIES for task in HEADS} - set(CASES)
    decoders = {(name, task) for name in ("GPT", "GPT-2", "LLaMA", "T5") for task in ("fill-mask", "multiple-choice")}

    assert missing == decoders | {
        ("XLNet", "fill-mask"),
        ("DeBERTa", "multiple-choice"),
        ("GPT", "token-classification"),
        ("GPT", "question-answering"),
        ("BART", "token-classification"),
        ("BART", "multiple-choice"),
    }
