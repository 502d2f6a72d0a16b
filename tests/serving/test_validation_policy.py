"""Bundles that are refused because of a missing or an insufficient validation report."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.bundle.files import load_bundle
from bertserve.service.bundle.graph_spec import Agreement, GraphSpec
from bertserve.service.bundle.validation_policy import check_report, has_low_agreement, other_int8_instructions
from bertserve.service.errors import StartError
from support import raises_exactly, tiny
from support.app_client import state_of


def agreement(measure: Any, value: float | None, decisions: int, worst: float | None = None) -> Agreement:
    return Agreement(measure=measure, value=value, decisions=decisions, worst=worst)


def bundle_with(folder: Path, **validation: Any) -> Path:
    """Writes a tiny bundle whose graph has this validation report, and returns its path."""
    path = tiny.bundle(folder, "measured")
    as_json = {key: value.model_dump() if isinstance(value, Agreement) else value for key, value in validation.items()}
    return tiny.edit(path, lambda fields: fields["graphs"][0]["validation"].update({"samples": 18} | as_json))


def graph_of(folder: Path, provider: str, precision: str, /, **validation: Any) -> GraphSpec:
    """Returns a graph of a provider with this validation report, by default one of full agreement that was measured on the CPU."""
    [graph] = load_bundle(bundle_with(folder, **{"agreement": agreement("label", 1.0, 18)} | validation)).manifest.graphs
    return graph.model_copy(update={"provider": provider, "precision": precision})


@pytest.mark.parametrize("flags", [{}, {"require_validation": True}, {"min_agreement": 0.9}, {"min_agreement": 0.95}])
def test_a_bundle_with_enough_validation_is_served(tmp_path: Path, flags: dict[str, Any]) -> None:
    """An agreement equal to the floor is enough. Without a floor, no report is required."""
    bundle_with(tmp_path, agreement=agreement("label", 0.95, 18))

    assert list(state_of(tmp_path, **flags).registry.models) == ["measured"]


@pytest.mark.parametrize(
    ("validation", "metrics", "has_warning"),
    [
        ({"agreement": agreement("label", 0.97, 18)}, [], True),
        ({"agreement": agreement("label", 0.98, 18)}, [], False),
        ({"agreement": None}, [], False),
        ({"agreement": agreement("span_f1", 0.99, 18)}, [], False),
        ({"agreement": agreement("span_f1", 0.9, 18)}, [], True),
        ({"agreement": agreement("label", float("nan"), 18)}, [], True),
        ({"agreement": agreement("label", 0.9, 18)}, [{"name": "accuracy", "checkpoint": 0.9, "graphs": {"cpu/fp32": 0.892}}], False),
        ({"agreement": agreement("label", 0.9, 18)}, [{"name": "accuracy", "checkpoint": 0.9, "graphs": {"cpu/fp32": 0.88}}], True),
        ({"agreement": agreement("label", 0.9, 18)}, [{"name": "accuracy", "checkpoint": 0.9, "graphs": {"cuda/fp16": 0.9}}], True),
    ],
)
def test_a_graph_with_low_agreement_is_logged(
    tmp_path: Path, validation: dict[str, Any], metrics: list[Any], has_warning: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The start logs an agreement below 98 % of the task's measure, unless metrics on labeled data are near the checkpoint's."""
    tiny.edit(bundle_with(tmp_path, **validation), lambda fields: fields.update(metrics=metrics))
    state_of((tmp_path,))

    assert ("cpu/fp32" in caplog.text) == has_warning


def test_a_graph_that_the_export_omitted_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = bundle_with(tmp_path)
    state_of((tmp_path,))
    assert "int8" not in caplog.text
    omissions = [{"provider": "cpu", "precision": "int8", "reason": "it moves the outputs by 0.5."}]
    tiny.edit(path, lambda fields: fields.update(omitted=omissions))
    state_of((tmp_path,))

    assert "int8" in caplog.text
    assert "it moves the outputs by 0.5." in caplog.text
    with raises_exactly(StartError, match=r"`cpu` .*`int8`; .*: it moves the outputs by 0\.5\."):
        state_of((tmp_path,), precision="int8")


@pytest.mark.parametrize(
    ("flags", "name"), [({"require_validation": True}, "--require-validation"), ({"min_agreement": 0.0}, "--min-agreement is 0.0")]
)
def test_a_bundle_without_required_validation_is_refused(models: Path, flags: dict[str, Any], name: str) -> None:
    with raises_exactly(StartError) as error:
        state_of(models, **flags)

    facts = ("bundle `tiny`", "cpu/fp32", "(0 samples)", name, "bert-export")
    assert [fact for fact in facts if fact not in error.value.message] == []


EMBEDDED = Path(__file__).parents[2] / "models"


def test_the_embedded_bundles_have_validation_with_the_agreement_of_their_task() -> None:
    bundles = {path.name: load_bundle(path) for path in EMBEDDED.iterdir() if path.is_dir()}
    assert len(bundles) == 7
    for name, bundle in bundles.items():
        for graph in bundle.manifest.graphs:
            check_report(name, graph, required=True)
            assert graph.validation.agreement.measure == {"embed": "cosine", "ner": "span_f1", "rerank": "spearman"}.get(name, "label")


