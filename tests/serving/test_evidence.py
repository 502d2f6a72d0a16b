"""Bundles that are refused for want of evidence, or for what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from service.bundle.evidence_policy import EvidencePolicy, agreement_range
from service.bundle.files import MANIFEST_FILE, load_bundle
from service.bundle.graph_spec import Evidence
from service.cli import main
from service.errors import BundleError
from service.serving.build import build
from service.settings import Settings


def measured(folder: Path, name: str = "measured", **evidence: Any) -> Path:
    """Writes a tiny bundle whose one graph has this evidence."""
    path = tiny.bundle(folder, name)
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    manifest["graphs"][0]["evidence"] |= {"samples": 18} | evidence
    (path / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return path


@pytest.mark.parametrize("flags", [{}, {"require_evidence": True}, {"min_agreement": 0.9}, {"min_agreement": 0.95}])
def test_a_bundle_with_enough_evidence_is_served(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Evidence at the floor is enough, and without a floor none is asked for."""
    measured(tmp_path, label_agreement=0.95)

    assert ["measured"] == list(build(Settings(models=tmp_path, **flags)).registry.models)


@pytest.mark.parametrize(
    ("evidence", "figures", "warned"),
    [
        ({"label_agreement": 0.97}, [], True),
        ({"label_agreement": 0.98}, [], False),
        ({"label_agreement": 0.9, "samples": 0}, [], False),
        ({"label_agreement": 0.9, "spans": 100, "span_agreement": 0.99}, [], False),
        ({"label_agreement": 1.0, "spans": 100, "span_agreement": 0.9}, [], True),
        ({"label_agreement": 0.9}, [{"name": "accuracy", "checkpoint": 0.9, "graphs": {"cpu/fp32": 0.892}}], False),
        ({"label_agreement": 0.9}, [{"name": "accuracy", "checkpoint": 0.9, "graphs": {"cpu/fp32": 0.88}}], True),
        ({"label_agreement": 0.9}, [{"name": "accuracy", "checkpoint": 0.9, "graphs": {"cuda/fp16": 0.9}}], True),
    ],
)
def test_a_graph_that_answers_otherwise_is_warned_of(
    tmp_path: Path, evidence: dict[str, Any], figures: list[Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, below 98 %; of entities and answers their F1 counts, and figures of labeled data that are near the checkpoint's stand above samples."""
    path = measured(tmp_path, **evidence)
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    (path / MANIFEST_FILE).write_text(json.dumps(manifest | {"figures": figures}), encoding="utf-8")
    build(Settings(models=(tmp_path,)))

    assert warned == ("THE MODEL measured ANSWERS NOT QUITE AS ITS CHECKPOINT: of its graph cpu/fp32 answers agree on" in caplog.text)


def test_a_graph_that_was_tried_and_is_not_there_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, with the reason; who asks for it is refused with the reason too. Manifests that lack the field omit nothing."""
    path = measured(tmp_path)
    build(Settings(models=(tmp_path,)))
    assert "was tried" not in caplog.text
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    omitted = [{"provider": "cpu", "precision": "int8", "reason": "it moves the outputs by 0.5."}]
    (path / MANIFEST_FILE).write_text(json.dumps(manifest | {"omitted": omitted}), encoding="utf-8")
    build(Settings(models=(tmp_path,)))

    assert "the model measured is served as cpu/fp32: int8 was tried at its export, and it moves the outputs by 0.5." in caplog.text
    with pytest.raises(BundleError, match=r"no graph for provider `cpu` and precision `int8`; .* At its export int8 was tried: it moves"):
        build(Settings(models=(tmp_path,), precision="int8"))


@pytest.mark.parametrize(("samples", "share", "low", "high"), [(18, 1.0, 0.824, 1.0), (368, 0.98, 0.960, 0.990), (100, 0.5, 0.404, 0.596)])
def test_few_samples_say_little(samples: int, share: float, low: float, high: float) -> None:
    """Wilson's interval of 95 % confidence, as tables have it."""
    counts = {"nodes": 1, "fusions": {}, "quantized": {}, "worst_abs_error": 0.0, "worst_row_error": 0.0}
    found = agreement_range(Evidence(samples=samples, label_agreement=share, **counts))

    assert (low, high) == pytest.approx(found, abs=5e-4)


def test_without_a_floor_no_evidence_is_asked_for(models: Path) -> None:
    """By default a bundle without a word of evidence is served, as before."""
    assert ["tiny"] == list(build(Settings(models=models)).registry.models)


@pytest.mark.parametrize(
    ("flags", "named"), [({"require_evidence": True}, "--require-evidence is set"), ({"min_agreement": 0.0}, "--min-agreement is 0.0")]
)
def test_a_bundle_without_evidence_is_refused_when_asked(models: Path, flags: dict[str, Any], named: str) -> None:
    """The message names bundle, graph, setting, and what to do; a floor of 0 is a floor too."""
    with pytest.raises(BundleError) as error:
        build(Settings(models=models, **flags))

    facts = ("bundle `tiny`", "cpu/fp32", "no evidence (0 parity inputs)", named, "export it again")
    assert [] == [fact for fact in facts if fact not in error.value.message]


def test_a_bundle_below_the_floor_is_refused(tmp_path: Path) -> None:
    """The message names bundle, its figure, the floor, and what to do."""
    measured(tmp_path, label_agreement=0.9444)

    with pytest.raises(BundleError) as error:
        build(Settings(models=tmp_path, min_agreement=0.99))

    facts = ("bundle `measured`", "0.9444 of 18 parity inputs", "--min-agreement, which is 0.99", "--precision fp32", "--max-int8-error")
    assert [] == [fact for fact in facts if fact not in error.value.message]


def test_the_floor_is_for_the_graph_that_is_served(tmp_path: Path) -> None:
    """Another graph of the bundle may be below it."""
    [graph] = load_bundle(measured(tmp_path, label_agreement=0.5)).manifest.graphs
    other = graph.model_copy(update={"evidence": graph.evidence.model_copy(update={"label_agreement": 1.0})})
    floor = EvidencePolicy(min_agreement=0.99)

    floor.check("measured", other)
    with pytest.raises(BundleError):
        floor.check("measured", graph)


@pytest.mark.parametrize("value", ["1.01", "-0.1", "nan", "high"])
def test_a_floor_that_is_no_share_is_a_usage_error(models: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    """Exit code 2, naming the flag."""
    assert 2 == main(["check", "--models", str(models), f"--min-agreement={value}"])
    assert "--min-agreement" in capsys.readouterr().err


def test_a_refused_bundle_ends_the_command_with_1(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, no traceback; the flag needs no value."""
    assert 1 == main(["check", "--models", str(models), "--require-evidence"])
    assert capsys.readouterr().err.startswith("bert-serve: bundle `tiny`, graph cpu/fp32: its manifest has no evidence")


def test_the_embedded_bundles_have_evidence() -> None:
    """What is in the repository passes its own floor."""
    embedded = Settings(models=Path(__file__).parents[2] / "models", require_evidence=True, min_agreement=0.5)

    assert 6 == len(build(embedded).registry.models)
