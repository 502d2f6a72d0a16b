"""`bert-export analyze` of models: from a tiny configuration to the report, within the time budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bertserve.export import cli
from bertserve.export.analyze import sweep
from bertserve.export.analyze.timing import AnalysisTiming
from bertserve.export.errors import CheckpointError
from bundles import Analyze
from checkpoints import bert
from fakes import ManualClock

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)

TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 100}
TIMES = {"latency_p90_ms": 2.0, "runs": 3, "batch": 8, "latency_cpu_ms": 1.0, "cpu_ms": 1.5, "memory_mib": 7.0}


def config(folder: Path, **fields: Any) -> Path:
    """Writes the configuration of a tiny model without weights, and returns its path."""
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 40} | TINY | fields), encoding="utf-8")
    return path


@pytest.mark.full_grid
def test_a_configuration_is_measured_with_its_variants(tmp_path: Path, analyze: Analyze) -> None:
    """fp32 and int8 run at two lengths, and a variant with half the layers at one. FLOPs follow the shape."""
    report, printed = analyze(config(tmp_path), "--lengths", "8,40", "--by", "layers", "--batch", "2", "--seconds", "1000")
    points = [(point["axis"], point["shape"]["layers"], point["precision"]) for point in report["points"]]

    assert [("base", 2, "fp32"), ("base", 2, "int8"), ("layers", 1, "fp32"), ("layers", 1, "int8")] == points
    base, quantized, shallow, _ = report["points"]
    assert ([8, 40], [40]) == tuple([timing["length"] for timing in point["timings"]] for point in (base, shallow))
    assert all(timing["latency_ms"] > 0 and timing["texts_per_s"] > 0 and timing["runs"] >= 3 for timing in base["timings"])
    assert base["flops"] == {name: 2 * value for name, value in shallow["flops"].items()}
    assert 2 * (4 * 32 * 32 + 2 * 32 * 64) * 2 == base["flops"]["linear"]
    assert quantized["graph_bytes"] != base["graph_bytes"]
    assert [] == report["omitted"]
    assert {"length.svg", "layers.svg", "analysis.json"} == {path.name for path in (tmp_path / "report").iterdir()}
    assert "by length and precision" in printed
    assert "by layers" in printed


def test_an_invalid_configuration_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fields, reason in (
        ({"model_type": "nothing"}, "`nothing`"),
        ({"num_attention_heads": 3}, "BertConfig (2 layers, 3 heads, hidden 32"),
    ):
        assert 1 == cli.main(["analyze", str(config(tmp_path, **fields))])
        assert reason in capsys.readouterr().err


@pytest.mark.full_grid
def test_a_variant_that_fails_is_listed_as_omitted(tmp_path: Path, analyze: Analyze, monkeypatch: pytest.MonkeyPatch) -> None:
    def timings(path: Any, graph: Any, pad_id: Any, lengths: Any, **_: Any) -> list[AnalysisTiming]:
        return [AnalysisTiming(length=length, latency_ms=2.0, texts_per_s=9.0, **TIMES) for length in lengths]

    make = sweep.random_checkpoint

    def refuse_one_layer(config: Any) -> Any:
        if config.num_hidden_layers == 1:
            raise CheckpointError("no encoder of one layer.")
        return make(config)

    monkeypatch.setattr(sweep, "measure_apart", timings)
    monkeypatch.setattr(sweep, "random_checkpoint", refuse_one_layer)
    report, printed = analyze(config(tmp_path), "--by", "layers,heads", "--precision", "fp32", "--seconds", "1000")

    assert [("base", 2), ("heads", 1), ("heads", 4)] == [(point["axis"], point["shape"]["heads"]) for point in report["points"]]
    assert ["layers: 1 layer, 2 heads, hidden 32, feed-forward 64: no encoder of one layer."] == report["omitted"]
    assert "layers: 1 layer, 2 heads" in printed
    assert " 2.0 times " in printed
    rows = [line.split() for line in printed[printed.index("by heads") :].splitlines()[2:5]]
    assert ["1", "2", "4"] == [row[0] for row in rows]
    assert ["1.00"] * 3 == [row[-1] for row in rows]


def test_a_checkpoint_is_measured_with_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, config = sweep._base(str(bert(tmp_path)))
    drawn, _ = sweep._base("bert-tiny")

    assert ("feature-extraction", 32) == (checkpoint.task, config.hidden_size)
    assert checkpoint.source != drawn.source == "random weights"
    assert all(torch.isfinite(parameter).all() for parameter in drawn.model.parameters())


def test_steps_that_would_exceed_the_budget_are_skipped() -> None:
    """The first step always starts. Another step starts only if the duration of the longest step so far still fits."""
    clock = ManualClock()
    begun = []
    for name, fits in sweep.steps_within(10, "abcde", clock):
        begun.append((name, fits))
        clock.now += {"a": 4, "b": 3}[name] if fits else 0

    assert [("a", True), ("b", True), ("c", False), ("d", False), ("e", False)] == begun
    assert [("a", True)] == list(sweep.steps_within(0.001, "a", clock))
