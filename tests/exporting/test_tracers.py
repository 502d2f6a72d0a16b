"""PyTorch's two exporters: their graphs have the same form, and dynamo is tried first.

Other tests trace with TorchScript, which takes a tenth of the time (`exports_stay_offline_and_trace_quickly` in tests/conftest.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from bertserve.export import cpu, gpu, onnx_trace
from bertserve.export.artifact import Artifact, Tracer
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import GraphError
from bertserve.export.graph import rewrite
from bertserve.export.onnx_trace import Traced
from families import CASES, FAMILIES
from grid import measure, most_of_int8

pytestmark = pytest.mark.torch

BOTH: tuple[Tracer, ...] = ("dynamo", "torchscript")
SCALAR_FIRST = {"XLNet"}  # computes `1.0 - attention_mask` with integers, see below


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The graph of one tracer, and the graphs that were optimized from it."""

    traced: Traced
    raw: Path
    cpu: Artifact
    cuda: Artifact


def graphs(checkpoint: Checkpoint, folder: Path, tracer: Tracer) -> Graphs:
    """Traces a checkpoint and optimizes the graph for the CPU and for CUDA."""
    raw = folder / tracer / "raw.onnx"
    raw.parent.mkdir(parents=True)
    traced = onnx_trace.trace(checkpoint, raw, tracer)
    return Graphs(traced, raw, cpu.optimize(raw, checkpoint, traced.form), gpu.fuse(raw, raw.with_name("cuda.onnx"), checkpoint))


@pytest.fixture(name="small", scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    source = FAMILIES["BERT"].save(tmp_path_factory.mktemp("small") / "checkpoint", "text-classification", num_hidden_layers=1)
    return load_checkpoint(str(source))


@pytest.fixture(name="both", scope="module")
def graphs_of_both(small: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[Tracer, Graphs]:
    return {tracer: graphs(small, tmp_path_factory.mktemp("both"), tracer) for tracer in BOTH}


def test_both_graphs_have_the_same_form(both: dict[Tracer, Graphs]) -> None:
    script, program = both["torchscript"], both["dynamo"]
    counts = [
        [Counter(node.op_type for node in rewrite.load(path).graph) for path in (traced.cpu.path, traced.raw.with_name("cuda.onnx"))]
        for traced in both.values()
    ]

    assert counts[0] == counts[1]
    assert script.cpu.report.fusions == program.cpu.report.fusions
    assert 1 == program.cpu.report.fusions["Attention"]
    assert dataclasses.replace(script.cuda, path=program.cuda.path) == program.cuda
    assert script.traced.inputs == program.traced.inputs
    assert ("torchscript opset 17", "dynamo opset 18") == (script.traced.form, program.traced.form)
    assert script.cpu.form.removeprefix("torchscript opset 17") == program.cpu.form.removeprefix("dynamo opset 18")


def test_a_graph_has_no_paths_of_the_machine(both: dict[Tracer, Graphs]) -> None:
    """An exported program records the source line of each operator, which is not written. All operators are ONNX's own."""
    model = ir.load(both["dynamo"].raw)

    assert b"site-packages" not in both["dynamo"].raw.read_bytes()
    assert {"": 18} == model.opset_imports
    assert {""} == {node.domain for node in model.graph}
    assert [["rows", "length"]] * 3 == [[axis.value for axis in value.shape] for value in model.graph.inputs]


def failing(*_: Any) -> Any:
    raise torch.onnx.OnnxExporterError("It is step 2 of 3.\nMore.") from ValueError("This operator is unknown.\nMore.")


def test_torchscript_is_the_fallback_for_dynamo(small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, TorchScript traces a model that dynamo cannot export. If dynamo is requested, or both fail, the error has the causes."""
    monkeypatch.setattr(onnx_trace, "TRACERS", BOTH)
    monkeypatch.setattr(onnx_trace, "_export_program", failing)

    assert "torchscript opset 17" == onnx_trace.trace(small, tmp_path / "raw.onnx").form
    with pytest.raises(GraphError, match=r" dynamo: ValueError: This operator is unknown\.$"):
        onnx_trace.trace(small, tmp_path / "raw.onnx", "dynamo")
    monkeypatch.setattr(onnx_trace, "_export_script", failing)
    with pytest.raises(GraphError, match=r" dynamo: ValueError: This .* torchscript: ValueError: This operator is unknown\.$"):
        onnx_trace.trace(small, tmp_path / "raw.onnx")


@pytest.mark.full_grid
def test_a_graph_for_only_one_length_is_refused(small: Checkpoint, tmp_path: Path) -> None:
    """If the code computes with the length as a number, dynamo exports a graph for one length."""

    class Counting(type(small.model)):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: Any) -> Any:
            ones = torch.ones(int(input_ids.shape[1]), dtype=torch.int64)
            return super().forward(input_ids, attention_mask * ones, **inputs)

    counting = dataclasses.replace(small, model=Counting(small.model.config))
    with pytest.raises(GraphError, match=r" dynamo .* \['input_ids', "):
        onnx_trace.trace(counting, tmp_path / "raw.onnx", "dynamo")


@pytest.mark.full_grid
@pytest.mark.parametrize(("family", "task"), CASES)
def test_every_family_is_exported_with_the_default_tracer(family: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_trace, "TRACERS", BOTH)
    found = measure(family, task, tmp_path)

    assert ("torchscript" if family in SCALAR_FIRST else "dynamo") == found.fp32_graph.form.partition(" ")[0]
    assert found.error <= 1e-4
    agreement = found.fp32_graph.validation.agreement
    assert agreement is not None
    assert pytest.approx(1, abs=1e-3) == agreement.value
    assert all(graph.batch_invariant for graph in found.bundle.manifest.graphs)
    assert 0 < found.int8 < most_of_int8(task)