@pytest.mark.parametrize("report", [None, agreement("span_f1", None, 0)])
def test_a_floor_needs_an_agreement(tmp_path: Path, report: Agreement | None) -> None:
    bundle_with(tmp_path, agreement=report)

    with raises_exactly(StartError, match="`measured`"):
        state_of(tmp_path, min_agreement=0.0)
    assert list(state_of(tmp_path, require_validation=True).registry.models) == ["measured"]


@pytest.mark.parametrize(
    ("report", "floor", "is_served"),
    [
        (agreement("cosine", 0.995, 13, 0.97), 0.99, True),
        (agreement("cosine", 0.985, 13, 0.97), 0.99, False),
        (agreement("spearman", 0.7, 269), 0.9, False),
        (agreement("set_f1", 0.95, 100), 0.9, True),
        (agreement("span_f1", float("nan"), 100), 0.0, False),
    ],
)
def test_a_floor_applies_to_the_measure_of_the_task(tmp_path: Path, report: Agreement, floor: float, is_served: bool) -> None:
    graph = graph_of(tmp_path, "cpu", "fp32", agreement=report)
    with nullcontext() if is_served else raises_exactly(StartError, match=f" {report.value:.4f} on {report.decisions} of 18 "):
        check_report("measured", graph, min_agreement=floor)


@pytest.mark.parametrize(("precision", "low"), [("fp32", False), ("fp16", False), ("int8", True)])
def test_int8_without_decisions_has_a_low_agreement(tmp_path: Path, precision: str, low: bool) -> None:
    """The logits of a float graph are within a bound. For int8, only the agreement shows that the rounding does no harm."""
    assert low is has_low_agreement(graph_of(tmp_path, "cpu", precision, agreement=agreement("span_f1", None, 0)))


@pytest.mark.parametrize("policy", [{"required": True}, {"min_agreement": 0.5}])
@pytest.mark.parametrize(
    ("provider", "precision", "measured_on", "name"),
    [
        ("cuda", "fp16", "cpu", "on cpu in fp32, "),
        ("cuda", "fp32", "cpu", "on cpu in fp32, "),
        ("tensorrt", "fp16", "cpu", "on cpu in fp32, "),
        ("tensorrt", "fp16", "cuda", "on cuda in fp16, "),
        ("cuda", "fp16", "cuda", None),
        ("tensorrt", "fp16", "tensorrt", None),
        ("cpu", "int8", "cpu", None),
    ],
)
def test_a_report_counts_only_for_the_measured_provider_and_precision(
    tmp_path: Path, policy: dict[str, Any], provider: str, precision: str, measured_on: str, name: str | None
) -> None:
    graph = graph_of(tmp_path, provider, precision, provider=measured_on)
    if name is None:
        check_report("tiny", graph, **policy)
        return
    with raises_exactly(StartError) as error:
        check_report("tiny", graph, **policy)
    facts = (name, f" on {provider} in {precision}, ", f" DIR --update` on a machine with {provider}")
    assert [fact for fact in facts if fact not in error.value.message] == []


@pytest.mark.parametrize(
    ("precision", "measured_with", "own", "differs"),
    [
        ("int8", ["avx2", "avx512_vnni"], ["avx2", "fma"], True),
        ("int8", ["avx2"], ["avx2", "avx_vnni"], True),
        ("int8", ["avx2", "avx512_vnni"], ["avx2", "avx_vnni"], False),
        ("int8", ["avx2", "avx512_vnni"], ["asimd", "asimddp"], False),
        ("int8", ["avx2"], [], False),
        ("int8", None, ["avx2"], False),
        ("fp32", ["avx2", "avx512_vnni"], ["avx2"], False),
    ],
)
def test_a_cpu_that_adds_int8_products_differently_is_detected(
    tmp_path: Path, precision: str, measured_with: list[str] | None, own: list[str], differs: bool
) -> None:
    """Without VNNI, x86 adds pairs of int8 products in 16 bits. An unknown CPU counts as one that adds them in the same way."""
    speed = None if measured_with is None else {"cpu": "Some", "instructions": measured_with, "threads": 1, "timings": []}
    graph = graph_of(tmp_path, "cpu", precision, speed=speed)

    assert list(other_int8_instructions(graph, own)) == (measured_with if differs else [])


@pytest.mark.parametrize(("flags", "is_logged"), [({}, False), ({"require_validation": True}, True), ({"min_agreement": 0.5}, True)])
def test_int8_that_was_measured_with_other_instructions_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: dict[str, Any], is_logged: bool
) -> None:
    """Only if a validation report is required. The model is served, because its int8 scales allow for the difference."""
    monkeypatch.setattr("bertserve.service.models.loading.cpu_instructions", lambda: ("avx2", "fma"))
    state_of(EMBEDDED / "sentiment", **flags)

    assert ("avx512_vnni, avx512_bf16; this CPU has avx2, fma" in caplog.text) == is_logged
