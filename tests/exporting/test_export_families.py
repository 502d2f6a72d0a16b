"""Model families with each head of transformers: exports in fp32 and int8, and outputs that match PyTorch.

`make test` runs a sample, `make test-all` every family with every head, with the default tracers and with TorchScript only.
"""

from pathlib import Path
from typing import Any

import pytest

import bertserve.service.cli
from bertserve.export import onnx_trace
from bertserve.export.checkpoint.checkpoint import count_flops
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.validation.comparison import MAX_ABS_ERROR
from support.families import CASES, FAMILIES, LENGTH, SAMPLE
from support.grid import Measured, measure, most_of_int8

pytestmark = pytest.mark.torch


TRACERS = {"default": tuple(onnx_trace.OPSETS), "torchscript": ("torchscript",)}
SCALAR_FIRST = {"XLNet"}  # computes `1.0 - attention_mask` with integers, which dynamo does not export, so TorchScript is the fallback
Case = tuple[str, str, str, Measured]  # family, task, tracer, and their measurements


def parameter(family: str, task: str, tracer: str) -> Any:
    """Returns a case as a parameter; `make test` runs only the cases of the sample."""
    name = f"{family}-{task}-{tracer}".replace(" ", "-")
    return pytest.param((family, task, tracer), id=name, marks=() if (family, task, tracer) in SAMPLE else pytest.mark.full_grid)


@pytest.fixture(name="measured", params=[parameter(*case, tracer) for case in CASES for tracer in TRACERS], scope="module")
def measured_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, task, tracer = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_trace, "TRACERS", TRACERS[tracer])
        return family, task, tracer, measure(family, task, tmp_path_factory.mktemp("family"))


def test_fp32_outputs_match_pytorch(measured: Case) -> None:
    """Logits of all lengths, alone and padded, are within 1e-4 of PyTorch's, and the decoded results of the samples agree.

    The maximum length is the size of the position table, or the tokenizer's limit if positions are relative.
    """
    family, _, tracer, result = measured
    validation = result.fp32_graph.validation

    assert validation.opset == onnx_trace.OPSETS["dynamo" if tracer == "default" and family not in SCALAR_FIRST else "torchscript"]
    assert result.error <= MAX_ABS_ERROR["fp32"]
    assert validation.worst_abs_error <= MAX_ABS_ERROR["fp32"]
    assert validation.agreement.value == pytest.approx(1, abs=1e-3)
    assert validation.samples >= 10
    assert result.bundle.manifest.tokenizer.max_length == LENGTH


def test_int8_errors_are_within_the_limit(measured: Case) -> None:
    _, task, _, result = measured
    validation = result.int8_graph.validation

    assert validation.quantized["MatMulIntegerToFloat"] >= 1 + (task != "multiple-choice")
    assert 0 < validation.quantization_error < most_of_int8(task)
    assert validation.quantization_limit == 1.0  # the limit of the export, stored for later checks of the bundle
    assert 0 < result.int8 < most_of_int8(task)


def test_the_service_reproduces_the_stored_answer(measured: Case, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = measured[3].bundle
    assert all(graph.batch_invariant for graph in bundle.manifest.graphs)
    assert bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)]) == 0
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

    assert (flops.linear, flops.quadratic) == (linear, quadratic)


@pytest.mark.parametrize(
    "family",
    [family if family in ("DeBERTa", "DeBERTa v3", "XLNet") else pytest.param(family, marks=pytest.mark.full_grid) for family in FAMILIES],
)
def test_the_terms_predict_the_operations_of_longer_texts(tmp_path: Path, family: str) -> None:
    task = next(task for name, task in CASES if name == family)
    checkpoint = load_checkpoint(str(FAMILIES[family].save(tmp_path / "model", task)), LoadOptions(task=task))
    flops = count_flops(checkpoint)
    more = flops.linear * (LENGTH - 24) + flops.quadratic * (LENGTH**2 - 24**2)

    assert checkpoint.count_operations(LENGTH) - checkpoint.count_operations(24) == pytest.approx(more, rel=1e-9)
