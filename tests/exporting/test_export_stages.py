"""Single stages of an export: results and errors of trace, optimize and quantize, and the faults that parity catches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.cpu import fuse_for_cpu
from bertserve.export.errors import ExportError
from bertserve.export.int8.quantize import quantize
from bertserve.export.onnx_trace import trace
from bertserve.export.validation.comparison import Comparison, Reference
from bertserve.export.validation.reference import sample_reference
from bertserve.export.validation.served_graph import MAX_FULL_LENGTH, ModelAnswer, ServedGraph, model_sample_inputs
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import Outputs, Precision
from bertserve.service.bundle.manifest import TokenizerSpec
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from support import raises_exactly, tiny
from support.bundles import Array, edit_constant, engine_of, exported
from support.checkpoints import POSITIONS, bert, service_tokenizer
from support.staged import ARCHITECTURES, LABELS
from support.task_runs import encode

pytestmark = pytest.mark.torch


class Faulty:
    """An engine whose logits have a fault."""

    def __init__(self, engine: OnnxEngine, fault: Callable[[Array], Array]) -> None:
        self.engine = engine
        self.fault = fault

    def run(self, encodings: Sequence[Encoding], *, small_outputs: bool = False) -> list[Outputs]:
        return [{"logits": self.fault(row["logits"])} for row in self.engine.run(encodings, small_outputs=small_outputs)]


@dataclass(frozen=True)
class Stages:
    """A checkpoint, its bundle, and the reference outputs for parity."""

    loaded: Checkpoint
    bundle: Bundle
    reference: Reference

    def compare(
        self, engine: Any = None, spec: TokenizerSpec | None = None, precision: Precision = "fp32", reference: Reference | None = None
    ) -> float:
        """Compares the fp32 graph, or the given engine, with the checkpoint; returns the largest error of a logit."""
        graph = self.bundle.graph("cpu").model_copy(update={"precision": precision})
        tokenizer = Tokenizer(self.bundle.tokenizer_path, spec or self.bundle.manifest.tokenizer)
        graph_run = ServedGraph(graph, engine or engine_of(self.bundle), tokenizer, self.loaded)
        comparison = Comparison(graph_run, reference or self.reference)
        comparison.check()
        return float(comparison.measured()["worst_abs_error"])

    def faulty(self, fault: Callable[[Array], Array]) -> Faulty:
        return Faulty(engine_of(self.bundle), fault)


@pytest.fixture(name="stages", scope="module")
def all_stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    source = bert(tmp_path_factory.mktemp("stages"))
    loaded = load_checkpoint(str(source))
    return Stages(loaded, exported(source), sample_reference(loaded))


@pytest.mark.parametrize("name", ["token_type_ids", "attention_mask"])
def test_unused_type_ids_are_dropped_and_an_unused_mask_is_an_error(stages: Stages, tmp_path: Path, name: str) -> None:
    class Deaf(type(stages.loaded.model)):
        def forward(self, **inputs: Any) -> Any:
            return super().forward(**{key: value for key, value in inputs.items() if key != name})

    deaf = replace(stages.loaded, model=Deaf(stages.loaded.model.config))
    if name == "token_type_ids":
        assert [spec.name for spec in trace(deaf, tmp_path / "raw.onnx")[0]] == ["input_ids", "attention_mask"]
    else:
        with raises_exactly(ExportError, match=r"\['input_ids', 'token_type_ids'\]"):
            trace(deaf, tmp_path / "raw.onnx")


def test_a_graph_with_nothing_to_quantize_is_an_error(tmp_path: Path) -> None:
    onnx.save(tiny.graph(), str(tmp_path / "source.onnx"))

    with raises_exactly(ExportError, match="no matrix"):
        quantize(tmp_path / "source.onnx", tmp_path / "int8.onnx", tmp_path, [], [], max_error=1.0, quick=False)
    assert not (tmp_path / "int8.onnx").exists()


@pytest.mark.parametrize("positions", [300, MAX_FULL_LENGTH + 1000])
@pytest.mark.parametrize("task", ARCHITECTURES)
def test_one_sample_has_the_models_maximum_length(tmp_path: Path, task: str, positions: int) -> None:
    """Its text has at most `MAX_FULL_LENGTH` tokens, because PyTorch needs too much memory for more."""
    labels = LABELS.get(task, tiny.LABELS)
    source = bert(tmp_path, architecture=ARCHITECTURES[task], labels=labels, positions=positions, model_max_length=positions)
    checkpoint = load_checkpoint(str(source))

    def count(text: str) -> int:
        return len(checkpoint.hf_tokenizer(text, add_special_tokens=False)["input_ids"])

    longest = model_sample_inputs(checkpoint, count)[-1]
    tokens = count(getattr(longest, "text_pair", None) or longest.text)
    if positions <= MAX_FULL_LENGTH:
        encodings = encode(TASKS[task], longest, service_tokenizer(checkpoint, tmp_path), checkpoint).encodings
        assert max(map(len, encodings)) == positions < tokens
    else:
        assert MAX_FULL_LENGTH / 2 < tokens <= MAX_FULL_LENGTH


def with_one(table: Array, row: int) -> Array:
    """Sets the first value of a row to 1."""
    table[row, 0] = 1
    return table


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("classifier.weight/transposed", lambda weight: weight[:, ::-1], id="labels in another order"),
        pytest.param("layer.1.output.LayerNorm.weight", lambda weight: weight * np.float32(1.01), id="a norm of one layer scaled"),
        pytest.param("token_type_embeddings.weight", lambda table: with_one(table, 1), id="the second segment"),
        pytest.param("position_embeddings.weight", lambda table: with_one(table, POSITIONS - 1), id="the last position"),
        pytest.param("word_embeddings.weight", lambda table: with_one(table, 1), id="the unknown token"),
    ],
)
def test_a_fault_in_the_weights_is_caught(stages: Stages, tmp_path: Path, name: str, change: Callable[[Array], Array]) -> None:
    graph = stages.bundle.graph("cpu")
    edit_constant(stages.bundle.path / graph.file, name, change, tmp_path / "faulty.onnx")

    with raises_exactly(ExportError, match=r"fp32 .* 1e-04 or 2e-05 .* \(\d+ characters\)"):
        stages.compare(engine_of(stages.bundle, graph, tmp_path / "faulty.onnx"))


def change_reference(reference: Reference, change: Callable[[int, Array], Array]) -> Reference:
    """Returns a reference with other logits: `change` gets the index of the request and its logits."""
    rows = [[{"logits": change(i, row["logits"])} for row in answer.rows] for i, answer in enumerate(reference.predictions) if answer]
    return replace(reference, predictions=[ModelAnswer(outputs) for outputs in rows])


def logits_of(reference: Reference) -> list[Array]:
    return [row["logits"] for answer in reference.predictions if answer for row in answer.rows]


def test_the_limit_grows_with_large_logits(stages: Stages) -> None:
    reference = change_reference(stages.reference, lambda i, logits: 800 * logits)
    assert min(float(np.abs(logits).max()) for logits in logits_of(reference)) > 300

    def off(error: float) -> Faulty:
        return stages.faulty(lambda logits: 800 * logits + np.float32(error))

    assert stages.compare(off(2e-3), reference=reference) == pytest.approx(2e-3, abs=3e-3)
    with raises_exactly(ExportError, match=r" 5\.0\de-01, .* [\d.e+]+: .*\d characters"):
        stages.compare(off(0.5), reference=reference)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_nan_output_of_the_checkpoint_is_caught(stages: Stages, precision: Precision) -> None:
    last = len(stages.reference.inputs) - 1
    reference = change_reference(stages.reference, lambda i, logits: logits * np.float32("nan") if i == last else logits)

    with raises_exactly(ExportError, match=f"{precision} .*nan"):
        stages.compare(precision=precision, reference=reference)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda spec: {"single": spec.single[:-1]}, id="no closing token"),
        pytest.param(lambda spec: {"pair": tuple(piece.model_copy(update={"type_id": 0}) for piece in spec.pair)}, id="no second segment"),
        pytest.param(lambda spec: {"max_length": spec.max_length - 1}, id="a token less of room"),
    ],
)
def test_a_fault_in_the_tokenizer_spec_is_caught(stages: Stages, change: Callable[[TokenizerSpec], dict[str, Any]]) -> None:
    spec = stages.bundle.manifest.tokenizer
    with raises_exactly(ExportError, match="characters"):
        stages.compare(spec=spec.model_copy(update=change(spec)))


def test_int8_passes_with_errors_that_are_small_relative_to_the_standard_deviation(stages: Stages) -> None:
    deviation = float(np.concatenate(logits_of(stages.reference)).std())

    def off(share: float) -> Faulty:
        return stages.faulty(lambda logits: logits + np.float32(share * deviation))

    assert stages.compare(off(0.1), precision="int8") > 0.09 * deviation
    with raises_exactly(ExportError, match=r"int8 .* 0\.5 of .* 0\.2 and 3"):
        stages.compare(off(0.5), precision="int8")
    with raises_exactly(ExportError, match="int8"):
        stages.compare(stages.faulty(lambda logits: logits * np.float32(1e3)), precision="int8")


@pytest.mark.full_grid
def test_a_float32_fault_is_caught_if_only_int8_is_exported(stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 graph is always compared, because int8's wide limit would hide its faults."""

    def faulty(source: Path, target: Path, loaded: Checkpoint) -> dict[str, int]:
        counts = fuse_for_cpu(source, target, loaded)
        edit_constant(target, "classifier.bias", lambda bias: bias + np.float32(1e-2))
        return counts

    monkeypatch.setattr("bertserve.export.cpu.fuse_for_cpu", faulty)

    with raises_exactly(ExportError, match=r"fp32 .* 1\.00e-02, "):
        exported(bert(tmp_path), precisions=("int8",))
    assert not (tmp_path / "models").exists()
