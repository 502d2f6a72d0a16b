"""If a graph fails, the bundle has the other graphs; command, manifest and card name the omitted graph and the reason."""

from pathlib import Path
from typing import Any

import pytest

from bertserve.export import pipeline
from bertserve.export.errors import ExportError
from bertserve.export.gpu import build
from bertserve.export.validation.comparison import measure_graph
from bertserve.service.bundle.files import CARD_FILE, Bundle, load_bundle
from bertserve.service.errors import StartError
from support import raises_exactly
from support.bundles import FAST, Run, assert_exit, left_in

pytestmark = pytest.mark.torch

Key = tuple[str, str]


class Fault:
    """Makes one graph fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def build(self, name: str, error: Exception) -> None:
        """Makes a function that creates a graph write half a file and fail."""

        def fail(_: Path, path: Path, *__: Any) -> None:
            path.write_bytes(b"half a graph")
            raise error

        self.patch.setattr(build, name, fail)

    def agree(self, key: Key, *, loads: bool = True) -> None:
        """Makes the comparison of a graph with the checkpoint fail, or already its session."""

        def measure(folder: Path, graph: Any, *args: Any) -> Any:
            if (graph.provider, graph.precision) == key:
                if loads:
                    raise ExportError("its logits are off by 3.0.")
                (folder / graph.file).write_bytes(b"no graph")
            return measure_graph(folder, graph, *args)

        self.patch.setattr(pipeline, "measure_graph", measure)


@pytest.fixture(name="fault")
def a_fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


ALL = ("--provider", "cpu,cuda,tensorrt", "--precision", "fp32,fp16")
FP16_LOST = {("cpu", "fp32"), ("cuda", "fp32"), ("tensorrt", "fp32"), ("tensorrt", "fp16")}


def graphs(bundle: Bundle) -> set[Key]:
    return {(graph.provider, graph.precision) for graph in bundle.manifest.graphs}


@pytest.mark.parametrize("stage", ["build", *(pytest.param(stage, marks=pytest.mark.full_grid) for stage in ("load", "crash", "agree"))])
def test_a_failed_fp16_graph_is_omitted_and_the_others_are_kept(run: Run, source: Path, output: Path, fault: Fault, stage: str) -> None:
    if stage in ("load", "agree"):
        fault.agree(("cuda", "fp16"), loads=stage == "agree")
    else:
        fault.build("convert_to_fp16", ExportError("it overflows.") if stage == "build" else RuntimeError("bad node\nof many"))
    result = run(source, *ALL)
    bundle = load_bundle(output / "tiny-bert")
    [omitted] = bundle.manifest.omitted

    assert_exit(4, result, "cuda/fp16", "cuda/fp32", omitted.reason)
    assert graphs(bundle) == FP16_LOST
    assert (omitted.provider, omitted.precision) == ("cuda", "fp16")
    assert bundle.graph("cuda").precision == "fp32"
    assert {path.name for path in bundle.path.glob("*.onnx*")} == {file.file for graph in bundle.manifest.graphs for file in graph.files}
    assert omitted.reason in (bundle.path / CARD_FILE).read_text(encoding="utf-8")
    if stage == "crash":
        assert omitted.reason == "RuntimeError: bad node"


def test_a_failed_fp16_graph_is_replaced_by_fp32_if_it_is_the_only_one(run: Run, source: Path, output: Path, fault: Fault) -> None:
    fault.agree(("cuda", "fp16"))
    code, _ = run(source, "--provider", "cuda", "--precision", "fp16")
    manifest = load_bundle(output / "tiny-bert").manifest
    assert (code, [(graph.provider, graph.precision, graph.default) for graph in manifest.graphs]) == (4, [("cuda", "fp32", True)])


def test_a_failed_provider_does_not_affect_the_others(run: Run, source: Path, output: Path, fault: Fault) -> None:
    """All graphs of a provider need its fp32 graph. The error for the missing provider has the reason."""
    fault.build("fuse_for_cuda", RuntimeError("an operator is missing"))
    assert_exit(4, run(source, *ALL), "cuda ", "RuntimeError: an operator is missing")
    bundle = load_bundle(output / "tiny-bert")

    assert graphs(bundle) == {("cpu", "fp32"), ("tensorrt", "fp32"), ("tensorrt", "fp16")}
    assert [(omitted.provider, omitted.precision) for omitted in bundle.manifest.omitted] == [("cuda", "fp32"), ("cuda", "fp16")]
    assert list(bundle.path.glob("model.cuda.*")) == []
    with raises_exactly(StartError, match="an operator is missing"):
        bundle.graph("cuda")


@pytest.mark.parametrize("provider", ["cpu", "cuda", "tensorrt"])
def test_a_failed_required_fp32_graph_leaves_no_bundle(source: Path, output: Path, run: Run, fault: Fault, provider: str) -> None:
    fault.agree((provider, "fp32"))
    assert_exit(1, run(source, "--provider", provider if provider != "cpu" else "cpu,cuda", *FAST), "3.0")
    assert left_in(output) == []


def test_an_export_fails_if_all_providers_fail(source: Path, output: Path, run: Run, fault: Fault) -> None:
    fault.build("fuse_for_cuda", ExportError("no CUDA."))
    fault.agree(("tensorrt", "fp32"))
    assert_exit(1, run(source, "--provider", "cuda,tensorrt", *FAST), "3.0")
    assert left_in(output) == []


def test_a_full_disk_ends_the_export(source: Path, output: Path, run: Run, fault: Fault) -> None:
    """The graph is not omitted, because the other files could not be written either."""
    fault.build("convert_to_fp16", OSError(28, "No space left on device"))
    assert_exit(1, run(source, *ALL), "No space left on device")
    assert left_in(output) == []
