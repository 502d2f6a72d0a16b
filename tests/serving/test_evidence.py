"""Bundles that are refused for want of evidence, or for what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from service.bundle.evidence_policy import EvidencePolicy
from service.bundle.files import MANIFEST_FILE, load_bundle
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

    assert 4 == len(build(embedded).registry.models)
