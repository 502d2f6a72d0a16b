"""Model families with each head of transformers: exports in fp32 and int8, and outputs that match PyTorch.

`make test` runs a sample, `make test-all` every family with every head.
"""

from pathlib import Path
from typing import Any

import pytest

import bertserve.service.cli
from bertserve.export.checkpoint.checkpoint import count_flops
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.validation.comparison import MAX_ABS_ERROR
from families import CASES, FAMILIES, LENGTH, SAMPLE
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
    assert pytest.approx(1, abs=1e-3) == validation.agreement.value
    assert validation.samples >= 10
    assert LENGTH == found.bundle.manifest.tokenizer.max_length


def test_int8_errors_are_within_the_limit(measured: tuple[str, str, Measured]) -> None:
    found, most = measured[2], most_of_int8(measured[1])
    validation = found.int8_graph.validation

    assert validation.quantized["MatMulIntegerToFloat"] >= 1 + (measured[1] != "multiple-choice")
    assert 0 < validation.quantization_error < most
    assert 1.0 == validation.quantization_limit  # of the export, for later checks of the bundle
    assert 0 < found.int8 < most


def test_the_service_reproduces_the_stored_answer(measured: tuple[str, str, Measured], capsys: pytest.CaptureFixture[str]) -> None:
    assert all(graph.batch_invariant for graph in measured[2].bundle.manifest.graphs)
    assert 0 == bertserve.service.cli.main(["check", "--models", str(measured[2].bundle.path.parent)])
    assert capsys.readouterr().out.endswith("cpu/int8: ok\n")


@pytest.mark.parametrize(
    ("family", "task", "linear", "quadratic"),
    [
        # the pooler and the labels of a text read only [CLS], and the vocabulary is only for masks, so they do not grow with the text
        *(("BERT", task, 32768, 256) for task in ("text-classification", "multiple-choice", "fill-mask")),
        ("BERT", "token-classification", 32768 + 320, 256),
        ("BERT", "question-answering", 32768 + 128, 256),
        # one layer runs three times, after a factorized embedding
        ("ALBERT", "text-classification", 50176, 384),
        # no linear layers; twice as many relative positions as tokens are projected and scored, and half of the scores are kept
        ("XLNet", "text-classification", 40960, 512),
    ],
)
def test_only_layers_that_grow_with_the_text_count(tmp_path: Path, family: str, task: str, linear: int, quadratic: int) -> None:
    """The number of floating-point operations of a text has two terms, which runs of the model give."""
    flops = count_flops(load_checkpoint(str(FAMILIES[family].save(tmp_path / "model", task)), LoadOptions(task=task)))

    assert (linear, quadratic) == (flops.linear, flops.quadratic)


@pytest.mark.parametrize(
    "family",
    [family if family in ("DeBERTa", "DeBERTa v3", "XLNet") else pytest.param(family, marks=pytest.mark.full_grid) for family in FAMILIES],
)
def test_the_terms_predict_the_operations_of_longer_texts(tmp_path: Path, family: str) -> None:
    task = next(task for name, task in CASES if name == family)
    loaded = load_checkpoint(str(FAMILIES[family].save(tmp_path / "model", task)), LoadOptions(task=task))
    flops = count_flops(loaded)
    more = flops.linear * (LENGTH - 24) + flops.quadratic * (LENGTH**2 - 24**2)

    assert pytest.approx(more, rel=1e-9) == loaded.count_operations(LENGTH) - loaded.count_operations(24)
