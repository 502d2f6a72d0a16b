"""PyTorch's two exporters: their graphs have the same form, and dynamo is tried first.

test_export_families.py also uses dynamo. Most other tests use TorchScript, which takes a tenth of the time (tests/conftest.py).
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bertserve.export import cpu, onnx_trace
from bertserve.export.build_input import Tracer
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import ExportError
from bertserve.export.gpu.build import fuse_for_cuda
from bertserve.export.graph import rewrite
from support import raises_exactly
from support.families import FAMILIES

pytestmark = pytest.mark.torch

BOTH: tuple[Tracer, ...] = ("dynamo", "torchscript")


@pytest.fixture(name="small", scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    source = FAMILIES["BERT"].save(tmp_path_factory.mktemp("small") / "checkpoint", "text-classification", num_hidden_layers=1)
    return load_checkpoint(str(source))


def test_both_graphs_have_the_same_form(small: Checkpoint, tmp_path: Path) -> None:
    properties = {}
    for tracer in BOTH:
        raw, on_cpu, on_cuda = (tmp_path / f"{tracer}{suffix}.onnx" for suffix in ("", "-cpu", "-cuda"))
        inputs, description = onnx_trace.trace(small, raw, tracer)
        graphs = cpu.optimize(raw, on_cpu, small, description), fuse_for_cuda(raw, on_cuda, small)
        counts = [Counter(node.op_type for node in rewrite.load(path).graph) for path in (on_cpu, on_cuda)]
        properties[tracer] = inputs, counts, [graph.inputs for graph in graphs], [graph.validation.fusions for graph in graphs]

    assert properties["dynamo"] == properties["torchscript"]


def test_torchscript_is_the_fallback_for_dynamo(small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, TorchScript traces a model that dynamo cannot export. If dynamo is requested, or both fail, the error has the causes."""
    failures = [torch.compiler.is_exporting]

    class Untraceable(type(small.model)):
        def forward(self, **inputs: Any) -> Any:
            if any(is_traced() for is_traced in failures):
                raise ValueError("This operator is unknown.\nMore.")
            return super().forward(**inputs)

    untraceable = dataclasses.replace(small, model=Untraceable(small.model.config))
    monkeypatch.setattr(onnx_trace, "TRACERS", BOTH)

    onnx_trace.trace(untraceable, tmp_path / "raw.onnx")
    assert rewrite.load(tmp_path / "raw.onnx").graph.opset_imports[""] == onnx_trace.OPSETS["torchscript"]
    with raises_exactly(ExportError, match=r" dynamo: ValueError: This operator is unknown\.$"):
        onnx_trace.trace(untraceable, tmp_path / "raw.onnx", "dynamo")
    failures.append(torch.jit.is_tracing)
    with raises_exactly(ExportError, match=r" dynamo: ValueError: This .* torchscript: ValueError: This operator is unknown\.$"):
        onnx_trace.trace(untraceable, tmp_path / "raw.onnx")


@pytest.mark.full_grid
def test_a_graph_for_only_one_length_is_refused(small: Checkpoint, tmp_path: Path) -> None:
    """If the code computes with the length as a number, dynamo exports a graph for one length."""

    class Counting(type(small.model)):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: Any) -> Any:
            ones = torch.ones(int(input_ids.shape[1]), dtype=torch.int64)
            return super().forward(input_ids, attention_mask * ones, **inputs)

    counting = dataclasses.replace(small, model=Counting(small.model.config))
    with raises_exactly(ExportError, match=r" dynamo .* \['input_ids', "):
        onnx_trace.trace(counting, tmp_path / "raw.onnx", "dynamo")
